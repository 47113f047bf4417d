"""The engine over a simulated device: what each sequence receives, and that nothing leaks."""

from __future__ import annotations

import random

import pytest

from loramux.engine.messages import Abort, AdapterState, Load, SamplingParams, StatsRequest, Unload
from tests.engine.simulated_engine import GREEDY, VOCAB_SIZE, Simulate, Simulation


def stats(simulation: Simulation):  # type: ignore[no-untyped-def]
    return simulation.engine.stats(StatsRequest(call_id="s"))


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
    assert stats(simulation).max_adapters_in_step == 3
    assert stats(simulation).mixed_steps >= 1


def test_the_simulation_notices_pages_that_are_mixed_up(simulation: Simulation) -> None:
    adds = [simulation.add(f"s{i}", num_prompt=20, max_tokens=8) for i in range(3)]
    simulation.step()
    first, second, _ = simulation.scheduler.running
    first.pages, second.pages = second.pages, first.pages
    simulation.run()
    assert [simulation.tokens[add.sequence_id] == simulation.expected(add) for add in adds] == [False, False, True]


def test_sequences_of_one_adapter_are_adjacent(simulation: Simulation) -> None:
    for i, digest in enumerate(["a", "b", "a", None, "b", "a"]):
        simulation.add(f"s{i}", digest=digest, max_tokens=6)
    simulation.run()
    for batch in simulation.executor.batches:
        seen = [slot for i, slot in enumerate(batch.slots) if i == 0 or slot != batch.slots[i - 1]]
        assert len(seen) == len(set(seen))


def test_a_long_prompt_is_cut_into_chunks_and_decode_goes_on(simulation: Simulation) -> None:
    short = simulation.add("short", num_prompt=4, max_tokens=12)
    simulation.step()
    long = simulation.add("long", num_prompt=300, max_tokens=3)
    received = len(simulation.tokens["short"])
    for expected in range(received + 1, received + 5):
        simulation.step()
        assert len(simulation.tokens["short"]) == expected, "decode must not wait for the prompt"
    simulation.run()
    assert simulation.tokens["short"] == simulation.expected(short)
    assert simulation.tokens["long"] == simulation.expected(long)
    assert max(len(batch.tokens) for batch in simulation.executor.batches) <= 64


def test_base_traffic_does_not_wait_for_a_loading_adapter(simulation: Simulation) -> None:
    simulation.loader.is_holding = True
    waiting = simulation.add("waiting", digest="a")
    base = simulation.add("base")
    for _ in range(8):
        simulation.step()
    assert simulation.tokens["base"] == simulation.expected(base)
    assert "waiting" not in simulation.finished
    simulation.loader.let_go()
    simulation.run()
    assert simulation.tokens["waiting"] == simulation.expected(waiting)


def test_one_fetch_serves_all_who_wait(simulation: Simulation) -> None:
    for i in range(6):
        simulation.add(f"s{i}", digest="a")
    simulation.run()
    assert simulation.loader.num_fetches == 1


def test_more_adapters_than_slots_all_run(simulate: Simulate, simulation: Simulation) -> None:
    names = {f"adapter{i}": 1 + i % 3 for i in range(9)}
    small = simulate(num_slots=2, adapters=names)
    adds = [small.add(f"s{i}", digest=name) for i, name in enumerate(names)]
    small.run()
    for add in adds:
        assert small.tokens[add.sequence_id] == small.expected(add)
    assert stats(small).num_adapter_evictions == len(names) - 2


def test_the_least_recently_used_idle_adapter_is_evicted(simulate: Simulate) -> None:
    simulation = simulate(num_pages=8, adapters={"a": 2, "b": 2, "c": 2, "d": 3})
    for digest in ("a", "b", "c", "a"):
        simulation.add(f"first-{digest}-{len(simulation.finished)}", digest=digest, max_tokens=1)
        simulation.run()
    simulation.add("d", digest="d", max_tokens=1)
    simulation.run()
    assert [entry.digest for entry in simulation.adapters.entries()] == ["a", "c", "d"]


def test_pages_of_idle_adapters_serve_kv(simulate: Simulate) -> None:
    simulation = simulate(num_pages=10, adapters={"a": 5, "b": 4})
    for digest in ("a", "b"):
        simulation.add(digest, digest=digest, max_tokens=1)
        simulation.run()
    assert stats(simulation).num_adapter_pages == 9
    add = simulation.add("base", num_prompt=60, max_tokens=20)
    simulation.run()
    assert simulation.tokens["base"] == simulation.expected(add)
    assert stats(simulation).num_adapter_evictions == 1


def test_preempted_sequences_are_computed_again_and_end_right(simulate: Simulate) -> None:
    simulation = simulate(num_pages=12, adapters={"a": 2})
    adds = [simulation.add(f"s{i}", num_prompt=20, max_tokens=60, digest="a" if i % 2 else None) for i in range(5)]
    simulation.run()
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
        assert simulation.finished[add.sequence_id].completion_tokens == 60
    assert stats(simulation).num_preemptions > 0


