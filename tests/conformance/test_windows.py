"""Windowed layers give the same logits as transformers after long contexts, and their pages are freed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from loramux.engine.protocol.messages import Add, SamplingParams, StatsRequest
from tests.conformance.parity import TOLERANCE, Recorder, Subject
from tests.conformance.tiny_models import SMALL_SHAPE, VOCAB_SIZE, make_base

WINDOW = 64
STEP = 256
FEW_TOKENS = 4
LONG = 8000

MAX_PAGES = {"mistral-window": 5, "gemma3": 106, "gemma2": 174}
"""Maximum number of pages that one sequence of LONG tokens takes. Without windows, it would take 501 pages.

Four of Gemma 3's five layers and two of Gemma 2's three layers have windows.
"""


@torch.no_grad()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """The logits of the last FEW_TOKENS positions. The tokens run in chunks, because eager attention is quadratic."""
    cache = DynamicCache(config=model.config)
    for chunk in torch.tensor([tokens]).split(STEP, dim=1):
        logits = model(input_ids=chunk, past_key_values=cache).logits[0]
    assert len(logits) >= FEW_TOKENS
    return logits[-FEW_TOKENS:]


@pytest.mark.parametrize(
    ("family", "num_prompt"),
    [
        pytest.param("mistral-window", 600, id="mistral-window"),
        *(pytest.param(family, LONG, marks=pytest.mark.campaign, id=f"{family}-long") for family in MAX_PAGES),
    ],
)
def test_a_long_context_equals_transformers_and_frees_pages(
    family: str, num_prompt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {**SMALL_SHAPE, "max_position_embeddings": LONG + STEP}
    model = make_base(family, tmp_path, shape, WINDOW).eval()
    assembled = Subject(tmp_path, model, {}, {}, {}).assemble(max_batch_tokens=STEP)
    engine, num_pages = assembled.engine, [0]
    recorder = Recorder(engine, monkeypatch)
    prompt = torch.randint(2, VOCAB_SIZE, (num_prompt,), generator=torch.Generator().manual_seed(2)).tolist()
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    engine.add(b"", Add(sequence_id="one", prompt=tuple(prompt), max_tokens=FEW_TOKENS, sampling=sampling))
    while engine.has_work:
        engine.step()
        num_pages.append(engine.stats(StatsRequest(call_id="")).num_kv_pages)
    ours = torch.stack(recorder.by_sequence["one"])
    theirs = reference_logits(model, [*prompt, *ours.argmax(-1).tolist()[:-1]])
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    assert max(num_pages) <= MAX_PAGES[family]
    engine.check_integrity()
    assembled.adapters.close()


def test_a_window_longer_than_every_context_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_base("mistral-window", tmp_path, SMALL_SHAPE, WINDOW)
    settings = json.loads((tmp_path / "config.json").read_text())
    found = []
    # Larger than any integer that kernels accept.
    for window in (None, 1 << 70):
        (tmp_path / "config.json").write_text(json.dumps({**settings, "sliding_window": window}))
        assembled = Subject(tmp_path, None, {}, {}, {}).assemble()
        recorder = Recorder(assembled.engine, monkeypatch)
        add = Add(sequence_id="one", prompt=tuple(range(2, 80)), max_tokens=2, sampling=SamplingParams(temperature=0.0))
        assembled.engine.add(b"", add)
        while assembled.engine.has_work:
            assembled.engine.step()
        assembled.adapters.close()
        found.append(torch.stack(recorder.by_sequence["one"]))
    assert torch.equal(*found)
