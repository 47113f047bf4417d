"""Tensor-parallel engines answer like transformers and peft, and choose the tokens of an engine with one worker."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from loramux.admin.doctor.memory_plan import WorkersPlan, plan_workers
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.assembly import AssembledEngine
from loramux.engine.loop.config import pack_target
from loramux.engine.parallel import workers
from loramux.engine.parallel.process_groups import GlooGroup
from loramux.engine.parallel.workers import WorkerLost
from loramux.engine.protocol.errors import ConfigNotUsable
from loramux.engine.protocol.messages import Add, SamplingParams, StatsRequest
from tests.conformance.parity import Recorder, Subject, assert_parity, load, make_subject, run
from tests.conformance.test_parity import OUTER_PLANS
from tests.conformance.tiny_models import PLANS, SHAPE, SMALL_WINDOW, VOCAB_SIZE, pack_peft_directory

campaign = pytest.mark.campaign
FAMILIES = [
    "llama-tied-bias-llama3-rope",
    *(
        pytest.param(family, marks=campaign)
        for family in ("llama", "qwen2", "qwen3", "gemma3", "phi3-window", "cohere2", "starcoder2")
    ),
]
NUM_TOKENS = 12
END_S = 120.0


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp(request.param)
    return make_subject(request.param, directory, [*PLANS, *OUTER_PLANS], SHAPE, SMALL_WINDOW)


@contextmanager
def assembled(subject: Subject, **settings: Any) -> Iterator[AssembledEngine]:
    engine = subject.assemble(**settings)
    try:
        yield engine
    finally:
        engine.close()


def requests(subject: Subject) -> dict[str, tuple[str | None, Add]]:
    """A request for each adapter and two for the base, with prompts shorter and longer than a step's budget."""
    generator = torch.Generator().manual_seed(3)
    made: dict[str, tuple[str | None, Add]] = {}
    for index, name in enumerate([None, *subject.digests, None]):
        prompt = torch.randint(2, VOCAB_SIZE, (1 + 9 * index,), generator=generator).tolist()
        add = Add(
            sequence_id=f"{index}-{name}",
            prompt=tuple(prompt),
            max_tokens=NUM_TOKENS,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            digest=None if name is None else subject.digests[name],
        )
        made[add.sequence_id] = (name, add)
    return made


def logits_of(
    engine: AssembledEngine, asked: dict[str, tuple[str | None, Add]], monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[torch.Tensor]]:
    """The logits of each request's tokens."""
    with monkeypatch.context() as patches:
        recorder = Recorder(engine.engine, patches)
        for _, add in asked.values():
            engine.engine.add(b"", add)
        run(engine.engine)
        engine.engine._executor = recorder.executor
    engine.engine.check_integrity()
    return dict(recorder.by_sequence)


