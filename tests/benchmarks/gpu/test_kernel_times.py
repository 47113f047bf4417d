from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.cards import PLANNED
from benchmarks.gpu.kernel_times import MAX_PREFILL_TOKENS, MODELS, Span, contexts_of, prefill_settings, summary
from benchmarks.gpu.prefill import PrefillCase

ROOT = Path(__file__).parents[3]


def test_overlapping_kernels_are_busy_once() -> None:
    spans = [Span("a", 0.0, 10.0), Span("b", 8.0, 12.0), Span("a", 20.0, 24.0)]
    found = summary(spans, num_steps=2)
    assert (found["step_us"], found["busy_us"]) == (12.0, 8.0)
    assert found["kernels"] == {"a": {"us": 7.0, "launches": 1.0}, "b": {"us": 2.0, "launches": 0.5}}


@pytest.mark.campaign
@pytest.mark.parametrize("card", PLANNED)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("is_long", [False, True], ids=["usual", "long"])
def test_every_trace_fits_the_planned_cards(model: str, card: str, is_long: bool) -> None:
    if is_long and model != "llama-3.1-8b":
        pytest.skip("only Llama's long contexts are planned")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.kernel_times", "--model", model, "--dry-run", card]
    done = subprocess.run(
        command + ["--long"] * is_long, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    contexts = contexts_of(is_tiny=False, is_long=is_long)
    for case in (*(case for group in contexts.decodes for case, _ in group), *contexts.prefills):
        assert f"{case}, adapters" in done.stdout


def test_long_prompts_take_several_steps() -> None:
    """A server computes long prompts in parts, and a graph is captured only for small steps."""
    assert prefill_settings(PrefillCase(1, 2048))["max_batch_tokens"] == 2048
    assert prefill_settings(PrefillCase(1, 32768))["max_batch_tokens"] == MAX_PREFILL_TOKENS
