"""Nobody is held up for ever: not by adapters that are copied, by slots, by old debts, or by work that was wasted."""

from __future__ import annotations

from collections import Counter

from loramux.engine.scheduling.fair_queue import MAX_ROUNDS, FairQueue
from tests.engine.scheduling.waiting_sequences import admit_next, waiting
from tests.engine.simulated_engine import Simulate, Simulation


def test_who_comes_to_an_idle_engine_owes_as_little_as_who_left_it(simulate: Simulate) -> None:
    simulation = simulate(num_pages=400, max_sequences=4)
    for i in range(30):
        simulation.add(f"old{i}", num_prompt=60, max_tokens=40, share_key="old")
    simulation.run()
    for i in range(60):
        simulation.add(f"new{i}", num_prompt=10, max_tokens=10, share_key="new")
    simulation.step()
    for i in range(10):
        simulation.add(f"again{i}", num_prompt=10, max_tokens=10, share_key="old")
    simulation.finished.clear()
    simulation.run()
    ends = list(simulation.finished)
    assert max(ends.index(f"again{i}") for i in range(10)) < 40


def test_weights_hold_however_many_shares_wait() -> None:
    queue, arrival = FairQueue(), 0
    num_shares = 2 * MAX_ROUNDS
    for _ in range(60):
        for share in range(num_shares):
            waiting(queue, arrival, str(share), weight=5 if share == 0 else 1)
            arrival += 1
    served = Counter(admit_next(queue).add.share_key for _ in range(10 * num_shares))
    assert 3 * served["1"] <= served["0"] <= 7 * served["1"]


def test_a_step_with_many_broken_rows_of_one_adapter_is_one_strike(simulation: Simulation) -> None:
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
