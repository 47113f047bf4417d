from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from loramux.engine.adapters.adapter_load import AdapterPhase
from loramux.engine.protocol.messages import Abort, Extend, Load, Pin, ResidentAdapter, Unload
from tests.engine.simulated_engine import Simulate, Simulation, stats_of

OWNER = b"gateway"


class Calls:
    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.num_calls = 0

    def load(self, digest: str) -> str:
        self.simulation.engine.load(OWNER, Load(call_id=self._next(), digest=digest))
        return str(self.num_calls)

    def unload(self, digest: str, is_purge: bool = False) -> str:
        unload = Unload(call_id=self._next(), digest=digest, is_purge=is_purge)
        self.simulation.engine.unload(OWNER, unload)
        return str(self.num_calls)

    def pin(self, digest: str, is_pinned: bool = True) -> str:
        self.simulation.engine.pin(OWNER, Pin(call_id=self._next(), digest=digest, is_pinned=is_pinned))
        return str(self.num_calls)

    def outcome(self, call_id: str) -> str | None:
        """The error code of a failed call, the adapter's state after any other call, or None without an answer."""
        answers = [one for one in self.simulation.answers if one.call_id == call_id]
        assert len(answers) <= 1, "answered twice"
        return answers[0].code or answers[0].state if answers else None

    def _next(self) -> str:
        self.num_calls += 1
        return str(self.num_calls)


def resident(simulation: Simulation) -> dict[str, ResidentAdapter]:
    return {one.digest: one for one in stats_of(simulation).adapters}


def phase_of(simulation: Simulation, digest: str) -> AdapterPhase:
    entry = simulation.adapters.find(digest)
    assert entry is not None
    return entry.phase


def use(simulation: Simulation, *digests: str) -> None:
    for digest in digests:
        name = f"use-{digest}-{len(simulation.finished)}"
        add = simulation.add(name, digest=digest, max_tokens=2)
        simulation.run()
        assert simulation.tokens[name] == simulation.expected(add)


def test_purge_finishes_while_requests_keep_arriving(simulation: Simulation) -> None:
    calls = Calls(simulation)
    running = simulation.add("running", digest="a", max_tokens=12)
    for _ in range(3):
        simulation.step()
    call = calls.unload("a", is_purge=True)
    for turn in range(40):
        simulation.add(f"late{turn}", digest="a", max_tokens=12)
        simulation.step()
        if calls.outcome(call) is not None:
            break
    assert calls.outcome(call) == "absent"
    assert simulation.tokens["running"] == simulation.expected(running)
    refused = [one for name, one in simulation.finished.items() if name.startswith("late")]
    assert len(refused) > 5
    assert {(one.code, one.message) for one in refused} == {("adapter_unloaded", "the adapter is being unloaded")}
    use(simulation, "a")
    assert simulation.stager.num_requests == 2


def test_requests_run_while_an_unload_waits(simulation: Simulation) -> None:
    """Their adapter is back in service, although a long answer has kept it loaded since it was taken out."""
    calls = Calls(simulation)
    adds = [simulation.add("running", digest="a", max_tokens=12)]
    for _ in range(3):
        simulation.step()
    call = calls.unload("a")
    adds.append(simulation.add("next", digest="a"))
    for _ in range(5):
        simulation.step()
    assert (simulation.finished["next"].reason, calls.outcome(call)) == ("length", None)
    simulation.run()
    assert calls.outcome(call) == "absent"
    assert [simulation.tokens[add.sequence_id] for add in adds] == [simulation.expected(add) for add in adds]
    assert simulation.stager.num_requests == 1


@pytest.mark.parametrize("kind", ["load", "pin"])
def test_load_or_pin_supersedes_an_unload_that_waits(simulation: Simulation, kind: str) -> None:
    calls = Calls(simulation)
    simulation.add("running", digest="a", max_tokens=12)
    for _ in range(3):
        simulation.step()
    unload = calls.unload("a")
    simulation.step()
    later = calls.load("a") if kind == "load" else calls.pin("a")
    simulation.step()
    assert [calls.outcome(call) for call in (unload, later)] == ["superseded", "resident"]
    simulation.run()
    assert list(resident(simulation)) == ["a"]


def test_unload_keeps_a_fetch_that_a_request_waits_for(simulation: Simulation) -> None:
    calls = Calls(simulation)
    simulation.hold_loads()
    wanted = simulation.add("s", digest="a")
    load, unload = calls.load("b"), calls.unload("b")
    simulation.step()
    assert [calls.outcome(call) for call in (load, unload)] == ["superseded", "absent"]
    assert simulation.adapters.find("b") is None
    assert phase_of(simulation, "a") is AdapterPhase.REQUESTED
    simulation.let_loads_go()
    simulation.run()
    assert simulation.tokens["s"] == simulation.expected(wanted)


