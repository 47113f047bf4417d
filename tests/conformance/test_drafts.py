"""Real weights and kernels: answers, log-probabilities and bills are the same with drafts as without."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

import msgspec
import numpy as np
import pytest

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.constraints.grammars import Grammars
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend
from loramux.engine.drafting.step_times import StepTimes
from loramux.engine.execution.direct_executor import DirectExecutor, DirectForward
from loramux.engine.loop import assembly
from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.messages import (
    Abort,
    Add,
    DraftCounts,
    Finished,
    PromptLogprob,
    SamplingParams,
    StatsRequest,
    StepOutput,
    TokenLogprobs,
)
from loramux.engine.sequences.batch import Batch
from loramux.platform.grammars.check import checked_grammar
from loramux.platform.tool_calls.grammar import AnswerRules, Calls, OfferedTool
from tests.conformance.parity import Subject, make_subject
from tests.conformance.tiny_models import ALL_LINEARS, SMALL_SHAPE, VOCAB_SIZE, AdapterPlan
from tests.engine.byte_vocabulary import byte_vocabulary
from tests.engine.constraints.forcing_grammars import FORCING
from tests.engine.device.gpu_backend import plain_backend
from tests.engine.simulated_engine import GRAMMAR_PROCESS

NUM_REQUESTS = int(os.environ.get("LORAMUX_DRAFTED_REQUESTS", "2000"))
"""Number of requests of the campaign, for each family."""

PLANS = [
    AdapterPlan("r1", 1, ["v_proj"], alpha=2.0),
    AdapterPlan("r8", 8, ALL_LINEARS, alpha=12.0),
    AdapterPlan("r64", 64, ["q_proj", "o_proj"], alpha=30.0),
]
WINDOW = 24
MAX_OPEN = 4

WEATHER = OfferedTool(
    "get_the_weather",
    {
        "type": "object",
        "properties": {"city_name": {"enum": ["Oslo", "Rome"]}, "num_days": {"type": "integer", "maximum": 9}},
        "required": ["city_name", "num_days"],
        "additionalProperties": False,
    },
)


def tool_grammar(format_name: str) -> str:
    """The grammar of an answer that must call a tool."""
    rules = AnswerRules(calls=Calls(format_name, (WEATHER,), is_forced=True, is_parallel=False))
    return checked_grammar("answer", msgspec.json.encode(rules).decode(), byte_vocabulary())


@cache
def grammars() -> list[str]:
    return [*FORCING.values(), tool_grammar("hermes"), tool_grammar("mistral")]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[PromptLogprob] = field(default_factory=list)
    pooled: bytes = b""
    end: Finished | None = None


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param), PLANS, SMALL_SHAPE, WINDOW)


@pytest.fixture(autouse=True)
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts do not depend on how long steps take on this machine: more rows count as free, and lookups too."""
    monkeypatch.setattr(StepTimes, "ratio", lambda times, num_rows, num_more: 1.0)
    monkeypatch.setattr(StepTimes, "seconds", lambda times, num_rows: 0.0)


def drawn(subject: Subject, number: int) -> Add:
    """A request with random settings. Its prompt often repeats itself, so that its own text is drafted, too."""
    dice = random.Random(number)
    part = [dice.randrange(2, VOCAB_SIZE) for _ in range(dice.randint(1, 30))]
    sampling = SamplingParams(
        temperature=dice.choice([0.0, 0.0, 0.7, 1.3]),
        seed=number,
        top_p=dice.choice([1.0, 1.0, 0.9]),
        top_k=dice.choice([0, 0, 20]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.3]),
        frequency_penalty=dice.choice([0.0, 0.0, 0.5]),
        logit_bias=dice.choice([(), (), ((5, 3.0), (9, -2.0))]),
        num_logprobs=dice.choice([None, 0, 3]),
        ignore_eos=dice.random() < 0.5,
        stop_token_ids=tuple(dice.sample(range(VOCAB_SIZE), dice.choice([0, 0, 6]))),
        min_tokens=dice.choice([0, 0, 9]),
        bad_words=dice.choice([(), (), ((7,), (8, 9))]),
        allowed_token_ids=dice.choice([(), (), tuple(range(30, 60))]),
    )
    return Add(
        sequence_id=str(number),
        prompt=tuple(part * dice.choice([1, 1, 3])),
        max_tokens=dice.randint(max(1, sampling.min_tokens), 40),
        sampling=sampling,
        digest=dice.choice([None, *subject.digests.values()]),
        isolation_key=dice.choice([b"", b"x"]),
        tokens_at_once=dice.choice([1, 1, 4]),
    )


def aborted_at(number: int) -> int:
    """The number of tokens after which the request is aborted. Most requests are not."""
    dice = random.Random(-1 - number)
    return dice.randint(1, 20) if dice.random() < 0.1 else 1 << 30


