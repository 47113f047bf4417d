from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving import batches
from benchmarks.serving.__main__ import Serving, main

pytestmark = pytest.mark.campaign

SMALL = (
    "--device cpu --shape tiny --adapters 5 --prompts 16 64 --answer 8 --open 2 --sequences 4 --seconds 1 --shares 0.3 "
    "--allow-busy"
)


def test_a_small_run_bills_what_its_clients_counted(tmp_path: Path) -> None:
    out = tmp_path / "serving.json"
    assert main([*SMALL.split(), "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["usage"]["reported"] == figures["usage"]["counted"]
    assert figures["HTTP 30% of capacity"]["requests"] > 0
    assert figures["in process closed loop"]["tokens_s"] > 0
    assert figures["is_complete"]


def test_a_run_whose_bill_is_wrong_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Serving, "_count", lambda self, observed: None)
    out = tmp_path / "serving.json"
    assert main([*SMALL.split(), "--out", str(out)]) == 1
    assert not json.loads(out.read_text())["is_complete"]


def test_a_small_run_beside_a_batch_has_both_figures(tmp_path: Path) -> None:
    out = tmp_path / "batches.json"
    small = SMALL.replace("--shares 0.3", "--repeats 2 --load 0.2")
    assert batches.main([*small.split(), "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["ttft_p99_ratio"]["median"] > 0
    assert figures["ttft_p99_ratio"]["samples"] > 0
    assert figures["throughput_share"]["share"] > 0
    assert figures["gateway_ms_per_line"] > 0
    assert figures["filled_share"] > 0
    assert figures["round 2"].keys() == set(batches.WAYS)