def test_the_later_of_a_load_and_an_unload_wins(simulation: Simulation) -> None:
    calls = Calls(simulation)
    simulation.hold_loads()
    before, unload, after = calls.load("a"), calls.unload("a"), calls.load("a")
    simulation.step()
    simulation.let_loads_go()
    simulation.run()
    assert [calls.outcome(call) for call in (before, unload, after)] == ["superseded", "superseded", "resident"]
    assert list(resident(simulation)) == ["a"]
    assert simulation.stager.num_requests == 1, "the first load was superseded before the step"


def test_load_after_a_purge_is_requested_in_the_same_step(simulation: Simulation) -> None:
    calls = Calls(simulation)
    calls.load("a")
    simulation.run()
    unload, load = calls.unload("a", is_purge=True), calls.load("a")
    simulation.step()
    assert (calls.outcome(unload), simulation.stager.num_requests) == ("absent", 2)
    simulation.run()
    assert calls.outcome(load) == "resident"


def test_load_waits_for_an_earlier_purge(simulation: Simulation) -> None:
    calls = Calls(simulation)
    simulation.add("user", digest="a", max_tokens=8)
    for _ in range(3):
        simulation.step()
    unload, load = calls.unload("a", is_purge=True), calls.load("a")
    simulation.run()
    assert [one.call_id for one in simulation.answers] == [unload, load]
    assert simulation.stager.num_requests == 2


def test_purge_deletes_the_copy_in_host_memory_after_the_last_request(simulation: Simulation) -> None:
    calls = Calls(simulation)
    running = simulation.add("user", digest="a", max_tokens=8)
    for _ in range(3):
        simulation.step()
    plain, purge = calls.unload("a"), calls.unload("a", is_purge=True)
    simulation.step()
    assert (calls.outcome(purge), simulation.stager.forgotten) == (None, [])
    simulation.run()
    assert simulation.tokens["user"] == simulation.expected(running)
    assert [calls.outcome(call) for call in (plain, purge)] == ["absent", "absent"]
    assert simulation.stager.forgotten == ["a"]
    calls.unload("b")
    simulation.run()
    assert simulation.stager.forgotten == ["a"], "an ordinary unload keeps the copy"


def test_unload_does_not_scan_all_sequences(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(simulation)
    simulation.add("user", digest="a", max_tokens=20)
    for i in range(5):
        simulation.add(f"base{i}", max_tokens=20)
    simulation.step()
    call = calls.unload("a")
    looked_at: list[str] = []
    live = simulation.engine._live
    monkeypatch.setattr(type(live), "__iter__", lambda self: looked_at.append("all") or iter(()))
    simulation.run()
    assert calls.outcome(call) == "absent"
    assert looked_at == []


def test_pinned_adapter_is_never_evicted(simulate: Simulate) -> None:
    simulation = simulate(num_pages=8, num_slots=3, adapters={"a": 2, "b": 2, "c": 3, "d": 3})
    calls = Calls(simulation)
    call = calls.pin("a")
    simulation.run()
    assert calls.outcome(call) == "resident"
    use(simulation, "b", "c", "d", "b", "c", "d")
    add = simulation.add("base", num_prompt=60, max_tokens=36)
    simulation.run()
    assert simulation.tokens["base"] == simulation.expected(add)
    assert resident(simulation)["a"].is_pinned
    assert resident(simulation)["a"].num_users == 0
    use(simulation, "a")
    fetches = simulation.stager.num_requests
    use(simulation, "a")
    assert simulation.stager.num_requests == fetches


def test_unpinned_adapter_is_evictable_again(simulate: Simulate) -> None:
    simulation = simulate(num_slots=2, adapters={"a": 1, "b": 1, "c": 1})
    calls = Calls(simulation)
    calls.pin("a")
    simulation.run()
    use(simulation, "b", "c")
    assert "a" in resident(simulation)
    assert calls.outcome(calls.pin("a", is_pinned=False)) is None
    simulation.step()
    assert calls.outcome(str(calls.num_calls)) == "resident"
    use(simulation, "b", "c")
    assert "a" not in resident(simulation)
    gone = calls.pin("a", is_pinned=False)
    simulation.step()
    assert calls.outcome(gone) == "absent"


@pytest.mark.parametrize(
    ("num_slots", "sizes", "outcomes"),
    [
        (4, {"a": 1, "b": 1, "c": 1}, ["resident", "resident", "pin_limit"]),
        (1, {"a": 1}, ["pin_limit"]),
        (8, {"a": 6, "b": 5, "c": 1}, ["resident", "pin_limit", "resident"]),
        (8, {"a": 11}, ["pin_limit"]),
        (8, {"missing": 0}, ["adapter_unavailable"]),
    ],
    ids=["half the slots", "the only slot", "half the pages", "more than half the pages", "not in the store"],
)
def test_pins_are_limited_to_their_share_of_the_pool(
    simulate: Simulate, num_slots: int, sizes: dict[str, int], outcomes: list[str]
) -> None:
    stored = {digest: pages for digest, pages in sizes.items() if pages}
    simulation = simulate(num_pages=20, num_slots=num_slots, adapters=stored)
    calls = Calls(simulation)
    asked = [calls.pin(digest) for digest in sizes]
    simulation.run()
    assert [calls.outcome(call) for call in asked] == outcomes
    assert not simulation.engine.has_work


def test_pin_that_leaves_no_room_for_an_accepted_request_is_refused(simulate: Simulate) -> None:
    simulation = simulate(num_pages=10, adapters={"a": 2})
    calls = Calls(simulation)
    add = simulation.add("large", num_prompt=40, max_tokens=100)
    simulation.step()
    call = calls.pin("a")
    simulation.run()
    assert calls.outcome(call) == "pin_limit"
    assert simulation.tokens["large"] == simulation.expected(add)


def test_pin_that_leaves_no_room_for_a_waiting_request_and_its_adapter_is_refused(simulate: Simulate) -> None:
    simulation = simulate(num_pages=10, max_sequences=1, adapters={"a": 2, "b": 4})
    calls = Calls(simulation)
    use(simulation, "b")
    running = simulation.add("running", num_prompt=20, max_tokens=20)
    simulation.step()
    waiting = simulation.add("waiting", num_prompt=70, max_tokens=20, digest="b")
    call = calls.pin("a")
    simulation.run()
    assert calls.outcome(call) == "pin_limit"
    for add in (running, waiting):
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)