def test_an_in_flight_adapter_is_never_evicted(simulate: Simulate) -> None:
    simulation = simulate(num_pages=12, num_slots=2, adapters={"a": 3, "b": 3, "c": 3})
    long = simulation.add("long", digest="a", max_tokens=40)
    for i in range(10):
        simulation.add(f"b{i}", digest="b", max_tokens=2)
        simulation.add(f"c{i}", digest="c", max_tokens=2)
    simulation.run()
    assert simulation.tokens["long"] == simulation.expected(long)


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
def test_a_request_that_can_never_run_is_refused_and_disturbs_nobody(
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
def test_a_token_id_outside_the_vocabulary_never_reaches_a_kernel(simulation: Simulation, token: int) -> None:
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
def test_a_biased_token_outside_the_vocabulary_never_reaches_a_kernel(
    simulation: Simulation, bad: SamplingParams
) -> None:
    good = simulation.add("good")
    simulation.add("bad", sampling=bad)
    simulation.run()
    assert simulation.finished["bad"].code == "invalid_request"
    assert simulation.tokens["good"] == simulation.expected(good)


def test_a_failed_adapter_is_tried_again(simulation: Simulation) -> None:
    for _ in range(2):
        simulation.add("x", digest="missing")
        simulation.run()
    assert simulation.loader.num_fetches == 2


def test_a_row_that_is_not_finite_ends_alone(simulation: Simulation) -> None:
    simulation.executor.not_finite_for.add("a")
    good = [simulation.add("base"), simulation.add("b", digest="b")]
    simulation.add("bad", digest="a")
    simulation.run()
    assert simulation.finished["bad"].code == "not_finite"
    for add in good:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)


@pytest.mark.parametrize("keep", [None, 0, 2, 100], ids=["disconnect", "keep none", "keep two", "keep more"])
def test_an_abort_bills_what_was_committed_or_kept(simulation: Simulation, keep: int | None) -> None:
    simulation.add("s", max_tokens=50)
    for _ in range(5):
        simulation.step()
    committed = len(simulation.tokens["s"])
    assert committed >= 4
    simulation.engine.abort(b"gateway", Abort(sequence_id="s", keep=keep))
    simulation.run()
    assert len(simulation.tokens["s"]) == committed
    billed = committed if keep is None else min(keep, committed)
    assert (simulation.finished["s"].reason, simulation.finished["s"].completion_tokens) == ("abort", billed)


def test_an_abort_while_waiting_bills_nothing(simulation: Simulation) -> None:
    simulation.loader.is_holding = True
    simulation.add("s", digest="a")
    simulation.step()
    simulation.engine.abort(b"gateway", Abort(sequence_id="s"))
    simulation.loader.let_go()
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
    assert stats(simulation).num_adapter_pages == 0


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


def test_a_seeded_stream_is_its_own(simulate: Simulate, simulation: Simulation) -> None:
    sampling = SamplingParams(temperature=5.0, seed=7, ignore_eos=True)
    alone = simulate()
    alone.add("s", max_tokens=8, sampling=sampling)
    alone.run()
    for i in range(4):
        simulation.add(f"neighbour{i}", max_tokens=9, sampling=SamplingParams(temperature=5.0, seed=i))
    simulation.add("s", max_tokens=8, sampling=sampling)
    simulation.run()
    assert simulation.tokens["s"] == alone.tokens["s"]


def test_random_life_leaks_nothing(simulate: Simulate) -> None:
    """Sequences of random shapes arrive, are aborted, preempted and evict each other's adapters."""
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
    counts = stats(simulation)
    assert counts.num_preemptions > 0
    assert counts.num_adapter_evictions > 0


@pytest.mark.parametrize(
    ("num_pages", "sizes", "num_requests"),
    [(10, {"a": 6, "b": 6}, 2), (20, dict.fromkeys("abcde", 6), 10), (11, {"a": 9, "b": 2, "c": 9}, 6)],
    ids=["two that exclude each other", "five of which three fit", "large and small"],
)
def test_adapters_that_do_not_fit_together_take_turns(
    simulate: Simulate, num_pages: int, sizes: dict[str, int], num_requests: int
) -> None:
    simulation = simulate(num_pages=num_pages, adapters=sizes)
    names = list(sizes)
    adds = [simulation.add(f"s{i}", digest=names[i % len(names)], max_tokens=3) for i in range(num_requests)]
    simulation.run(max_steps=500)
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
    # An adapter that found room may lose it once more to an older request's K and V, not again and again.
    assert stats(simulation).num_adapter_loads <= 2 * num_requests


def test_an_old_request_is_not_overtaken_for_ever(simulate: Simulate) -> None:
    """A large adapter gets its pages although small requests keep coming."""
    simulation = simulate(num_pages=12, adapters={"large": 10, "small": 1})
    for i in range(4):
        simulation.add(f"early{i}", digest="small", max_tokens=8)
    simulation.step()
    simulation.add("old", digest="large", max_tokens=2)
    for i in range(100):
        simulation.add(f"late{i}", digest="small", max_tokens=8)
        simulation.step()
        if "old" in simulation.finished:
            break
    assert simulation.finished["old"].reason == "length"
    simulation.run()


def test_a_load_that_loses_its_adapter_at_once_is_still_answered(simulate: Simulate) -> None:
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