class Exchanges:
    """The exchanges of worker 0: for each step, the rows and bytes of each sum, and then of the logits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[list[tuple[int, int]]] = [[]]
        add_up, join_columns = GlooGroup.sum, GlooGroup.join_columns

        def counted_sum(group: GlooGroup, y: torch.Tensor) -> torch.Tensor:
            self.steps[-1].append((len(y), y.nbytes))
            return add_up(group, y)

        def counted_join(group: GlooGroup, y: torch.Tensor) -> torch.Tensor:
            self.steps[-1].append((len(y), y.nbytes))
            self.steps.append([])
            return join_columns(group, y)

        monkeypatch.setattr(GlooGroup, "sum", counted_sum)
        monkeypatch.setattr(GlooGroup, "join_columns", counted_join)

    def check(self, plan: WorkersPlan, size: int) -> None:
        """Each step has the planned exchanges, whatever its adapters."""
        *steps, rest = self.steps
        assert (rest, len(steps) > NUM_TOKENS) == ([], True)
        for *sums, (num_samples, logit_bytes) in steps:
            assert len(sums) == plan.num_sums
            assert {num_bytes for _, num_bytes in sums} == {sums[0][0] * plan.sum_bytes}
            assert size * logit_bytes == num_samples * plan.join_bytes


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=campaign)])
def test_mixed_adapters_equal_peft_and_one_worker(subject: Subject, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, a worker may need long to exit.
    monkeypatch.setattr(workers, "END_S", END_S)
    asked = requests(subject)
    with assembled(subject) as alone:
        expected = logits_of(alone, asked, monkeypatch)
    exchanges = Exchanges(monkeypatch)
    with assembled(subject, tensor_parallel_size=size, num_threads=size) as engine:
        load(engine.engine, subject.digests.values())
        found = logits_of(engine, asked, monkeypatch)
        stats = engine.engine.stats(StatsRequest(call_id=""))
        assert stats.max_adapters_in_step > len(subject.digests) // 2
        assert stats.num_kv_pages == 0
        processes = [worker.process for worker in engine.workers._workers]
    assert [process.returncode for process in processes] == [0] * (size - 1)
    exchanges.check(plan_workers(subject.directory, "cpu", size), size)
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, found[sequence_id])
        assert [row.argmax() for row in found[sequence_id]] == [row.argmax() for row in expected[sequence_id]]


@campaign
@pytest.mark.parametrize("size", [2, 4])
def test_adapters_are_evicted_and_loaded_again(subject: Subject, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four slots, adapters take turns, so that slots and pages change owners in all workers."""
    asked = requests(subject)
    with assembled(subject, tensor_parallel_size=size, num_threads=size, max_resident_adapters=4) as engine:
        for _ in range(3):
            found = logits_of(engine, asked, monkeypatch)
            for sequence_id, (name, add) in asked.items():
                assert_parity(subject, name, add, found[sequence_id])
        assert engine.adapters.num_evictions > 0


@campaign
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("formats", [{"kv_dtype": "int8"}, {"kv_dtype": "int8", "adapter_dtype": "fp8"}], ids=str)
def test_tokens_equal_those_of_one_worker_in_formats_of_eight_bits(
    subject: Subject, formats: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 codes cannot represent adapters that have more than an A and a B for the layers."""
    target = pack_target(ModelConfig.load(subject.directory), "float32", **formats)
    names = ["r1", "r3", "r8", "r16", "by-layer"]
    packed = {
        name: pack_peft_directory(subject.directory.parent / "adapters" / name, target, subject.directory)
        for name in names
    }
    own = dataclasses.replace(
        subject,
        digests={name: one.digest for name, one in packed.items()},
        adapters={one.digest: one for one in packed.values()},
    )
    asked, tokens = requests(own), []
    for number in (1, size):
        with assembled(own, tensor_parallel_size=number, num_threads=number, **formats) as engine:
            logits = logits_of(engine, asked, monkeypatch)
        tokens.append({name: [int(row.argmax()) for row in rows] for name, rows in logits.items()})
    assert tokens[0] == tokens[1]


@campaign
def test_a_step_fails_if_a_worker_has_ended(subject: Subject) -> None:
    with assembled(subject, tensor_parallel_size=2, num_threads=2) as engine:
        assert engine.workers is not None
        [pid] = engine.workers.pids
        os.kill(pid, signal.SIGKILL)
        _, add = requests(subject)["0-None"]
        engine.engine.add(b"", add)
        with pytest.raises(WorkerLost, match=f"tensor-parallel worker 1 has ended with exit status -{signal.SIGKILL}"):
            run(engine.engine)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide the model's 8 attention heads"),
        ({"tensor_parallel_size": 4, "num_threads": 2}, "4 workers need a thread each, but num_threads is 2"),
        (
            {"tensor_parallel_size": 2, "device": "cuda"},
            "2 workers need a GPU each, but this process sees [01]: lower tensor_parallel_size",
        ),
    ],
)
def test_unusable_settings_are_refused_before_the_model_is_loaded(
    subject: Subject, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigNotUsable, match=reason):
        subject.assemble(**{"num_threads": 8, **settings})
