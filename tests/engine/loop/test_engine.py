from __future__ import annotations

import random

import pytest

from loramux.engine.protocol.messages import Abort, AdapterState, Load, SamplingParams, Unload
from tests.engine.simulated_engine import GREEDY, VOCAB_SIZE, Simulate, Simulation, stats_of


def test_one_sequence_runs_to_its_limit(simulation: Simulation) -> None:
    add = simulation.add("one", num_prompt=37, max_tokens=20)
    simulation.run()
    assert simulation.tokens["one"] == simulation.expected(add)
    finished = simulation.finished["one"]
    assert (finished.reason, finished.prompt_tokens, finished.completion_tokens) == ("length", 37, 20)


def test_a_batch_mixes_adapters_and_base(simulation: Simulation) -> None:
    adds = [simulation.add(f"s{i}", num_prompt=3 + i, digest=d) for i, d in enumerate([None, "a", "b", "c", "a"])]
    simulation.run()
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
    assert stats_of(simulation).max_adapters_in_step == 3
    assert stats_of(simulation).mixed_steps >= 1


def test_simulation_detects_mixed_up_pages(simulation: Simulation) -> None:
    adds = [simulation.add(f"s{i}", num_prompt=20, max_tokens=8) for i in range(3)]
    simulation.step()
    first, second, _ = simulation.scheduler.running
    first.tables, second.tables = second.tables, first.tables
    simulation.run()
    assert [simulation.tokens[add.sequence_id] == simulation.expected(add) for add in adds] == [False, False, True]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "digest", "code"),
    [
        (500, 13, None, "prompt_too_long"),
        (0, 4, None, "invalid_request"),
        (4, 0, None, "invalid_request"),
        (100, 100, "missing", "adapter_unavailable"),
        (100, 100, "huge", "adapter_unavailable"),
        (100, 100, "large", "request_too_large"),
        (400, 100, None, "request_too_large"),
    ],
    ids=[
        "beyond the context",
        "empty prompt",
        "no new token",
        "adapter vanished",
        "adapter beyond the pool",
        "adapter and request together beyond the pool",
        "request beyond the pool",
    ],
)
def test_request_that_can_never_run_is_refused_without_side_effects(
    simulate: Simulate, num_prompt: int, max_tokens: int, digest: str | None, code: str
) -> None:
    simulation = simulate(num_pages=20, adapters={"huge": 21, "large": 15})
    other = simulation.add("other", max_tokens=30)
    simulation.add("bad", num_prompt=num_prompt, max_tokens=max_tokens, digest=digest)
    simulation.run()
    assert (simulation.finished["bad"].reason, simulation.finished["bad"].code) == ("error", code)
    assert simulation.finished["bad"].completion_tokens == 0
    assert simulation.tokens["other"] == simulation.expected(other)


@pytest.mark.parametrize("token", [-1, 1000, 2**40])
def test_token_id_outside_the_vocabulary_is_refused(simulation: Simulation, token: int) -> None:
    add = simulation.add("good")
    bad = type(add)(sequence_id="bad", prompt=(1, token), max_tokens=3, sampling=GREEDY)
    simulation.engine.add(b"gateway", bad)
    simulation.run()
    assert simulation.finished["bad"].code == "invalid_request"
    assert simulation.tokens["good"] == simulation.expected(add)


@pytest.mark.parametrize(
    "bad",
    [SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)), SamplingParams(logit_bias=((-1, 1.0),))],
    ids=["beyond the vocabulary", "negative"],
)
def test_biased_token_outside_the_vocabulary_is_refused(simulation: Simulation, bad: SamplingParams) -> None:
    good = simulation.add("good")
    simulation.add("bad", sampling=bad)
    simulation.run()
    assert simulation.finished["bad"].code == "invalid_request"
    assert simulation.tokens["good"] == simulation.expected(good)


def test_non_finite_row_ends_only_its_own_sequence(simulation: Simulation) -> None:
    simulation.executor.not_finite_for.add("a")
    good = [simulation.add("base"), simulation.add("b", digest="b")]
    simulation.add("bad", digest="a")
    simulation.run()
    assert simulation.finished["bad"].code == "not_finite"
    for add in good:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)


def test_an_abort_reports_the_committed_tokens(simulation: Simulation) -> None:
    simulation.add("s", max_tokens=50)
    for _ in range(5):
        simulation.step()
    committed = len(simulation.tokens["s"])
    assert committed >= 4
    simulation.engine.abort(b"gateway", Abort(sequence_id="s"))
    simulation.run()
    assert len(simulation.tokens["s"]) == committed
    assert (simulation.finished["s"].reason, simulation.finished["s"].completion_tokens) == ("abort", committed)


