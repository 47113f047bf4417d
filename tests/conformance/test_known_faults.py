"""Faults that users of other engines have reported, tested with real weights and kernels.

Pure scheduling faults are in `tests/simulation/test_known_faults.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.loop.assembly import AssembledEngine
from loramux.engine.protocol.messages import Add, Finished, SamplingParams, StatsRequest
from tests.conformance.parity import Recorder, Subject, assert_parity, make_subject, run
from tests.conformance.tiny_models import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
BROKEN = "f" * 64


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject("llama", tmp_path_factory.mktemp("faults"))


def a_request(subject: Subject, name: str | None, num_prompt: int, max_tokens: int = 5, **fields: object) -> Add:
    generator = torch.Generator().manual_seed(num_prompt)
    return Add(
        sequence_id=f"{name}-{num_prompt}",
        prompt=tuple(torch.randint(2, VOCAB_SIZE, (num_prompt,), generator=generator).tolist()),
        max_tokens=max_tokens,
        sampling=GREEDY,
        digest=None if name is None else subject.digests[name],
        **fields,
    )


def poisoned(assembled: AssembledEngine) -> AssembledEngine:
    """Fill the pool with NaN (all bits set), so that reads of unwritten memory are noticed."""
    assembled.views.raw.fill_(0xFF)
    return assembled


def page_bytes(assembled: AssembledEngine) -> int:
    return assembled.views.geometry.total_page_bytes


def test_a_reused_page_keeps_nothing_of_its_former_owner(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of an evicted adapter leaked into the adapter of lower rank that reused its memory."""
    size = page_bytes(subject.assemble())
    # The largest adapter and one request fill the pool, so each adapter evicts the previous one.
    pool = (subject.num_pages["r64"] + 6) * size
    assembled = poisoned(subject.assemble(pool_bytes=pool, max_resident_adapters=2))
    recorder = Recorder(assembled.engine, monkeypatch)
    for name in ("r64", "r1", "r3", "r64", "r31", None, "by-layer", "r16"):
        add = a_request(subject, name, 40)
        recorder.by_sequence.clear()
        assembled.engine.add(b"", add)
        run(assembled.engine)
        assert_parity(subject, name, add, recorder.by_sequence[add.sequence_id])
    assert assembled.engine.stats(StatsRequest(call_id="")).num_adapter_evictions >= 5
    assembled.adapters.close()


def test_one_adapter_that_is_not_finite_poisons_nobody(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter with NaN that passes validation anyway ends only its own requests."""
    sound = subject.adapters[subject.digests["r8"]]
    payload = np.full_like(sound.payload, 0xFF)
    subject.adapters[BROKEN] = PackedAdapter(BROKEN, sound.layout, sound.scales, payload)
    assembled = poisoned(subject.assemble())
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = {name: a_request(subject, name, 20 + index) for index, name in enumerate([None, "r8", "r16"])}
    broken = Add(sequence_id="broken", prompt=(5,) * 18, max_tokens=9, sampling=GREEDY, digest=BROKEN)
    for add in (*asked.values(), broken):
        assembled.engine.add(b"", add)
    ends = {}
    while assembled.engine.has_work:
        assembled.engine.step()
        for outbound in assembled.engine.take_outbox():
            if isinstance(outbound.message, Finished):
                ends[outbound.message.sequence_id] = outbound.message
    assert (ends["broken"].code, ends["broken"].completion_tokens) == ("not_finite", 0)
    for name, add in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[add.sequence_id])
    assembled.adapters.close()
