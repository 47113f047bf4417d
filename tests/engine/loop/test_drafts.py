from __future__ import annotations

import random
import select
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from loramux.engine.constraints.grammar import Masks
from loramux.engine.drafting.speculation import MAX_SEQUENCES
from loramux.engine.execution.sampler import FinishedStep, SampledToken
from loramux.engine.protocol.messages import (
    Abort,
    Add,
    Extend,
    Finished,
    Load,
    SamplingParams,
    SequenceOutput,
    StepOutput,
    ThinkingBudget,
    TokenLogprobs,
)
from tests.engine.simulated_device import SimulatedForward
from tests.engine.simulated_engine import GREEDY, Simulate, Simulation, stats_of

VOCAB_SIZE = 40
SETTINGS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded": SamplingParams(seed=7, ignore_eos=True),
    "cut": SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, seed=8, ignore_eos=True),
    "penalties": SamplingParams(
        seed=9, ignore_eos=True, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.7
    ),
    "bias": SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=((3, 0.5), (5, -4.0))),
    "greedy with penalties": SamplingParams(temperature=0.0, ignore_eos=True, frequency_penalty=0.4),
    "logprobs": SamplingParams(seed=10, ignore_eos=True, num_logprobs=3),
    "stop tokens": SamplingParams(seed=11, ignore_eos=True, stop_token_ids=(4, 5), min_tokens=25),
    "end": SamplingParams(seed=12, min_tokens=20),
    "bad words": SamplingParams(seed=13, ignore_eos=True, bad_words=((1,), (2, 3), (6, 7, 8))),
    "allowed tokens": SamplingParams(seed=14, stop_token_ids=(10,), min_tokens=30, allowed_token_ids=(10, 11, 12, 13)),
    "thinking": SamplingParams(
        seed=15, ignore_eos=True, thinking=ThinkingBudget(num_tokens=9, begin=(20,), end=(21, 22), is_open=True)
    ),
}


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | None = None


def run(simulation: Simulation, adds: Iterable[Add]) -> dict[str, Answer]:
    """Run the requests. The counts of drafts are left out of the ends, because they may differ."""
    answers: defaultdict[str, Answer] = defaultdict(Answer)
    for add in adds:
        simulation.engine.add(b"gateway", add)
    while simulation.engine.has_work:
        has_run = simulation.engine.step()
        if not has_run:
            select.select([simulation.grammars], [], [], 0.01)
        for outbound in simulation.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    names = [output.sequence_id for output in outputs if output.token_ids]
                    assert len(set(names)) == len(names), "other servers refuse two outputs of a sequence"
                    for output in outputs:
                        note(answers[output.sequence_id], output)
                case Finished() as end:
                    uncounted = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
                    answers[end.sequence_id].end = msgspec.structs.replace(end, **uncounted)
        if has_run:
            simulation.pages.check_integrity()
    simulation.engine.check_integrity()
    return answers


def note(answer: Answer, output: SequenceOutput) -> None:
    assert answer.end is None
    assert not output.logprobs or [one.token_id for one in output.logprobs] == list(output.token_ids)
    answer.tokens += output.token_ids
    answer.logprobs += output.logprobs


def changed(tokens: Iterable[int], seed: int) -> tuple[int, ...]:
    """The tokens with some of them changed, left out or repeated."""
    dice = random.Random(seed)
    found: list[int] = []
    for token in tokens:
        found += dice.choices(([token], [], [token, token], [dice.randrange(VOCAB_SIZE)]), (12, 1, 1, 1))[0]
    return tuple(found)


def request(name: str, sampling: SamplingParams, digest: str | None = None, **fields: Any) -> Add:
    prompt = tuple((sum(name.encode()) + 7 * place) % VOCAB_SIZE for place in range(20 + len(name)))
    settings: dict[str, Any] = {"max_tokens": 60, "isolation_key": b"x"} | fields
    return Add(sequence_id=name, prompt=prompt, sampling=sampling, digest=digest, **settings)


