from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.bench import MAX_ROUNDS, MAX_SECONDS, MIN_ROUNDS, measuring_seconds
from benchmarks.gpu.needs import MetaMemory
from benchmarks.gpu.parts import PARTS

ROOT = Path(__file__).parents[3]


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Perform a dry run in a separate process, because Triton's interpreter has no compiled programs to inspect."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.campaign
@pytest.mark.parametrize("card", ["h100", "h200"])
def test_every_part_is_listed_and_fits(card: str, tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    done = dry_run("--card", card, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    assert document["problems"] == []
    assert list(document["parts"]) == [part.name for part in PARTS]
    assert document["total_s"] < gpu.TOTAL_S
    for part in document["parts"].values():
        assert part["num_rows"] == sum(case["num_rows"] for case in part["cases"]) > 0
        assert all(sum(case["held"].values()) < document["card"]["memory_bytes"] for case in part["cases"])
        assert 0 < part["seconds"] <= part["budget_s"]
    assert out.with_suffix(".md").read_text() == done.stdout[:-1]


@pytest.mark.campaign
def test_part_over_its_time_limit_is_marked() -> None:
    done = dry_run("--card", "h100", "--only", "ceilings", "--seconds", "1")
    assert done.returncode == 1
    assert "| **NO**: 6 s alone, of 1 s |" in done.stdout


def test_measuring_seconds_respect_the_round_and_time_limits() -> None:
    assert measuring_seconds([0.01], 0.0) == pytest.approx((MIN_ROUNDS + 1) * 0.01)
    assert measuring_seconds([1e-6], 0.0) == pytest.approx((MAX_ROUNDS + 1) * 1e-6)
    # The fourth round is the last, because it begins just before the time is up.
    assert measuring_seconds([0.25 * MAX_SECONDS, 0.25 * MAX_SECONDS], 0.05) == pytest.approx(5 * 0.6)


def test_meta_memory_counts_live_and_peak_bytes() -> None:
    memory = MetaMemory()
    with memory:
        kept = torch.empty(1000, device="meta")
        assert memory.restart() == 4000
        view = kept[10:].add_(1.0)
        dropped = torch.empty(500, device="meta") + 1.0
        assert memory.peak == 4000 + 2 * 2000, "both operands, and shared memory counted once"
        assert memory.live == 4000 + 2000
        del dropped
    assert memory.live == 4000
    assert view.shape == (990,)