def test_an_abort_while_waiting_reports_nothing(simulation: Simulation) -> None:
    simulation.hold_loads()
    simulation.add("s", digest="a")
    simulation.step()
    simulation.engine.abort(b"gateway", Abort(sequence_id="s"))
    simulation.let_loads_go()
    simulation.run()
    assert (simulation.finished["s"].prompt_tokens, simulation.finished["s"].completion_tokens) == (0, 0)


def test_eos_is_counted_but_not_sent(simulate: Simulate) -> None:
    probe = simulate()
    add = probe.add("s", max_tokens=6)
    third = probe.expected(add)[2]
    simulation = simulate(eos=(third,))
    simulation.add("s", max_tokens=6, sampling=SamplingParams(temperature=0.0))
    simulation.run()
    assert len(simulation.tokens["s"]) == 2
    assert (simulation.finished["s"].reason, simulation.finished["s"].completion_tokens) == ("stop", 3)


def test_unload_waits_for_the_last_user(simulation: Simulation) -> None:
    simulation.add("s", digest="a", max_tokens=5)
    simulation.step()
    simulation.engine.unload(b"gateway", Unload(call_id="u", digest="a"))
    answers: list[AdapterState] = []
    while simulation.engine.has_work:
        simulation.engine.step()
        messages = [one.message for one in simulation.engine.take_outbox()]
        answers += [one for one in messages if isinstance(one, AdapterState)]
    assert [(one.call_id, one.state) for one in answers] == [("u", "absent")]
    assert stats_of(simulation).num_adapter_pages == 0


def test_load_is_answered_once_resident(simulation: Simulation) -> None:
    simulation.engine.load(b"gateway", Load(call_id="l", digest="b"))
    simulation.engine.load(b"gateway", Load(call_id="m", digest="missing"))
    answers: dict[str, str] = {}
    while simulation.engine.has_work:
        simulation.engine.step()
        for outbound in simulation.engine.take_outbox():
            assert isinstance(outbound.message, AdapterState)
            answers[outbound.message.call_id] = outbound.message.state
    assert answers == {"l": "resident", "m": "failed"}


def test_seeded_stream_is_independent(simulate: Simulate, simulation: Simulation) -> None:
    sampling = SamplingParams(temperature=5.0, seed=7, ignore_eos=True)
    alone = simulate()
    alone.add("s", max_tokens=8, sampling=sampling)
    alone.run()
    for i in range(4):
        simulation.add(f"neighbour{i}", max_tokens=9, sampling=SamplingParams(temperature=5.0, seed=i))
    simulation.add("s", max_tokens=8, sampling=sampling)
    simulation.run()
    assert simulation.tokens["s"] == alone.tokens["s"]


def test_random_traffic_leaks_nothing(simulate: Simulate) -> None:
    rng = random.Random(3)
    names = {f"adapter{i}": rng.randint(1, 6) for i in range(12)}
    simulation = simulate(num_pages=40, num_slots=4, adapters=names, max_sequences=6)
    adds = {}
    for turn in range(400):
        if rng.random() < 0.5:
            name = f"s{turn}"
            digest = rng.choice([None, *names])
            adds[name] = simulation.add(name, rng.randint(1, 120), rng.randint(1, 40), digest)
        if adds and rng.random() < 0.1:
            simulation.engine.abort(b"gateway", Abort(sequence_id=rng.choice(list(adds))))
        simulation.step()
    simulation.run()
    assert set(simulation.finished) == set(adds)
    for name, add in adds.items():
        expected = simulation.expected(add)
        received = simulation.tokens[name]
        assert received == expected[: len(received)]
        if simulation.finished[name].reason == "length":
            assert received == expected
    counts = stats_of(simulation)
    assert counts.num_preemptions > 0
    assert counts.num_adapter_evictions > 0


def test_load_is_answered_even_if_the_adapter_is_evicted_immediately(simulate: Simulate) -> None:
    simulation = simulate(num_slots=1, adapters={"a": 1, "b": 1})
    simulation.add("s", digest="a", max_tokens=1)
    simulation.run()
    for name in ("b", "a"):
        simulation.engine.load(b"gateway", Load(call_id=name, digest=name))
    answers: list[str] = []
    for _ in range(20):
        simulation.engine.step()
        messages = [one.message for one in simulation.engine.take_outbox()]
        answers += [one.call_id for one in messages if isinstance(one, AdapterState)]
    assert sorted(answers) == ["a", "b"]
    assert not simulation.engine.has_work


def test_sequences_that_began_last_are_recorded_first(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has room for as many sequences as there are slots, but more can wait for limits and masks."""
    recorded: list[list[str]] = []
    monkeypatch.setattr(simulation.engine, "_note_running", recorded.append)
    for name in "ab":
        simulation.add(name)
        simulation.step()
    assert recorded == [["a"], ["b", "a"]]
