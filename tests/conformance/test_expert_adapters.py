"""Adapters on experts and routers give the reference's logits, in both forms of files and in one mixed batch."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from loramux.engine.device.backend import Backend
from loramux.engine.execution.direct_executor import DirectExecutor
from loramux.engine.protocol.messages import Add, SamplingParams, StatsRequest
from tests.conformance.expert_adapters import (
    EARLIER_PLANS,
    NOT_TARGETED,
    WRAPPED,
    ExpertSubject,
    make_expert_subject,
    plans_for,
)
from tests.conformance.mixture_families import MIXTURE_FAMILIES
from tests.conformance.parity import Recorder, Subject, assert_parity, load, run
from tests.conformance.tiny_models import SMALL_SHAPE, SMALL_WINDOW, VOCAB_SIZE
from tests.engine.device.gpu_backend import gpu_backend

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
NUM_TOKENS = 3

FREQUENT = ("qwen2-moe", "gpt-oss")
"""Families for every test run."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, marks=() if family in FREQUENT else pytest.mark.campaign)
        for family in (*MIXTURE_FAMILIES, WRAPPED)
        if family not in NOT_TARGETED
    ],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ExpertSubject:
    directory = tmp_path_factory.mktemp(request.param)
    return make_expert_subject(request.param, directory, plans_for(request.param), SMALL_SHAPE, SMALL_WINDOW)


def requests(subject: Subject, num_tokens: int = NUM_TOKENS) -> dict[str, tuple[str | None, Add]]:
    """Requests of every adapter and of the base, with prompts shorter and longer than a step."""
    generator = torch.Generator().manual_seed(3)
    made: dict[str, tuple[str | None, Add]] = {}
    for index, name in enumerate([None, *subject.digests, None, *reversed(subject.digests)]):
        prompt = torch.randint(2, VOCAB_SIZE, (1 + 7 * index % 40,), generator=generator).tolist()
        digest = None if name is None else subject.digests[name]
        add = Add(
            sequence_id=f"{index}-{name}", prompt=tuple(prompt), max_tokens=num_tokens, sampling=GREEDY, digest=digest
        )
        made[add.sequence_id] = (name, add)
    return made


def test_a_mixed_batch_equals_the_references(subject: ExpertSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = subject.assemble(max_sequences=32)
    load(assembled.engine, subject.digests.values())
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = requests(subject)
    for _, add in asked.values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    stats = assembled.engine.stats(StatsRequest(call_id=""))
    assert stats.max_adapters_in_step == len(subject.digests)
    assert stats.num_adapter_pages == sum(subject.num_pages.values())

    # Rows of the base are computed as if there were no adapters.
    executor = recorder.executor
    assert isinstance(executor, DirectExecutor)
    num_equal = num_changed = 0
    for batch, logits in recorder.steps:
        expected = executor.logits(msgspec.structs.replace(batch, slots=np.full_like(batch.slots, -1)))
        for row, sample_row in enumerate(batch.sample_rows.tolist()):
            is_equal = torch.equal(logits[row], expected[row])
            if batch.slots[sample_row] < 0:
                assert is_equal
                num_equal += 1
            else:
                # A token that is routed to none of the adapter's experts is not changed.
                num_changed += not is_equal
    assert num_equal == 2 * NUM_TOKENS
    assert num_changed > len(subject.digests) * NUM_TOKENS
    assembled.engine.check_integrity()
    assembled.adapters.close()


def test_stacks_of_earlier_releases_equal_their_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_expert_subject("qwen2-moe", tmp_path, EARLIER_PLANS, SMALL_SHAPE, SMALL_WINDOW)
    assembled = subject.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = requests(subject)
    for _, add in asked.values():
        assembled.engine.add(b"", add)
    run(assembled.engine)
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    assembled.adapters.close()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    return gpu_backend(monkeypatch)


INTERPRETED = {
    "qwen3-moe": ("stacked",),
    "qwen2-moe": ("stacked-router", "single-few", "single-dora"),
    "glm4_moe": ("stacked-router", "single-router"),
    **dict.fromkeys(("gpt-oss", "granite-moe", "mixtral", "olmoe"), ("stacked", "stacked-router")),
}
"""The adapters that run on interpreted kernels, by family. The first family runs in every test run."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family == "qwen3-moe" else pytest.mark.campaign) for family in INTERPRETED],
)
def test_the_gpu_path_equals_the_references(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    plans = [plan for plan in plans_for(family) if plan.name in INTERPRETED[family]]
    subject = make_expert_subject(family, tmp_path, plans, SMALL_SHAPE, SMALL_WINDOW)
    assembled = subject.assemble(backend, max_sequences=4, max_batch_tokens=16)
    recorder = Recorder(assembled.engine, monkeypatch)
    names = [None, *subject.digests]
    asked = {}
    for index, name in enumerate(names):
        digest = None if name is None else subject.digests[name]
        prompt = tuple(range(5 + index, 7 + 4 * index))
        asked[str(name)] = Add(sequence_id=str(name), prompt=prompt, max_tokens=2, sampling=GREEDY, digest=digest)
        assembled.engine.add(b"", asked[str(name)])
    run(assembled.engine)
    for name in names:
        assert_parity(subject, name, asked[str(name)], recorder.by_sequence[str(name)])
    assembled.engine.check_integrity()
    assembled.adapters.close()
