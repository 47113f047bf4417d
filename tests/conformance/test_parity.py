"""Logits and greedy tokens equal those of transformers and peft, one request a time and in one mixed batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from loramux.engine.direct_executor import DirectExecutor
from loramux.engine.messages import Add, SamplingParams, StatsRequest
from tests.conformance.parity import Recorder, Subject, assert_parity, make_subject, run
from tests.conformance.tiny_models import PLANS, VOCAB_SIZE

FAMILIES = ["llama", "llama-tied-bias-llama3-rope", "mistral-window", "qwen2", "qwen3"]
PROMPT_LENGTHS = [1, 7, 16, 17, 33, 64, 65, 100, 200, 333, 512, 600]
FEW_TOKENS = 6
MANY_TOKENS = 45
"""Enough that the first sequence still runs when the last prompt is through, so that all meet in one step."""


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))


def requests(subject: Subject, max_tokens: int) -> dict[str, tuple[str | None, Add]]:
    """One request for each adapter, and the others for the base; prompts of 1 to 600 tokens."""
    names: list[str | None] = [None, "r1", "r3", None, "r4", "r8", None, "r31", "by-layer", None, "r16", "r64"]
    generator = torch.Generator().manual_seed(11)
    made = {}
    for index, (name, length) in enumerate(zip(names, PROMPT_LENGTHS, strict=True)):
        prompt = torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()
        add = Add(
            sequence_id=f"{index}-{name}-{length}",
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            digest=None if name is None else subject.digests[name],
        )
        made[add.sequence_id] = (name, add)
    return made


def test_each_request_alone(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = subject.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    for sequence_id, (name, add) in requests(subject, FEW_TOKENS).items():
        assembled.engine.add(b"", add)
        run(assembled.engine)
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    assembled.loader.close()


def test_one_mixed_batch(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = subject.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = requests(subject, MANY_TOKENS)
    for _, add in asked.values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    stats = assembled.engine.stats(StatsRequest(call_id=""))
    assert stats.max_adapters_in_step == len(PLANS)
    # What is resident is what was packed, to the page.
    assert stats.num_adapter_pages == sum(subject.num_pages.values())
    assert stats.num_kv_pages == 0
    assembled.engine.check_integrity()
    assembled.loader.close()


def test_base_rows_are_bit_equal_to_the_same_batch_without_adapters(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed, plain = subject.assemble(), subject.assemble()
    recorder = Recorder(mixed.engine, monkeypatch)
    for _, add in requests(subject, FEW_TOKENS).values():
        mixed.engine.add(b"", add)
    run(mixed.engine)
    executor = plain.engine._executor
    assert isinstance(executor, DirectExecutor)
    num_compared = num_changed = 0
    for batch, logits in recorder.steps:
        expected = executor.logits(replace(batch, slots=np.full_like(batch.slots, -1)))
        for row, sample_row in enumerate(batch.sample_rows.tolist()):
            if batch.slots[sample_row] < 0:
                assert torch.equal(logits[row], expected[row])
                num_compared += 1
            else:
                num_changed += not torch.equal(logits[row], expected[row])
    assert num_compared == 4 * FEW_TOKENS
    assert num_changed == len(PLANS) * FEW_TOKENS
    mixed.loader.close()
    plain.loader.close()
