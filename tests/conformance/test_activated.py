"""Activated adapters give the same results as peft, alone and in mixed batches with plain adapters and the base."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import product

import msgspec
import numpy as np
import pytest
import torch

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.backend import Backend
from loramux.engine.execution.direct_executor import DirectExecutor
from loramux.engine.execution.graph_executor import GraphExecutor
from loramux.engine.loop.engine import Engine
from loramux.engine.protocol.messages import Add, Finished, PromptLogprob, SamplingParams, StatsRequest, StepOutput
from loramux.engine.sequences.activation import activation
from tests.conformance.parity import TOLERANCE, Recorder, Subject, assert_parity, load, make_subject, run
from tests.conformance.test_gpu_engine import PATHS, gpu_path
from tests.conformance.tiny_models import ALL_LINEARS, FAMILIES, SMALL_SHAPE, SMALL_WINDOW, VOCAB_SIZE, AdapterPlan

INVOCATIONS = {"one": (5,), "three": (7, 8, 7), "head": (9, 9), "five": (3, 4, 3, 4, 3)}
PLANS = [
    AdapterPlan(
        "one", 3, ["q_proj", "v_proj", "down_proj"], alpha=6.0, lora_bias=True, invocation_tokens=INVOCATIONS["one"]
    ),
    AdapterPlan("three", 16, ALL_LINEARS, use_rslora=True, alpha=4.0, invocation_tokens=INVOCATIONS["three"]),
    AdapterPlan("head", 5, ["lm_head", "k_proj", "up_proj"], invocation_tokens=INVOCATIONS["head"]),
    AdapterPlan("five", 8, ALL_LINEARS, layers=[1], invocation_tokens=INVOCATIONS["five"]),
    AdapterPlan("plain", 4, ALL_LINEARS, alpha=8.0, use_dora=True),
]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
NUM_TOKENS = 5
FREQUENT = {("llama", "chunks"), ("llama", "whole prompts"), ("gemma2", "chunks")}
"""The mixed batches of every test run. One family has windows and soft caps. All other tests run on the first only."""
STEP_TOKENS = {"chunks": 24, "whole prompts": 700}


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=() if family == "llama" else pytest.mark.campaign) for family in FAMILIES],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param), PLANS, SMALL_SHAPE, SMALL_WINDOW)


def make_add(subject: Subject, sequence_id: str, name: str | None, prompt: list[int], **fields: object) -> Add:
    """A request as a gateway makes it: if the prompt does not activate the adapter, the request is for the base."""
    position = activation(prompt, INVOCATIONS[name]) if name in INVOCATIONS else 0
    is_active = name is not None and position is not None
    add = Add(
        sequence_id=sequence_id,
        prompt=tuple(prompt),
        max_tokens=NUM_TOKENS,
        sampling=GREEDY,
        digest=subject.digests[name] if is_active else None,
        activation=(position or 0) if is_active else 0,
    )
    return msgspec.structs.replace(add, **fields)


def requests(subject: Subject) -> dict[str, tuple[str | None, Add]]:
    """Requests for the base, a plain adapter and activated adapters, with invocations at many positions."""
    generator = torch.Generator().manual_seed(13)
    made: dict[str, tuple[str | None, Add]] = {}

    def ask(name: str | None, length: int, *places: int, case: str = "") -> None:
        # Draw only tokens that are in no invocation.
        prompt = torch.randint(20, VOCAB_SIZE, (length,), generator=generator).tolist()
        for place in places:
            tokens = INVOCATIONS.get(name, ()) if name else ()
            prompt[place : place + len(tokens)] = tokens
        assert len(prompt) == length
        sequence_id = f"{name} {case or places} of {length}"
        made[sequence_id] = name, make_add(subject, sequence_id, name, prompt)

    ask(None, 30)
    ask("plain", 41)
    ask("one", 1, 0)
    ask("one", 40, 39)
    ask("one", 33, 16)
    ask("one", 50, 3, 20, case="twice")
    ask("three", 35, 0)
    ask("three", 36, 2, 15, case="twice, across a page")
    ask("three", 37, 20, 22, case="overlapping itself")
    ask("three", 21, case="never")
    ask("head", 48, 30)
    ask("head", 20, case="never")
    ask("head", 12, 6)
    ask("five", 70, 55)
    ask("five", 64, 8)
    ask(None, 7)
    return made


def finished_tokens(engine: Engine, adds: Iterable[Add]) -> tuple[dict[str, list[int]], dict[str, Finished]]:
    """Run requests to completion, and return their tokens and final messages."""
    for add in adds:
        engine.add(b"", add)
    tokens: dict[str, list[int]] = defaultdict(list)
    ends: dict[str, Finished] = {}
    while engine.has_work:
        engine.step()
        for outbound in engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        tokens[output.sequence_id].extend(output.token_ids)
                case Finished() as finished:
                    assert finished.reason == "length", finished
                    ends[finished.sequence_id] = finished
    return tokens, ends


def test_the_position_is_pefts(subject: Subject) -> None:
    for name, add in requests(subject).values():
        if name in INVOCATIONS:
            assert activation(add.prompt, INVOCATIONS[name]) == subject.activation(name, list(add.prompt))
    generator = torch.Generator().manual_seed(2)
    for _ in range(300):
        prompt = torch.randint(3, 10, (30,), generator=generator).tolist()
        for name, tokens in INVOCATIONS.items():
            assert activation(prompt, tokens) == subject.activation(name, prompt)


def test_each_request_alone_equals_peft(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = subject.assemble()
    recorder = Recorder(assembled.engine, monkeypatch)
    for sequence_id, (name, add) in requests(subject).items():
        assembled.engine.add(b"", add)
        run(assembled.engine)
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    assembled.adapters.close()


@pytest.mark.parametrize(
    ("subject", "steps"),
    [
        pytest.param(*case, marks=() if case in FREQUENT else pytest.mark.campaign)
        for case in product(FAMILIES, STEP_TOKENS)
    ],
    indirect=["subject"],
)
def test_one_mixed_batch_equals_peft(subject: Subject, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled = subject.assemble(max_batch_tokens=STEP_TOKENS[steps])
    load(assembled.engine, subject.digests.values())
    recorder = Recorder(assembled.engine, monkeypatch)
    asked = requests(subject)
    finished_tokens(assembled.engine, [add for _, add in asked.values()])
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    assert assembled.engine.stats(StatsRequest(call_id="")).max_adapters_in_step >= 2
    assembled.engine.check_integrity()

    # The base's rows are computed as if no adapter were in the batch.
    executor = recorder.executor
    assert isinstance(executor, DirectExecutor)
    num_equal = num_two_slots = 0
    for batch, logits in recorder.steps:
        expected = executor.logits(msgspec.structs.replace(batch, slots=np.full_like(batch.slots, -1)))
        for row, sample_row in enumerate(batch.sample_rows.tolist()):
            if batch.slots[sample_row] < 0:
                assert torch.equal(logits[row], expected[row])
                num_equal += 1
        rows = [batch.slots[begin:end] for begin, end in zip(batch.cu_q[:-1], batch.cu_q[1:], strict=True)]
        num_two_slots += sum(len(set(slots.tolist())) == 2 for slots in rows)
    assert num_equal == 4 * NUM_TOKENS
    assert num_two_slots > 0
    assembled.adapters.close()


def test_answers_are_those_that_peft_generates(subject: Subject) -> None:
    """peft finds the invocation itself here, and keeps the adapter active for the tokens that it generates."""
    assembled = subject.assemble()
    asked = requests(subject)
    tokens, _ = finished_tokens(assembled.engine, [add for _, add in asked.values()])
    num_base = 0
    for sequence_id, (name, add) in asked.items():
        if name not in INVOCATIONS:
            continue
        subject.reference.set_adapter(name)
        prompt = torch.tensor([list(add.prompt)])
        settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        output = subject.reference.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert tokens[sequence_id] == output[0, len(add.prompt) :].tolist(), sequence_id
        num_base += add.digest is None
    assert num_base == 2
    assembled.adapters.close()


def test_prompt_logprobs_are_the_bases_before_the_activation(subject: Subject) -> None:
    assembled = subject.assemble(max_batch_tokens=24)
    scoring = msgspec.structs.replace(GREEDY, num_prompt_logprobs=0)
    chosen = {one: asked for one, asked in requests(subject).items() if len(asked[1].prompt) in (36, 41, 48, 50)}
    scores: dict[str, list[PromptLogprob]] = defaultdict(list)
    for _, add in chosen.values():
        assembled.engine.add(b"", msgspec.structs.replace(add, sampling=scoring))
    while assembled.engine.has_work:
        assembled.engine.step()
        for outbound in assembled.engine.take_outbox():
            if isinstance(outbound.message, StepOutput):
                for output in outbound.message.outputs:
                    scores[output.sequence_id] += output.prompt_logprobs
    assert len(chosen) == 4
    for sequence_id, (name, add) in chosen.items():
        prompt = list(add.prompt)
        expected = subject.reference_logits(name, prompt).log_softmax(-1)[:-1]
        wanted = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        found = torch.tensor([one.logprob for one in scores[sequence_id]])
        assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    assembled.adapters.close()


def test_a_shared_prefix_changes_no_answer(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four activated adapters continue a conversation of the base; one more repeats its request."""
    assembled = subject.assemble(max_batch_tokens=64)
    recorder = Recorder(assembled.engine, monkeypatch)
    conversation = torch.randint(20, VOCAB_SIZE, (200,), generator=torch.Generator().manual_seed(4)).tolist()
    asked: dict[str, tuple[str | None, Add]] = {}
    has_states = ModelConfig.load(subject.directory).delta is not None
    for sequence_id, name in (("base", None), *((name, name) for name in INVOCATIONS), ("again", "three")):
        prompt = [*conversation, *(INVOCATIONS[name] if name else ()), 30]
        add = make_add(subject, sequence_id, name, prompt, isolation_key=b"tenant")
        asked[sequence_id] = name, add
        _, ends = finished_tokens(assembled.engine, [add])
        # 12 pages of 16 tokens. The activation is in the thirteenth, so only the same adapter finds that page. In a
        # hybrid decoder, there are 6 pages of 32 tokens, and a checkpoint before the last of them.
        assert ends[sequence_id].cached_tokens == (0 if name is None else 160 if has_states else 192)
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, recorder.by_sequence[sequence_id])
    assembled.adapters.close()


@pytest.fixture(params=PATHS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return gpu_path(request.param, monkeypatch)


@pytest.mark.parametrize(
    "subject",
    [pytest.param(one, marks=() if one == "llama" else pytest.mark.campaign) for one in FAMILIES],
    indirect=True,
)
def test_a_mixed_batch_on_the_gpu_path_equals_peft(
    subject: Subject, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled = subject.assemble(backend, max_batch_tokens=32)
    recorder = Recorder(assembled.engine, monkeypatch)
    # Interpreted kernels are slow, so run only some requests.
    asked = {
        one: (name, msgspec.structs.replace(add, max_tokens=4))
        for one, (name, add) in requests(subject).items()
        if len(add.prompt) in (7, 12, 33)
    }
    assert len(asked) == 3
    tokens, _ = finished_tokens(assembled.engine, [add for _, add in asked.values()])
    for sequence_id, (name, add) in asked.items():
        logits = recorder.by_sequence[sequence_id]
        assert_parity(subject, name, add, logits)
        assert tokens[sequence_id] == [int(row.argmax()) for row in logits]
    assert isinstance(recorder.executor, GraphExecutor)
    assert recorder.executor.num_graphs > 0
    assembled.engine.check_integrity()
    assembled.adapters.close()
