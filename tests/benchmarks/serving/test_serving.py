from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving import batches
from benchmarks.serving.__main__ import main

pytestmark = pytest.mark.campaign

SMALL = (
    "--device cpu --shape tiny --adapters 5 --prompts 16 64 --answer 8 --open 2 --sequences 4 --seconds 1 --shares 0.3"
)


def test_a_small_run_bills_what_its_clients_counted(tmp_path: Path) -> None:
    out = tmp_path / "serving.json"
    assert main([*SMALL.split(), "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["usage"]["reported"] == figures["usage"]["counted"]
    assert figures["HTTP 30% of capacity"]["requests"] > 0
    assert figures["in process closed loop"]["tokens_s"] > 0


def test_a_small_run_beside_a_batch_has_both_figures(tmp_path: Path) -> None:
    out = tmp_path / "batches.json"
    small = SMALL.replace("--shares 0.3", "--repeats 2 --load 0.2 --allow-busy")
    assert batches.main([*small.split(), "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["ttft_p99_ratio"]["median"] > 0
    assert figures["throughput_share"]["share"] > 0
    assert figures["gateway_ms_per_line"] > 0
    assert figures["filled_share"] > 0
    assert figures["round 2"].keys() == set(batches.WAYS)