def run(
    subject: Subject,
    adds: Sequence[Add],
    backend: Backend | None,
    speculate: str,
    num_kv_pages: int,
    max_batch_tokens: int = 64,
) -> tuple[dict[str, Answer], DraftCounts, int]:
    """The answers, the counts of drafts, and the number of preemptions."""
    model = ModelConfig.load(subject.directory)
    page_bytes = model.geometry(4, 4).total_page_bytes
    if speculate == "head":
        page_bytes += model.draft_layer.geometry(4, 4).total_page_bytes
    num_pages = sum(subject.num_pages.values()) + num_kv_pages
    assembled = subject.assemble(
        backend,
        speculate=speculate,
        pool_bytes=num_pages * page_bytes,
        max_sequences=8,
        max_batch_tokens=max_batch_tokens,
    )
    # All bits are set, which is NaN, so that reads of unwritten memory are noticed.
    assembled.views.raw.fill_(0xFF)
    if assembled.head_views is not None:
        assembled.head_views.raw.fill_(0xFF)
    engine, waiting = assembled.engine, iter(adds)
    answers: defaultdict[str, Answer] = defaultdict(Answer)
    while True:
        for add in islice(waiting, MAX_OPEN - engine.num_sequences):
            engine.add(b"", add)
        if engine.has_work:
            engine.step()
        outbox = engine.take_outbox()
        # The last event can be an abort, which leaves no work.
        if not outbox and not engine.has_work:
            break
        for outbound in outbox:
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        answer = answers[output.sequence_id]
                        answer.tokens += output.token_ids
                        answer.logprobs += output.logprobs
                        answer.scores += output.prompt_logprobs
                        answer.pooled += output.pooled
                case Finished() as end:
                    answers[end.sequence_id].end = end
        for name in [name for name, one in answers.items() if one.end is None]:
            if len(answers[name].tokens) >= aborted_at(int(name)):
                engine.abort(b"", Abort(sequence_id=name))
    engine.check_integrity()
    stats = engine.stats(StatsRequest(call_id=""))
    assembled.grammars.close()
    assembled.adapters.close()
    return answers, stats.drafts, stats.num_preemptions


def predicting(add: Add, answer: Answer) -> Add:
    """The request with its answer as a prediction, in which some tokens are changed, left out or repeated."""
    dice = random.Random(add.sequence_id)
    predicted: list[int] = []
    for token in answer.tokens if dice.random() < 0.7 else ():
        predicted += dice.choices(([token], [], [token, token], [dice.randrange(VOCAB_SIZE)]), (20, 1, 1, 1))[0]
    return msgspec.structs.replace(add, prediction=tuple(predicted))


def check(adds: Sequence[Add], found: dict[str, Answer], plain: dict[str, Answer]) -> None:
    assert set(found) == set(plain) == {add.sequence_id for add in adds}
    for add in adds:
        name = add.sequence_id
        ours, theirs = found[name], plain[name]
        assert ours.end is not None
        assert theirs.end is not None
        is_aborted = "abort" in (ours.end.reason, theirs.end.reason)
        # Several tokens can be committed before an abort takes effect.
        length = min(len(ours.tokens), len(theirs.tokens)) if is_aborted else len(theirs.tokens)
        assert ours.tokens[:length] == theirs.tokens[:length], name
        assert ours.end.completion_tokens == len(ours.tokens) + (ours.end.stop_token_id is not None)
        assert ours.end.prompt_tokens == len(add.prompt)
        if not is_aborted:
            assert len(ours.tokens) == length
            assert (ours.end.reason, ours.end.stop_token_id) == (theirs.end.reason, theirs.end.stop_token_id)
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=not is_aborted):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, rel=1e-5, abs=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
        if not is_aborted:
            assert [one.token_id for one in ours.scores] == [one.token_id for one in theirs.scores]
            found_logprobs = [one.logprob for one in ours.scores]
            assert found_logprobs == pytest.approx([one.logprob for one in theirs.scores], rel=1e-5, abs=1e-5)
            pooled, expected = (np.frombuffer(one.pooled, "<f4") for one in (ours, theirs))
            assert pooled == pytest.approx(expected, rel=1e-5, abs=1e-5)


def compare(
    subject: Subject, backend: Backend | None, num_requests: int, num_kv_pages: int = 60
) -> tuple[DraftCounts, int]:
    adds = [drawn(subject, number) for number in range(num_requests)]
    plain, _, num_preemptions = run(subject, adds, backend, "off", num_kv_pages)
    drafted = [predicting(add, plain[add.sequence_id]) for add in adds]
    found, drafts, _ = run(subject, drafted, backend, "text", num_kv_pages)
    check(adds, found, plain)
    return drafts, num_preemptions


@pytest.mark.parametrize("subject", ["llama", "gemma3", "qwen3_5"], indirect=True)
def test_answers_are_the_same_with_drafts(subject: Subject) -> None:
    drafts, _ = compare(subject, None, 12)
    assert 0 < drafts.accepted_prediction_tokens < drafts.prediction_tokens


