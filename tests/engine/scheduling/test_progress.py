"""Nobody is held up for ever: not by adapters that are copied, by slots, by old debts, or by work that was wasted."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from loramux.engine.messages import Abort
from loramux.engine.scheduling.fair_queue import MAX_ROUNDS, FairQueue
from tests.engine.scheduling.waiting_sequences import admit_next, waiting
from tests.engine.simulated_engine import Simulate, Simulation


def finishes(simulation: Simulation, max_steps: int = 3000) -> bool:
    for _ in range(max_steps):
        if not simulation.engine.has_work:
            return True
        simulation.step()
    return False


def test_adapters_of_later_turns_take_no_pages_from_the_first(simulate: Simulate) -> None:
    simulation = simulate(num_pages=8, max_batch_tokens=128, adapters={"b": 2, "c": 2})
    simulation.add("b", digest="b", max_tokens=2)
    simulation.step()
    head = simulation.add("head", num_prompt=110, max_tokens=2, priority=1)
    simulation.add("c", digest="c", max_tokens=2)
    assert finishes(simulation, 100)
    assert simulation.tokens["head"] == simulation.expected(head)


def test_a_prompt_that_is_cut_into_chunks_gets_on_beside_adapters_that_come(simulate: Simulate) -> None:
    for num_pages, num_prompt, num_adapters, size, budget in itertools.product(
        (10, 12), (120, 150), (2, 4), (1, 3), (16, 32)
    ):
        names = {f"a{i}": size for i in range(num_adapters)}
        simulation = simulate(num_pages=num_pages, max_batch_tokens=budget, adapters=names)
        long = simulation.add("long", num_prompt=num_prompt, max_tokens=4)
        for name in names:
            simulation.add(name, digest=name, max_tokens=2)
            simulation.step()
        assert finishes(simulation, 300)
        assert simulation.tokens["long"] == simulation.expected(long)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_an_adapter_without_a_slot_is_not_kept_out_by_streams_for_others(simulate: Simulate, num_slots: int) -> None:
    names = [f"stream{i}" for i in range(num_slots)]
    simulation = simulate(num_pages=200, num_slots=num_slots, adapters={**dict.fromkeys(names, 1), "late": 1})
    for turn in range(400):
        for name in names:
            if turn % 4 == 0:
                simulation.add(f"{name}-{turn}", digest=name, max_tokens=8, share_key="streams")
        if turn == 10:
            simulation.add("late", digest="late", max_tokens=2, share_key="late")
        simulation.step()
        if "late" in simulation.finished:
            break
    assert simulation.finished["late"].reason == "length"


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


def test_adapters_that_nobody_wants_any_more_are_let_go(simulate: Simulate) -> None:
    names = {f"a{i}": 2 for i in range(50)}
    simulation = simulate(num_pages=70, num_slots=1, adapters={**names, "busy": 1})
    simulation.add("busy", num_prompt=5, max_tokens=400, digest="busy")
    simulation.step()
    simulation.step()
    for name in names:
        simulation.add(name, digest=name)
        simulation.step()
        simulation.engine.abort(b"gateway", Abort(sequence_id=name))
    simulation.step()
    assert [entry.digest for entry in simulation.adapters.entries()] == ["busy"]
    simulation.run()


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