def predicting(adds: Iterable[Add], answers: dict[str, Answer]) -> list[Add]:
    """The same requests with their answers, slightly changed, as predictions."""
    predictions = {name: changed(answer.tokens, len(name)) for name, answer in answers.items()}
    return [msgspec.structs.replace(add, prediction=predictions.get(add.sequence_id, ())) for add in adds]


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_answers_are_the_same_with_drafts(simulate: Simulate, sampling: SamplingParams) -> None:
    settings = {"vocab_size": VOCAB_SIZE, "adapters": {"a": 2, "b": 3}, "eos": (9,)}
    adds = [
        request(f"{index}", sampling, digest, tokens_at_once=once)
        for index, (digest, once) in enumerate(((None, 1), ("a", 4), ("b", 1)))
    ]
    plain = run(simulate(**settings), adds)
    simulation = simulate(speculates=True, **settings)
    assert run(simulation, predicting(adds, plain)) == plain
    drafts = stats_of(simulation).drafts
    assert 0 < drafts.accepted_prediction_tokens < drafts.prediction_tokens
    assert stats_of(simulation).completion_tokens == sum(one.end.completion_tokens for one in plain.values() if one.end)


@pytest.mark.parametrize("windows", [(None,), (20, 20), (20, None)], ids=["whole", "sliding", "mixed"])
def test_drafts_take_fewer_steps(simulate: Simulate, windows: tuple[int | None, ...]) -> None:
    adds = [request("one", GREEDY)]
    simulation = simulate(windows=windows)
    plain = run(simulation, adds)
    drafted = simulate(windows=windows, speculates=True)
    exact = [msgspec.structs.replace(adds[0], prediction=tuple(plain["one"].tokens))]
    assert run(drafted, exact) == plain
    assert stats_of(drafted).num_steps < stats_of(simulation).num_steps / 3
    drafts = stats_of(drafted).drafts
    assert drafts.accepted_prediction_tokens == drafts.prediction_tokens > 40


def test_a_text_that_repeats_itself_is_drafted(simulate: Simulate) -> None:
    # The bias makes the model repeat a token.
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=((3, 5.0),))
    simulation = simulate(speculates=True)
    answers = run(simulation, [request("one", sampling)])
    assert answers["one"].tokens == [3] * 60
    assert stats_of(simulation).drafts.accepted_text_tokens > 40
    assert stats_of(simulation).num_steps < 30


def test_a_request_can_refuse_drafts(simulate: Simulate) -> None:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=((3, 5.0),))
    simulation = simulate(speculates=True)
    run(simulation, [request("one", sampling, speculates=False, prediction=(3,) * 60)])
    assert stats_of(simulation).drafts.prediction_tokens == stats_of(simulation).drafts.text_tokens == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_drafts_end_at_the_limit(simulate: Simulate, max_tokens: int) -> None:
    add = request("one", GREEDY, max_tokens=max_tokens)
    plain = run(simulate(), [add])
    tokens = run(simulate(), [request("one", GREEDY, max_tokens=60)])["one"].tokens
    simulation = simulate(speculates=True)
    assert run(simulation, [msgspec.structs.replace(add, prediction=tuple(tokens))]) == plain
    assert len(plain["one"].tokens) == max_tokens
    assert stats_of(simulation).completion_tokens == max_tokens


def test_drafts_end_at_the_end_of_the_context(simulate: Simulate) -> None:
    add = request("one", GREEDY, max_tokens=41)
    simulation = simulate(max_model_len=64)
    plain = run(simulation, [add])
    drafted = simulate(max_model_len=64, speculates=True)
    assert run(drafted, predicting([add], plain)) == plain


