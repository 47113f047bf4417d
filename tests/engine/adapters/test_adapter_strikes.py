from __future__ import annotations

from loramux.engine.adapters.adapter_strikes import MAX_STRIKES, MEMORY_S, AdapterStrikes
from tests.engine.simulated_engine import Clock, Simulation


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
