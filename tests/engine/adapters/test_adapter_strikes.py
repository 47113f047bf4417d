from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from loramux.engine.adapters.adapter_strikes import MAX_STRIKES, MEMORY_S, AdapterStrikes
from loramux.engine.protocol.messages import Extend
from tests.engine.simulated_engine import Clock, Simulate, Simulation, stats_of


def test_strikes_expire_one_by_one() -> None:
    clock = Clock()
    strikes = AdapterStrikes(clock)
    for minute in range(MAX_STRIKES):
        assert not strikes.is_quarantined("a")
        clock.now = 60.0 * minute
        strikes.strike("a")
    assert strikes.is_quarantined("a")
    assert not strikes.is_quarantined("b")
    clock.now = MEMORY_S - 1
    assert strikes.is_quarantined("a")
    clock.now = MEMORY_S
    assert not strikes.is_quarantined("a")
    strikes.strike("a")
    assert strikes.is_quarantined("a")


def test_strikes_far_apart_do_not_quarantine() -> None:
    clock = Clock()
    strikes = AdapterStrikes(clock)
    for day in range(30):
        clock.now = 86400.0 * day
        strikes.strike("a")
        assert not strikes.is_quarantined("a")


def test_adapter_is_served_again_after_its_strikes_expire(simulation: Simulation) -> None:
    simulation.executor.not_finite_for.add("a")
    for i in range(MAX_STRIKES):
        simulation.add(f"bad{i}", digest="a")
        simulation.run()
    simulation.executor.not_finite_for.clear()
    simulation.add("refused", digest="a")
    simulation.clock.now = MEMORY_S
    add = simulation.add("served", digest="a")
    simulation.run()
    assert simulation.finished["refused"].code == "adapter_quarantined"
    assert simulation.tokens["served"] == simulation.expected(add)


def test_several_broken_rows_in_one_step_count_as_one_strike(simulation: Simulation) -> None:
    for i in range(4):
        simulation.add(f"s{i}", digest="a", max_tokens=20)
    for _ in range(3):
        simulation.step()
    simulation.executor.not_finite_for.add("a")
    simulation.step()
    simulation.step()
    simulation.executor.not_finite_for.clear()
    later = simulation.add("later", digest="a", max_tokens=3)
    simulation.run()
    assert simulation.tokens["later"] == simulation.expected(later)


def test_requests_do_not_wait_for_a_long_answer_of_a_struck_adapter(simulate: Simulate) -> None:
    """They get another copy, which later faults of the long answer's copy do not concern."""
    simulation = simulate(adapters={"a": 2})
    adds = [simulation.add(name, digest="a", max_tokens=3, pause_s=1000.0) for name in ("long", "longer")]
    for _ in range(8):
        simulation.step()
    break_one(simulation, lambda: simulation.add("bad", digest="a"), "bad")
    adds.append(simulation.add("new", digest="a", max_tokens=2, pause_s=1000.0))
    for _ in range(6):
        simulation.step()
    assert len(simulation.tokens["new"]) == 2
    extend = Extend(sequence_id="long", max_tokens=9)
    break_one(simulation, lambda: simulation.engine.extend(b"gateway", extend), "long")
    adds.append(simulation.add("newer", digest="a"))
    assert simulation.adapters.num_loads == 2
    for add in adds[1:]:
        simulation.engine.extend(b"gateway", Extend(sequence_id=add.sequence_id, max_tokens=20))
    end(simulation)
    assert simulation.adapters.num_loads == 2
    for add in adds[1:]:
        assert simulation.tokens[add.sequence_id] == simulation.expected(structs.replace(add, max_tokens=20))
    assert stats_of(simulation).num_adapter_pages == 2


def test_running_sequences_keep_a_copy_whose_successor_cannot_be_loaded(simulate: Simulate) -> None:
    simulation = simulate(adapters={"a": 2})
    add = simulation.add("long", digest="a", max_tokens=3, pause_s=1000.0)
    for _ in range(8):
        simulation.step()
    break_one(simulation, lambda: simulation.add("bad", digest="a"), "bad")
    del simulation.stager.adapters["a"]
    simulation.add("new", digest="a")
    for _ in range(3):
        simulation.step()
    assert simulation.finished["new"].code == "adapter_unavailable"
    simulation.engine.extend(b"gateway", Extend(sequence_id="long", max_tokens=20))
    end(simulation)
    assert simulation.tokens["long"] == simulation.expected(structs.replace(add, max_tokens=20))


@pytest.mark.parametrize("fields", [{"is_background": True}, {"service_tier": "flex"}], ids=["background", "flex"])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_the_old_copy_of_a_struck_adapter_makes_room(
    simulate: Simulate, num_slots: int, fields: dict[str, Any]
) -> None:
    simulation = simulate(adapters={"a": 16, "b": 10}, num_slots=num_slots, num_pages=24)
    simulation.add("long", digest="a", max_tokens=110, share_key="f", **fields)
    for _ in range(4):
        simulation.step()
    simulation.engine._calls.retire("a")
    simulation.add("chat", digest="b", share_key="acme", service_tier="priority")
    for _ in range(5):
        simulation.step()
    assert simulation.tokens["chat"]


def test_a_late_fault_of_the_old_copy_leaves_the_new_one(simulate: Simulate) -> None:
    """The sequence was preempted with its step in flight, so it has no slot any more."""
    simulation = simulate(adapters={"a": 2}, lookahead=True)
    simulation.add("old", digest="a", max_tokens=50)
    for _ in range(4):
        simulation.step()
    simulation.engine._calls.retire("a")
    simulation.add("new", digest="a", max_tokens=50)
    for _ in range(4):
        simulation.step()
    old, new = (next(one for one in simulation.scheduler.running if one.sequence_id == name) for name in ("old", "new"))
    # Both copies have users.
    other = simulation.adapters.in_slot(old.slot)
    other.num_users += 1
    simulation.scheduler.preempt(old)
    simulation.engine._strike([old])
    assert not simulation.adapters.in_slot(new.slot).is_retired
    other.num_users -= 1


def break_one(simulation: Simulation, begin: Callable[[], object], name: str) -> None:
    """Begin, and let all rows with the adapter be not finite until the sequence `name` has ended."""
    begin()
    simulation.executor.not_finite_for.add("a")
    for _ in range(6):
        simulation.step()
    assert simulation.finished[name].code == "not_finite"
    simulation.executor.not_finite_for.clear()


def end(simulation: Simulation) -> None:
    """Run all sequences to their limits, and end their pauses."""
    for _ in range(40):
        simulation.step()
    simulation.clock.now = 2000.0
    simulation.run()