def test_a_pause_at_the_limit_commits_no_further_token(simulate: Simulate) -> None:
    tokens = run(simulate(), [request("one", GREEDY, max_tokens=60)])["one"].tokens
    simulation = simulate(speculates=True)
    add = request("one", GREEDY, max_tokens=10, pause_s=5.0, prediction=tuple(tokens))
    simulation.engine.add(b"gateway", add)
    for _ in range(20):
        simulation.step()
    assert simulation.tokens["one"] == tokens[:10]
    simulation.engine.extend(b"gateway", Extend(sequence_id="one", max_tokens=33))
    for _ in range(40):
        simulation.step()
    assert simulation.tokens["one"] == tokens[:33]
    simulation.clock.now += 6.0
    simulation.run()
    assert (simulation.finished["one"].reason, simulation.finished["one"].completion_tokens) == ("length", 33)


def test_an_abort_reports_the_committed_tokens(simulate: Simulate) -> None:
    tokens = run(simulate(), [request("one", GREEDY)])["one"].tokens
    simulation = simulate(speculates=True)
    simulation.engine.add(b"gateway", request("one", GREEDY, prediction=tuple(tokens)))
    for _ in range(4):
        simulation.step()
    simulation.engine.abort(b"gateway", Abort(sequence_id="one"))
    simulation.run()
    received = simulation.tokens["one"]
    assert received == tokens[: len(received)]
    assert simulation.finished["one"].completion_tokens == len(received)


def test_preempted_sequences_with_drafts_go_on_where_they_were(simulate: Simulate) -> None:
    adds = [request(f"{index}", GREEDY) for index in range(4)]
    plain = run(simulate(num_pages=64), adds)
    simulation = simulate(num_pages=12, speculates=True)
    found = run(simulation, predicting(adds, plain))
    assert {name: one.tokens for name, one in found.items()} == {name: one.tokens for name, one in plain.items()}
    assert simulation.scheduler.num_preemptions > 0


def test_drafts_are_as_long_in_a_pool_that_is_full_of_idle_prefixes(simulate: Simulate) -> None:
    plain = run(simulate(), [request("second", GREEDY, max_tokens=70)])
    # Wrong tokens, after which drafts do not begin with a page.
    predicted = [0 if place % 12 == 5 else token for place, token in enumerate(plain["second"].tokens)]
    add = request("second", GREEDY, max_tokens=70, prediction=tuple(predicted))
    num_steps = []
    for num_before in (0, 90):
        simulation = simulate(num_pages=8, speculates=True)
        if num_before:
            run(simulation, [request("first", GREEDY, max_tokens=num_before)])
        started = stats_of(simulation).num_steps
        assert run(simulation, [add])["second"].tokens == plain["second"].tokens
        num_steps.append(stats_of(simulation).num_steps - started)
    assert stats_of(simulation).num_prefix_evictions > 0
    assert num_steps[0] == num_steps[1] < 45


def test_drafts_evict_no_adapter(simulate: Simulate) -> None:
    plain = run(simulate(), [request("second", GREEDY, max_tokens=30)])
    simulation = simulate(num_pages=12, adapters={"a": 8}, speculates=True)
    simulation.engine.load(b"gateway", Load(call_id="l", digest="a"))
    simulation.run()
    add = request("second", GREEDY, max_tokens=30, prediction=tuple(plain["second"].tokens))
    assert run(simulation, [add])["second"].tokens == plain["second"].tokens
    assert stats_of(simulation).num_adapter_evictions == 0


def test_single_rows_of_prompts_beside_drafts_are_scored_and_pooled(simulate: Simulate) -> None:
    tokens = run(simulate(), [request("one", GREEDY)])["one"].tokens
    # With lookahead, a step after a prompt has no drafts.
    simulation = simulate(max_batch_tokens=80, num_state_pages=2, lookahead=False, speculates=True)
    engine, outputs = simulation.engine, []
    engine.add(b"gateway", request("one", GREEDY, prediction=tuple(tokens)))
    engine.step()
    scoring = SamplingParams(temperature=0.0, ignore_eos=True, num_prompt_logprobs=0)
    # The first sequence takes a row of the step, and a row is left before the checkpoint after 80 tokens.
    prompt = tuple(range(100))
    scored = Add(sequence_id="scored", prompt=prompt, max_tokens=1, sampling=scoring, isolation_key=b"y")
    engine.add(b"gateway", scored)
    engine.step()
    engine.add(b"gateway", Add(sequence_id="pooled", prompt=(5,), max_tokens=0, sampling=GREEDY, pooling="last"))
    engine.step()
    assert stats_of(simulation).drafts.accepted_prediction_tokens > 0
    while engine.has_work:
        engine.step()
    for outbound in engine.take_outbox():
        if isinstance(outbound.message, StepOutput):
            outputs += outbound.message.outputs
    assert [one.token_id for output in outputs for one in output.prompt_logprobs] == list(prompt[1:])
    assert [output.sequence_id for output in outputs if output.pooled] == ["pooled"]