@pytest.mark.parametrize("subject", ["llama", "qwen3_5"], indirect=True)
def test_steps_with_drafts_also_score_and_pool_prompts(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with drafts has at most one row of each prompt. Background prompts get one row of a step at a time."""
    drafted = {"scored": 0, "pooled": 0}
    submit = DirectExecutor.submit

    def watched(executor: DirectExecutor, batch: Batch) -> DirectForward:
        if len(batch.sample_rows) > len({*batch.block_starts[0].tolist()}):
            drafted["scored"] += bool(batch.scores)
            drafted["pooled"] += bool(batch.pooled)
        return submit(executor, batch)

    alone = SamplingParams(temperature=0.0, ignore_eos=True)
    scoring = msgspec.structs.replace(alone, num_prompt_logprobs=1)
    adds: list[Add] = []
    for number in [number for number in range(30) if aborted_at(number) > 100][:14]:
        prompt = tuple(random.Random(number).choices(range(2, VOCAB_SIZE), k=8))
        add = msgspec.structs.replace(drawn(subject, number), prompt=prompt[:3], max_tokens=60, sampling=alone)
        if len(adds) in range(2, 14, 2):
            add = msgspec.structs.replace(add, prompt=prompt, max_tokens=1, sampling=scoring, is_background=True)
        elif len(adds) > 2:
            add = msgspec.structs.replace(add, prompt=prompt[:1], max_tokens=0, pooling="last")
        adds.append(add)
    plain, _, _ = run(subject, adds, None, "off", 60, max_batch_tokens=16)
    monkeypatch.setattr(DirectExecutor, "submit", watched)
    predictions = [add if add.pooling else predicting(add, plain[add.sequence_id]) for add in adds]
    found, _, _ = run(subject, predictions, None, "text", 60, max_batch_tokens=16)
    check(adds, found, plain)
    assert min(drafted.values()) > 0


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_answers_are_the_same_with_drafts_on_the_gpu_path(subject: Subject) -> None:
    """The stand-in for the GPU's sampling always takes the most likely token."""
    drafts, _ = compare(subject, plain_backend(HostAccelerator()), 3)
    assert 0 < drafts.accepted_prediction_tokens < drafts.prediction_tokens


@pytest.mark.parametrize("subject", ["qwen3_5"], indirect=True)
def test_states_have_no_drafts_on_the_gpu_path(subject: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    drafts, _ = compare(subject, plain_backend(HostAccelerator()), 3)
    assert drafts == DraftCounts()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("--speculate text has no effect on a GPU, because Qwen3_5")


def constrained(subject: Subject, number: int) -> Add:
    """A request with random settings and a grammar that forces many tokens."""
    dice, add = random.Random(number), drawn(subject, number)
    # Most answers must not end because of a rule that forbids what the grammar forces.
    sampling = msgspec.structs.replace(
        add.sampling,
        allowed_token_ids=(),
        stop_token_ids=dice.choice([(), (), (ord("w"), ord("v"))]),
        bad_words=dice.choice([(), (), (), ((ord("o"), ord("f")),)]),
    )
    return msgspec.structs.replace(
        add, grammar=grammars()[number % len(grammars())], sampling=sampling, max_tokens=dice.randint(9, 90)
    )


def compare_forced(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, backend: Backend | None, num_requests: int, num_kv_pages: int
) -> int:
    """Returns the number of preemptions."""

    def byte_grammars(config: EngineConfig, model: ModelConfig) -> Grammars:
        return Grammars(GRAMMAR_PROCESS, os.environ, model.vocab_size)

    monkeypatch.setattr(assembly, "_grammars", byte_grammars)
    adds = [constrained(subject, number) for number in range(num_requests)]
    without = [msgspec.structs.replace(add, speculates=False) for add in adds]
    plain, none, num_preemptions = run(subject, without, backend, "off", num_kv_pages)
    assert none == DraftCounts()
    found, drafts, _ = run(subject, adds, backend, "off", num_kv_pages)
    check(adds, found, plain)
    assert drafts.accepted_grammar_tokens > 5 * num_requests
    return num_preemptions


@pytest.mark.parametrize("subject", ["llama", "gemma3", "qwen3_5"], indirect=True)
def test_answers_are_the_same_with_forced_tokens(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_forced(subject, monkeypatch, None, len(grammars()), 60)


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_answers_are_the_same_with_forced_tokens_on_the_gpu_path(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_forced(subject, monkeypatch, plain_backend(HostAccelerator()), 2, 60)


@pytest.mark.campaign
@pytest.mark.parametrize("subject", ["llama", "gemma3", "qwen3-moe", "qwen3_5"], indirect=True)
def test_many_answers_are_the_same_with_forced_tokens(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare_forced(subject, monkeypatch, None, NUM_REQUESTS, 14) > 0


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("subject", "is_short_of_pages"),
    [("llama", True), ("gemma3", True), ("qwen3-moe", False), ("qwen3_5", False)],
    indirect=["subject"],
    ids=["llama", "gemma3", "qwen3-moe", "qwen3_5"],
)
def test_many_answers_are_the_same_with_drafts(subject: Subject, is_short_of_pages: bool) -> None:
    drafts, num_preemptions = compare(subject, None, NUM_REQUESTS, num_kv_pages=8 if is_short_of_pages else 60)
    assert drafts.accepted_prediction_tokens > NUM_REQUESTS
    assert num_preemptions > 0 or not is_short_of_pages