def test_pin_that_leaves_no_room_for_a_loading_adapter_is_refused(simulate: Simulate) -> None:
    simulation = simulate(num_pages=10, adapters={"a": 2, "big": 9})
    calls = Calls(simulation)
    use(simulation, "a")
    simulation.add("base", num_prompt=60, max_tokens=20)
    for _ in range(3):
        simulation.step()
    waiting = simulation.add("waiting", digest="big", max_tokens=2)
    for _ in range(3):
        simulation.step()
    call = calls.pin("a")
    simulation.run(max_steps=200)
    assert calls.outcome(call) == "pin_limit"
    assert simulation.tokens["waiting"] == simulation.expected(waiting)


def test_requests_without_room_next_to_pins_are_refused_immediately(simulate: Simulate) -> None:
    simulation = simulate(num_pages=10, adapters={"a": 4, "big": 7, "half": 4})
    calls = Calls(simulation)
    calls.pin("a")
    simulation.run()
    simulation.add("large", num_prompt=40, max_tokens=57)
    simulation.add("needs big", digest="big")
    simulation.add("needs half", num_prompt=20, max_tokens=13, digest="half")
    fits = simulation.add("fits", num_prompt=40, max_tokens=56, digest="a")
    fits_beside = simulation.add("fits beside", num_prompt=20, max_tokens=12, digest="half")
    simulation.run(max_steps=1000)
    assert simulation.finished["large"].code == "request_too_large"
    assert simulation.finished["needs big"].code == "adapter_unavailable"
    assert "pinned" in (simulation.finished["needs big"].message or "")
    assert simulation.finished["needs half"].code == "request_too_large"
    assert simulation.tokens["fits"] == simulation.expected(fits)
    assert simulation.tokens["fits beside"] == simulation.expected(fits_beside)


def test_unused_pinned_adapter_is_not_chosen_for_eviction(simulate: Simulate) -> None:
    """Evicting a pinned adapter would wait for its slot forever."""
    simulation = simulate(num_slots=2, adapters={"a": 1, "b": 1, "c": 1})
    calls = Calls(simulation)
    calls.pin("a")
    simulation.run()
    adds = [simulation.add(f"b{i}", digest="b", max_tokens=8) for i in range(2)]
    simulation.step()
    simulation.step()
    adds.append(simulation.add("c", digest="c", max_tokens=4))
    for turn in range(60):
        adds.append(simulation.add(f"late{turn}", digest="b", max_tokens=8))
        simulation.step()
        if "c" in simulation.finished:
            break
    assert "c" in simulation.finished
    adds.append(simulation.add("a", digest="a", max_tokens=3))
    simulation.run()
    assert all(simulation.tokens[add.sequence_id] == simulation.expected(add) for add in adds)


