"""Tokens that a grammar forces need no steps of their own, and nothing else changes."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from loramux.engine.constraints.constraint_grammar import constraint_grammar
from loramux.engine.constraints.grammar import Grammar
from loramux.engine.drafting.speculation import MAX_ROWS
from loramux.engine.loop.engine import FREE_WAIT_PART
from loramux.engine.protocol.messages import Abort, Add, Extend, SamplingParams, ThinkingBudget
from tests.engine.byte_vocabulary import EOS, ids, text
from tests.engine.constraints.forcing_grammars import FORCING
from tests.engine.loop.test_drafts import Answer, run
from tests.engine.simulated_engine import Simulate, Simulation, stats_of

pytestmark = pytest.mark.usefixtures("shared_grammar_processes")

SETTINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(seed=7),
    "cut": SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, seed=8),
    "penalties": SamplingParams(seed=9, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.7),
    "bias": SamplingParams(seed=10, logit_bias=tuple((token, -100.0) for token in sorted(ids("eart ")))),
    "logprobs": SamplingParams(seed=11, num_logprobs=3),
    "named logprobs": SamplingParams(seed=12, num_logprobs=0, logprob_token_ids=(ord("e"), ord("a"))),
    "stop token": SamplingParams(seed=13, stop_token_ids=(ord("w"), ord("v"))),
    "held back": SamplingParams(seed=14, stop_token_ids=(ord("o"), ord("s")), min_tokens=20),
    "min_tokens": SamplingParams(seed=15, min_tokens=30, ignore_eos=True),
    "bad words": SamplingParams(seed=16, bad_words=(tuple(ids("of")), tuple(ids("meth")), tuple(ids("se")))),
    "allowed tokens": SamplingParams(seed=17, allowed_token_ids=tuple(token for token in range(280) if token != 108)),
    "thinking": SamplingParams(
        seed=18, thinking=ThinkingBudget(num_tokens=9, begin=(20,), end=tuple(ids("ay")), is_open=True)
    ),
}
"""`held back` and two others forbid tokens that grammars force."""


def request(name: str, grammar: str, sampling: SamplingParams = SETTINGS["greedy"], **fields: Any) -> Add:
    settings: dict[str, Any] = {"max_tokens": 200, "prompt": tuple(ids(f"A prompt: {name}"))} | fields
    return Add(sequence_id=name, grammar=grammar, sampling=sampling, **settings)


def plain(adds: list[Add]) -> list[Add]:
    return [msgspec.structs.replace(add, speculates=False) for add in adds]


def run_twice(simulation: Simulation, adds: list[Add]) -> tuple[dict[str, Answer], dict[str, Answer]]:
    """The answers to the requests with forced tokens, and without."""
    without = run(simulation, plain(adds))
    assert stats_of(simulation).drafts.grammar_tokens == 0
    return run(simulation, adds), without


def test_answers_are_the_same_with_forced_tokens(simulate: Simulate) -> None:
    simulation = simulate(eos=(EOS,), adapters={"a": 2, "b": 3}, num_pages=400, max_sequences=12)
    adds = [
        request(
            f"{setting}, {kind}", grammar, sampling, digest=(None, "a", "b")[index % 3], tokens_at_once=1 + index % 4
        )
        for index, (kind, grammar) in enumerate(FORCING.items())
        for setting, sampling in SETTINGS.items()
    ]
    found, expected = run_twice(simulation, adds)
    assert found == expected
    reasons = {(one.end.reason, one.end.code) for one in found.values() if one.end is not None}
    assert reasons == {("stop", None), ("length", None), ("error", "no_token_allowed"), ("error", "grammar_failed")}
    assert text(found["greedy, one text"].tokens) == "There is nothing to choose in this answer."
    drafts = stats_of(simulation).drafts
    assert drafts.accepted_grammar_tokens > 100
    assert stats_of(simulation).completion_tokens == 2 * sum(
        one.end.completion_tokens for one in found.values() if one.end
    )


def test_answers_are_the_same_with_states_and_forced_tokens(simulate: Simulate) -> None:
    """The settings shorten drafts of rows that the step has already computed."""
    simulation = simulate(eos=(EOS,), num_pages=400, num_state_pages=2, max_sequences=12)
    adds = [
        request(f"{setting}, {kind}", grammar, SETTINGS[setting])
        for kind, grammar in FORCING.items()
        for setting in ("greedy", "held back", "bad words")
    ]
    found, expected = run_twice(simulation, adds)
    assert found == expected
    assert stats_of(simulation).drafts.accepted_grammar_tokens > 100


@pytest.mark.parametrize("windows", [(None,), (20, 20), (20, None)], ids=["whole", "sliding", "mixed"])
def test_forced_tokens_take_fewer_steps(simulate: Simulate, lookahead: bool, windows: tuple[int | None, ...]) -> None:
    simulation = simulate(eos=(EOS,), windows=windows)
    add = request("one", FORCING["one text"])
    plain_answer = run(simulation, plain([add]))
    num_plain = stats_of(simulation).num_steps
    assert run(simulation, [add]) == plain_answer
    num_tokens = len(plain_answer["one"].tokens)
    assert num_plain >= num_tokens > 40
    # One step for the prompt, and one for each answer of the grammar's process, which brings up to 15 forced tokens.
    # With lookahead, another step is submitted before the tokens of the first are known.
    assert stats_of(simulation).num_steps - num_plain == (5 if lookahead else 4)
    assert stats_of(simulation).drafts.accepted_grammar_tokens > 30


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17, 42])
def test_forced_tokens_end_at_the_limit(simulate: Simulate, max_tokens: int) -> None:
    simulation = simulate(eos=(EOS,))
    found, expected = run_twice(simulation, [request("one", FORCING["one text"], max_tokens=max_tokens)])
    assert found == expected
    assert len(found["one"].tokens) == max_tokens
    assert found["one"].end is not None
    assert found["one"].end.reason == ("stop" if max_tokens == 42 else "length")


@pytest.mark.parametrize(("max_tokens", "reason"), [(14, "length"), (15, "stop"), (16, "stop")])
def test_a_free_token_at_the_limit_may_complete_the_grammar(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, max_tokens: int, reason: str
) -> None:
    simulation, is_held = simulate(eos=(EOS,)), True
    receive = simulation.grammars.receive

    def receive_first() -> None:
        # `simulation.tokens` grows only after a step, and the answer about the fifteenth token may come within it.
        if not is_held or all(one.num_completion < 14 for one in simulation.engine._scheduler.running):
            receive()

    monkeypatch.setattr(simulation.grammars, "receive", receive_first)
    monkeypatch.setattr(simulation.grammars, "wait", lambda *_, **__: None)
    grammar = constraint_grammar("regex", "The answer is [ab]")
    simulation.engine.add(b"", request("one", grammar, max_tokens=max_tokens))
    step_until(simulation, min(max_tokens, 15))
    for _ in range(5):
        simulation.step()
    # The answer about the fifteenth token has not been read yet.
    assert ("one" in simulation.finished) is (max_tokens == 14)
    is_held = False
    finish(simulation)
    end = simulation.finished["one"]
    assert (end.reason, end.completion_tokens) == (reason, min(max_tokens, 15))


def test_forced_tokens_up_to_the_limit_pause_the_sequence_once(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, paused = simulate(eos=(EOS,)), []
    grants = simulation.engine._grants
    pauses = grants.pauses
    monkeypatch.setattr(grants, "pauses", lambda sequence: paused.append(sequence) or pauses(sequence))
    simulation.engine.add(b"", request("one", FORCING["one text"], max_tokens=10, pause_s=5.0))
    step_until(simulation, 10)
    for _ in range(5):
        simulation.step()
    assert len(paused) == 1


def test_late_masks_delay_no_device_that_computes_nothing(
    simulate: Simulate, lookahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate(eos=(EOS,))
    engine, executor, waits = simulation.engine, simulation.executor, set()
    wait, receive, is_waiting = simulation.grammars.wait, simulation.grammars.receive, False

    def noted(grammars: Collection[Grammar], free_s: float, *, is_patient: bool = True) -> None:
        nonlocal is_waiting
        waits.add((len(executor.batches) > num_batches, free_s, is_patient))
        is_waiting = True
        wait(grammars, free_s, is_patient=is_patient)
        is_waiting = False

    def received() -> None:
        # Each mask is late, however fast the process is that computes it: none arrives before the engine waits for it.
        if is_waiting or not simulation.scheduler.running:
            receive()

    monkeypatch.setattr(simulation.grammars, "wait", noted)
    monkeypatch.setattr(simulation.grammars, "receive", received)
    engine.add(b"", request("one", FORCING["schema"]))
    while engine.has_work:
        num_batches, engine._last_step_s = len(executor.batches), 1.0
        if not engine.step():
            select.select([simulation.grammars], [], [], 0.01)
    assert stats_of(simulation).drafts.accepted_grammar_tokens > 0
    idle = (False, FREE_WAIT_PART[False], not lookahead)
    assert waits == ({idle, (True, FREE_WAIT_PART[True], True)} if lookahead else {idle})


def test_a_stop_token_among_forced_tokens_ends_the_answer(simulate: Simulate) -> None:
    simulation = simulate(eos=(EOS,))
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(ord("n"),), num_logprobs=1)
    found, expected = run_twice(simulation, [request("one", FORCING["one text"], sampling)])
    assert found == expected
    end = found["one"].end
    assert end is not None
    assert (text(found["one"].tokens), end.reason, end.stop_token_id) == ("There is ", "stop", ord("n"))
    assert end.completion_tokens == len("There is n")
    drafts = stats_of(simulation).drafts
    assert 0 < drafts.accepted_grammar_tokens < drafts.grammar_tokens


def test_a_pause_at_the_limit_commits_no_further_token(simulate: Simulate) -> None:
    simulation = simulate(eos=(EOS,))
    simulation.engine.add(b"", request("one", FORCING["one text"], max_tokens=10, pause_s=5.0))
    step_until(simulation, 10)
    for _ in range(20):
        simulation.step()
    assert len(simulation.tokens["one"]) == 10
    simulation.engine.extend(b"", Extend(sequence_id="one", max_tokens=33))
    step_until(simulation, 33)
    for _ in range(20):
        simulation.step()
    simulation.clock.now += 6.0
    simulation.run()
    assert (simulation.finished["one"].reason, simulation.finished["one"].completion_tokens) == ("length", 33)
    assert text(simulation.tokens["one"]) == "There is nothing to choose in this answer."[:33]


def test_an_abort_reports_the_committed_tokens(simulate: Simulate) -> None:
    simulation = simulate(eos=(EOS,))
    simulation.engine.add(b"", request("one", FORCING["one text"]))
    step_until(simulation, 3)
    simulation.engine.abort(b"", Abort(sequence_id="one"))
    simulation.run()
    received = simulation.tokens["one"]
    assert "There is nothing to choose in this answer.".startswith(text(received))
    assert simulation.finished["one"].completion_tokens == len(received)


def test_preempted_sequences_go_on_where_they_were(simulate: Simulate) -> None:
    simulation = simulate(eos=(EOS,), num_pages=10)
    adds = [
        request(f"{kind} {number}", FORCING[kind], max_tokens=60)
        for kind in ("regex", "one text")
        for number in range(3)
    ]
    found, expected = run_twice(simulation, adds)
    assert found == expected
    assert simulation.scheduler.num_preemptions > 0
    assert stats_of(simulation).drafts.accepted_grammar_tokens > 0


def test_forced_tokens_beside_many_sequences_fill_a_step_with_drafts(simulate: Simulate) -> None:
    simulation = simulate(eos=(EOS,), num_pages=400, max_batch_tokens=1024, max_sequences=MAX_ROWS)
    one = request("one", FORCING["one text"])
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    free = [request(f"free {number}", "", greedy, max_tokens=60) for number in range(19)]
    expected = run(simulation, plain([one, *free]))
    num_batches = len(simulation.executor.batches)
    begin(simulation, [one])
    assert run(simulation, free) == expected
    decodes = [len(batch.tokens) for batch in simulation.executor.batches[num_batches:] if batch.max_q == 1]
    assert max(decodes) == MAX_ROWS


def test_guesses_and_forced_tokens_share_an_engine(simulate: Simulate) -> None:
    """Sequences with and without grammars share steps, and the latter have drafts from their predictions."""
    constrained = [request(kind, grammar) for kind, grammar in FORCING.items()]
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    free = [request(f"free {number}", "", greedy, max_tokens=90) for number in range(2)]
    simulation = simulate(eos=(EOS,), speculates=True)
    expected = run(simulation, plain([*constrained, *free]))
    # Steps have no guesses while a sequence waits for its grammar.
    begin(simulation, constrained)
    drafted = [msgspec.structs.replace(add, prediction=tuple(expected[add.sequence_id].tokens)) for add in free]
    assert run(simulation, drafted) == expected
    drafts = stats_of(simulation).drafts
    assert drafts.accepted_prediction_tokens > 0
    assert drafts.accepted_grammar_tokens > 0


def test_a_forced_token_beyond_the_adapters_vocabulary_fails_as_without(simulate: Simulate) -> None:
    settings: dict[str, Any] = {"adapters": {"small": 2}, "vocab_sizes": {"small": 110}}
    simulation = simulate(eos=(EOS,), **settings)
    # The letter r is token 114.
    adds = [request("one", FORCING["one text"], digest="small", vocab_size=110, prompt=(3, 4, 5))]
    found, expected = run_twice(simulation, adds)
    assert found == expected
    end = found["one"].end
    assert end is not None
    assert (text(found["one"].tokens), end.code) == ("The", "grammar_failed")


def test_a_grammar_with_forced_tokens_goes_on_in_a_new_fork(simulate: Simulate) -> None:
    simulation = simulate(eos=(EOS,))
    simulation.engine.add(b"", request("one", FORCING["one text"]))
    step_until(simulation, 1)
    (fork,) = simulation.grammars._forks.values()
    (grammar,) = simulation.engine._constrained
    # The tokens that the first answer brought are not used up, so the fork has nothing to do.
    assert grammar.forced
    assert not fork.unanswered
    # The connection ends as if the fork had been killed.
    fork.end.shutdown(socket.SHUT_RDWR)
    finish(simulation)
    assert grammar.looks_ahead
    assert text(simulation.tokens["one"]) == "There is nothing to choose in this answer."
    assert simulation.finished["one"].reason == "stop"


def begin(simulation: Simulation, adds: list[Add]) -> None:
    """Add sequences, and step until all of them run. Their output stays in the engine."""
    for add in adds:
        simulation.engine.add(b"gateway", add)
    while simulation.scheduler.queue.num_waiting:
        simulation.engine.step()


def finish(simulation: Simulation) -> None:
    """Step until the sequence `one` has ended."""
    deadline_s = time.monotonic() + 60
    while "one" not in simulation.finished:
        assert time.monotonic() < deadline_s
        if not simulation.step():
            select.select([simulation.grammars], [], [], 0.01)


def step_until(simulation: Simulation, num_tokens: int) -> None:
    """Step until the sequence `one` has this many tokens."""
    deadline_s = time.monotonic() + 60
    while len(simulation.tokens["one"]) < num_tokens:
        assert time.monotonic() < deadline_s
        if not simulation.step():
            select.select([simulation.grammars], [], [], 0.01)
