"""Faults that users of other engines have met, each made impossible; with real weights and kernels.

Those that are a matter of scheduling alone are in `tests/simulation/test_known_faults.py`.
"""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
import torch

from loramux.adapter_store.packing import PackedAdapter
from loramux.engine.assembly import AssembledEngine
from loramux.engine.messages import Abort, Add, Finished, SamplingParams, StatsRequest, StepOutput
from tests.conformance.parity import TOLERANCE, Recorder, Subject, assert_parity, make_subject, run
from tests.conformance.tiny_models import PLANS, VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
BROKEN = "f" * 64
NAMES = [plan.name for plan in PLANS]


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
    """All bits set is NaN: whatever is read without having been written shows."""
    assembled.views.raw.fill_(0xFF)
    return assembled


def page_bytes(assembled: AssembledEngine) -> int:
    return assembled.views.geometry.total_page_bytes


def test_a_reused_page_keeps_nothing_of_its_former_owner(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of an evicted adapter leaked into the next owner of its memory, whose rank was smaller."""
    size = page_bytes(subject.assemble())
    # The largest adapter and one request fill the pool: each evicts the one before.
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
    assembled.loader.close()


def test_one_adapter_that_is_not_finite_poisons_nobody(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation keeps such an adapter out; one that came in all the same ends its own requests only."""
    sound = subject.source.lease(subject.digests["r8"]).packed
    payload = np.full_like(sound.payload, 0xFF)
    subject.source.add(PackedAdapter(BROKEN, sound.layout, sound.scales, payload))
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
    assembled.loader.close()


def assert_greedy(subject: Subject, name: str | None, add: Add, tokens: list[int]) -> None:
    """Each token is the reference's choice after those before it, or equally likely within rounding."""
    expected = subject.reference_logits(name, [*add.prompt, *tokens])[len(add.prompt) - 1 : -1]
    for token, logits in zip(tokens, expected, strict=True):
        assert logits.max() - logits[token] <= 2 * TOLERANCE * logits.abs().max(), add.sequence_id


@pytest.mark.parametrize("num_turns", [60, pytest.param(1500, marks=pytest.mark.campaign)])
def test_aborts_evictions_preemptions_and_shared_prefixes_change_no_answer(subject: Subject, num_turns: int) -> None:
    rng = random.Random(num_turns)
    size = page_bytes(subject.assemble())
    assembled = poisoned(
        subject.assemble(pool_bytes=(subject.num_pages["r64"] + 26) * size, max_resident_adapters=3, max_sequences=5)
    )
    engine = assembled.engine
    prompts = [tuple(rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 90))) for _ in range(3)]
    asked: dict[str, tuple[str | None, Add]] = {}
    tokens: dict[str, list[int]] = defaultdict(list)
    ends: dict[str, Finished] = {}
    for turn in range(num_turns):
        if rng.random() < 0.4:
            name = rng.choice([None, *NAMES])
            add = Add(
                sequence_id=str(turn),
                prompt=rng.choice(prompts),
                max_tokens=rng.randint(1, 24),
                sampling=GREEDY,
                digest=None if name is None else subject.digests[name],
                isolation_key=rng.choice([b"x", b"y"]),
                share_key=rng.choice("ab"),
            )
            asked[str(turn)] = (name, add)
            engine.add(b"", add)
        if asked and rng.random() < 0.1:
            engine.abort(Abort(sequence_id=rng.choice(list(asked))))
        if rng.random() < 0.1:
            prompts[rng.randrange(3)] = (*prompts[0], *(rng.randrange(2, VOCAB_SIZE) for _ in range(20)))[:150]
        for _ in range(rng.randint(1, 4)):
            engine.step()
        collect(engine.take_outbox(), tokens, ends)
    while engine.has_work:
        engine.step()
    collect(engine.take_outbox(), tokens, ends)
    engine.check_integrity()
    assert set(ends) == set(asked)
    for sequence_id, (name, add) in asked.items():
        if tokens[sequence_id]:
            assert_greedy(subject, name, add, tokens[sequence_id])
        if ends[sequence_id].reason == "length":
            assert len(tokens[sequence_id]) == add.max_tokens
    counts = engine.stats(StatsRequest(call_id=""))
    assert counts.cached_tokens > 0
    assert counts.num_adapter_evictions > 0
    assembled.loader.close()


def collect(outbox: list[object], tokens: dict[str, list[int]], ends: dict[str, Finished]) -> None:
    for outbound in outbox:
        match outbound.message:  # type: ignore[attr-defined]
            case StepOutput(outputs=outputs):
                for output in outputs:
                    tokens[output.sequence_id].extend(output.token_ids)
            case Finished() as finished:
                assert finished.reason in ("length", "abort"), finished
                ends[finished.sequence_id] = finished