def test_an_unload_ends_a_pin(simulation: Simulation) -> None:
    calls = Calls(simulation)
    calls.pin("a")
    simulation.run()
    waiting = calls.pin("b")
    unloads = [calls.unload("a"), calls.unload("b")]
    simulation.run()
    assert [calls.outcome(call) for call in (waiting, *unloads)] == ["superseded", "absent", "absent"]
    assert stats_of(simulation).num_adapter_pages == 0
    again = [calls.pin(digest) for digest in "abc"]
    simulation.run()
    assert [calls.outcome(call) for call in again] == ["resident"] * 3


def test_reloaded_non_finite_adapter_is_pinned_again(simulation: Simulation) -> None:
    calls = Calls(simulation)
    calls.pin("a")
    simulation.run()
    simulation.executor.not_finite_for.add("a")
    for i in range(2):
        simulation.add(f"bad{i}", digest="a", max_tokens=9)
    simulation.run()
    assert {simulation.finished[f"bad{i}"].code for i in range(2)} == {"not_finite"}
    assert simulation.stager.num_requests == 2
    assert resident(simulation)["a"].is_pinned
    simulation.executor.not_finite_for.clear()
    use(simulation, "a")


def test_pin_outlives_its_gateway_and_another_can_remove_it(simulation: Simulation) -> None:
    calls = Calls(simulation)
    simulation.engine.pin(b"dead", Pin(call_id="dead", digest="a"))
    simulation.run()
    simulation.engine.abort_all(b"dead")
    assert resident(simulation)["a"].is_pinned
    calls.pin("a", is_pinned=False)
    simulation.run()
    assert not resident(simulation)["a"].is_pinned


def happenings(calls: Calls, names: list[str], rng: random.Random) -> list[Callable[[], object]]:
    simulation = calls.simulation
    engine = simulation.engine
    return [
        lambda: calls.load(rng.choice(names)),
        lambda: calls.unload(rng.choice(names), rng.choice([False, True])),
        lambda: calls.pin(rng.choice(names)),
        lambda: calls.pin(rng.choice(names), is_pinned=False),
        lambda: engine.abort(OWNER, Abort(sequence_id=f"s{rng.randrange(300)}")),
        lambda: engine.extend(OWNER, Extend(sequence_id=f"s{rng.randrange(300)}", max_tokens=60)),
        lambda: simulation.executor.not_finite_for.symmetric_difference_update({rng.choice(names)}),
        simulation.let_loads_go,
        simulation.hold_loads,
    ]


@pytest.mark.parametrize("seed", range(6))
def test_every_call_is_answered(simulate: Simulate, seed: int) -> None:
    rng = random.Random(seed)
    names = {f"adapter{i}": rng.randint(1, 6) for i in range(8)}
    simulation = simulate(
        num_pages=rng.choice([20, 40]), num_slots=rng.choice([1, 3, 6]), adapters=names, max_sequences=6
    )
    simulation.stager.max_requests, simulation.stager.max_bytes = rng.choice([1, 2, 100]), rng.choice([1, 7, 1000])
    calls = Calls(simulation)
    happen = happenings(calls, [*names, "missing"], rng)
    adds = {}
    for turn in range(150):
        simulation.clock.now += rng.random()
        if rng.random() < 0.5:
            pause_s, digest = rng.choice([0.0, 5.0]), rng.choice([None, *names])
            adds[f"s{turn}"] = simulation.add(
                f"s{turn}", rng.randint(1, 90), rng.randint(1, 40), digest, pause_s=pause_s
            )
        if rng.random() < 0.3:
            rng.choice(happen)()
        simulation.step()
    simulation.let_loads_go()
    simulation.executor.not_finite_for.clear()
    for _ in range(5000):
        if not simulation.engine.has_work:
            break
        simulation.clock.now += 1.0
        simulation.step()
    assert not simulation.engine.has_work
    simulation.engine.check_integrity()
    assert sorted(int(one.call_id) for one in simulation.answers) == list(range(1, calls.num_calls + 1))
    assert set(simulation.finished) == set(adds)
    for name, add in adds.items():
        received = simulation.tokens[name]
        assert received == simulation.executor.generate(add.prompt, len(received), add.digest)
    pinned = [one for one in stats_of(simulation).adapters if one.is_pinned]
    assert sum(one.num_pages for one in pinned) == simulation.adapters.num_pinned_pages
    assert 2 * simulation.adapters.num_pinned_pages <= simulation.pages.num_pages
