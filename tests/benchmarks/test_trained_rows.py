"""The benchmark of trained heads writes its files, but no figures if a logit is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import harness, trained_rows
from benchmarks.answers import CheckError
from benchmarks.trained_rows import HeadBench, main


@pytest.mark.campaign
def test_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "require_idle", lambda is_allowed: 0.5)
    monkeypatch.setattr(trained_rows, "OTHER_BYTES", 1)
    out = tmp_path / "results" / "trained_rows.json"
    tiny = ["--vocabulary", "1000", "--hidden", "64", "--rows", "1", "5", "--rounds", "2", "--threads", "1"]
    assert main([*tiny, "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document.keys() == {"date", "machine", "busy_share", "workload", "check", "bytes", "cases"}
    assert [case["rows"] for case in document["cases"]] == [1, 5]
    assert document["bytes"]["whole head"] >= 1000 * 64 * 2 > document["bytes"]["64 trained tokens"]


def test_a_wrong_logit_stops_the_benchmark() -> None:
    bench = HeadBench(1000, 64, [1000, 7])
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    assert bench.check(x, [0, 1]) < trained_rows.TOLERANCE
    bench.rows[1][1].neg_()
    with pytest.raises(CheckError, match="a logit is wrong"):
        bench.check(x, [0, 1])
