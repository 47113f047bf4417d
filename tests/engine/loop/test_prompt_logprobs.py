from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
from msgspec import structs

from loramux.engine.protocol.messages import Abort, Add, Finished, PromptLogprob, SequenceOutput, StepOutput
from loramux.engine.server.gateway_link import GatewayLink
from tests.engine.simulated_engine import GREEDY, Simulation, simulate_engine

SCORING = structs.replace(GREEDY, num_prompt_logprobs=2)


def scores_of(simulation: Simulation) -> tuple[dict[str, list[PromptLogprob]], dict[str, list[int]], dict[str, str]]:
    """Run each sequence to its end, and return its prompt log-probabilities, tokens and finish reason."""
    scores: dict[str, list[PromptLogprob]] = defaultdict(list)
    tokens: dict[str, list[int]] = defaultdict(list)
    ends: dict[str, str] = {}
    while simulation.engine.has_work:
        simulation.engine.step()
        for outbound in simulation.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        assert not (output.prompt_logprobs and tokens[output.sequence_id]), "scores come first"
                        scores[output.sequence_id] += output.prompt_logprobs
                        tokens[output.sequence_id] += output.token_ids
                case Finished(sequence_id=sequence_id, reason=reason, code=code):
                    ends[sequence_id] = code or reason
    simulation.engine.check_integrity()
    return scores, tokens, ends


def assert_scored(simulation: Simulation, add: Add, scored: list[PromptLogprob]) -> None:
    assert [one.token_id for one in scored] == list(add.prompt[1:])
    for position, one in enumerate(scored, start=1):
        # The simulated model gives its choice a logit of 1 and all others 0.
        digest = add.digest if position > add.activation else None
        [likeliest] = simulation.executor.generate(add.prompt[:position], 1, digest, add.activation)
        assert one.top[0][0] == likeliest
        assert len(one.top) == 2
        assert one.rank == (1 if one.token_id == likeliest else 2)
        assert one.logprob == one.top[0 if one.rank == 1 else 1][1]


@pytest.mark.parametrize("lookahead", [False, True], ids=["at-once", "a-step-ahead"])
@pytest.mark.parametrize("num_prompt", [1, 2, 7, 16, 33, 100])
def test_every_prompt_token_but_the_first_is_scored(num_prompt: int, lookahead: bool) -> None:
    simulation = simulate_engine(adapters={"a": 2}, lookahead=lookahead, max_batch_tokens=7)
    scored = [simulation.add(f"s{d}", num_prompt=num_prompt, digest=d, sampling=SCORING) for d in (None, "a")]
    scored.append(
        simulation.add("later", num_prompt=num_prompt, digest="a", sampling=SCORING, activation=num_prompt // 2)
    )
    plain = simulation.add("plain", num_prompt=num_prompt)
    scores, tokens, _ = scores_of(simulation)
    for add in scored:
        assert_scored(simulation, add, scores[add.sequence_id])
        assert tokens[add.sequence_id] == simulation.expected(add)
    assert scores["plain"] == []
    assert tokens["plain"] == simulation.expected(plain)


@pytest.mark.parametrize("lookahead", [False, True], ids=["at-once", "a-step-ahead"])
def test_a_preempted_prompt_is_not_scored_twice(lookahead: bool) -> None:
    simulation = simulate_engine(num_pages=6, lookahead=lookahead, max_batch_tokens=9)
    adds = [simulation.add(f"s{i}", num_prompt=30 - i, max_tokens=30, sampling=SCORING) for i in range(3)]
    scores, tokens, _ = scores_of(simulation)
    assert simulation.scheduler.num_preemptions > 0
    for add in adds:
        assert_scored(simulation, add, scores[add.sequence_id])
        assert tokens[add.sequence_id] == simulation.expected(add)


def test_a_scored_prompt_reads_no_cached_prefix_but_fills_the_cache() -> None:
    simulation = simulate_engine()
    prompt = tuple(range(100, 164))

    def run(name: str, sampling: Any) -> tuple[list[PromptLogprob], int]:
        add = simulation.make_add(name, prompt, 2, sampling=sampling, isolation_key=b"tenant")
        simulation.engine.add(b"gateway", add)
        finished: list[Finished] = []
        scores: list[PromptLogprob] = []
        while simulation.engine.has_work:
            simulation.engine.step()
            for outbound in simulation.engine.take_outbox():
                match outbound.message:
                    case StepOutput(outputs=outputs):
                        scores += [one for output in outputs for one in output.prompt_logprobs]
                    case Finished():
                        finished.append(outbound.message)
        return scores, finished[0].cached_tokens

    first, num_cached = run("first", SCORING)
    assert (len(first), num_cached) == (63, 0)
    _, num_cached = run("plain", GREEDY)
    assert num_cached > 0
    assert run("again", SCORING) == (first, 0)


def test_a_prompt_with_scores_that_are_not_finite_ends_its_sequence() -> None:
    simulation = simulate_engine(adapters={"a": 2}, max_batch_tokens=8)
    simulation.executor.not_finite_for.add("a")
    simulation.add("broken", num_prompt=30, digest="a", sampling=SCORING)
    whole = simulation.add("whole", num_prompt=30, sampling=SCORING)
    scores, _, ends = scores_of(simulation)
    assert ends == {"broken": "not_finite", "whole": "length"}
    assert scores["broken"] == []
    assert_scored(simulation, whole, scores["whole"])


def test_an_aborted_prompt_reports_no_more_scores() -> None:
    simulation = simulate_engine(lookahead=True, max_batch_tokens=8)
    simulation.add("s", num_prompt=60, sampling=SCORING)
    for _ in range(3):
        simulation.engine.step()
    simulation.engine.take_outbox()
    simulation.engine.abort(b"gateway", Abort(sequence_id="s"))
    scores, _, ends = scores_of(simulation)
    assert (scores["s"], ends["s"]) == ([], "abort")


@pytest.mark.parametrize("count", [-1, 6])
def test_more_alternatives_than_allowed_are_refused(count: int) -> None:
    simulation = simulate_engine()
    simulation.add("s", sampling=structs.replace(GREEDY, num_prompt_logprobs=count))
    [refused] = simulation.engine.take_outbox()
    assert isinstance(refused.message, Finished)
    assert refused.message.code == "invalid_request"


def test_scores_held_for_a_slow_gateway_are_joined_in_order() -> None:
    sent: list[Any] = []
    link = GatewayLink(sent.append)
    scores = [PromptLogprob(token_id, -math.log(token_id), 1) for token_id in range(1, 5)]
    for part in (scores[:1], scores[1:3], scores[3:]):
        link.post(StepOutput(outputs=(SequenceOutput(sequence_id="s", token_ids=(), prompt_logprobs=tuple(part)),)))
    link.grant(1)
    [message] = sent
    assert message.outputs[0].prompt_logprobs == tuple(scores)