def test_large_batches_have_no_drafts(simulate: Simulate) -> None:
    adds = [request(f"{index}", GREEDY) for index in range(MAX_SEQUENCES + 1)]
    plain = run(simulate(max_batch_tokens=512), adds)
    exact = [msgspec.structs.replace(one, prediction=tuple(plain[one.sequence_id].tokens)) for one in adds]
    simulation = simulate(max_batch_tokens=512, speculates=True)
    assert run(simulation, exact) == plain
    assert stats_of(simulation).drafts.prediction_tokens == 0


def test_a_draft_ends_before_a_row_that_is_not_finite(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step computes the row again. Here, its values are then finite."""
    plain = run(simulate(), [request("one", GREEDY)])
    simulation = simulate(speculates=True)
    choose, num_broken = simulation.executor.choose, 0

    def broken(forward: SimulatedForward, masks: Masks, unused: Collection[int] = ()) -> FinishedStep:
        nonlocal num_broken
        step = choose(forward, masks, unused)
        if len(step.sampled) > 3:
            step.sampled[2] = SampledToken(None)
            num_broken += 1
        return step

    monkeypatch.setattr(simulation.executor, "choose", broken)
    exact = request("one", GREEDY, prediction=tuple(plain["one"].tokens))
    assert run(simulation, [exact]) == plain
    assert num_broken > 5


@pytest.mark.parametrize(
    "prediction", [(VOCAB_SIZE,), (-1,), (2**40,), (1,) * 40_000], ids=["beyond", "negative", "huge", "too long"]
)
def test_unusable_predictions_are_refused(simulate: Simulate, prediction: tuple[int, ...]) -> None:
    simulation = simulate(vocab_size=VOCAB_SIZE, speculates=True)
    good = request("good", GREEDY)
    simulation.engine.add(b"gateway", request("bad", GREEDY, prediction=prediction))
    simulation.engine.add(b"gateway", good)
    simulation.run()
    assert simulation.finished["bad"].code == "invalid_request"
    assert simulation.finished["good"].reason == "length"


@pytest.mark.campaign
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampled_tokens_have_the_models_distribution_with_drafts(simulate: Simulate, temperature: float) -> None:
    """The simulated model's probabilities are e for one token, and 1 for each other, up to their sum."""
    simulation = simulate(vocab_size=VOCAB_SIZE, speculates=True, num_pages=400)
    observed = np.zeros(2)
    likely = np.exp(1 / temperature) / (np.exp(1 / temperature) + VOCAB_SIZE - 1)
    for index in range(100):
        sampling = SamplingParams(temperature=temperature, seed=index, ignore_eos=True)
        add = request(f"{index}", sampling, max_tokens=120, isolation_key=b"")
        tokens = run(simulate(vocab_size=VOCAB_SIZE, num_pages=400), [add])[f"{index}"].tokens
        found = run(simulation, [msgspec.structs.replace(add, prediction=changed(tokens, index))])[f"{index}"].tokens
        for place in range(len(found)):
            [best] = simulation.executor.generate((*add.prompt, *found[:place]), 1, None)
            observed[int(found[place] == best)] += 1
    assert stats_of(simulation).drafts.accepted_prediction_tokens > observed.sum() / 4
    expected = observed.sum() * np.array([1 - likely, likely])
    # The 99.9th percentile of chi-square with one degree of freedom. The seeds are fixed.
    assert ((observed - expected) ** 2 / expected).sum() < 10.8
