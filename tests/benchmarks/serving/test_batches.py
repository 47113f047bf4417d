from __future__ import annotations

import pytest
import torch

from benchmarks.serving import batches
from benchmarks.serving.__main__ import Serving


def serving_of(*argv: str) -> Serving:
    return Serving(batches.parse(argv), {})


def test_short_prompts_fit_the_base() -> None:
    small = serving_of("--prompts", "16", "64", "--answer", "8")
    assert small.short_prompt == 64
    assert small.max_len >= 64 + 8
    other = serving_of("--prompts", "16", "64", "--answer", "8", "--short-prompt", "256")
    assert other.short_prompt == 256
    assert other.max_len >= 256 + 8


def test_a_cpu_serves_float32_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert serving_of("--device", "cpu").dtype is torch.float32
    assert serving_of("--device", "cpu", "--dtype", "bfloat16").dtype is torch.bfloat16
    assert serving_of().dtype is torch.bfloat16


def test_a_base_has_its_own_shape() -> None:
    with pytest.raises(SystemExit):
        batches.parse(["--shape", "1b", "--base", "base"])


def test_the_median_of_the_rounds_decides() -> None:
    calm = {batches.ALONE: [0.1] * 199 + [5.0], batches.BESIDE: [0.11] * 200}
    late = {batches.ALONE: [0.1], batches.BESIDE: [0.3]}
    found = batches.p99_ratio([calm, late, calm])
    assert found == {
        "median": 1.1,
        "rounds": [1.1, 3.0, 1.1],
        "together": 1.1,
        "samples": 401,
        "goal": 1.15,
        "is_met": True,
    }
    assert not batches.p99_ratio([calm, late, late])["is_met"]
    assert not batches.p99_ratio([{batches.ALONE: [0.1], batches.BESIDE: []}])["is_met"]
