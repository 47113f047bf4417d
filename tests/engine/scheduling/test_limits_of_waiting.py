from __future__ import annotations

import pytest

from loramux.engine.protocol.messages import Abort, Extend
from tests.engine.simulated_engine import Simulate, Simulation, stats_of


def test_first_step_wait_is_limited(simulate: Simulate) -> None:
    simulation = simulate(max_sequences=1, max_waiting_s=10.0)
    running = simulation.add("running", max_tokens=40)
    simulation.step()
    simulation.add("waiting")
    simulation.clock.now = 11.0
    simulation.step()
    assert simulation.finished["waiting"].code == "overloaded"
    simulation.run()
    assert simulation.tokens["running"] == simulation.expected(running)


def test_full_queue_refuses_the_newest_request_of_the_largest_share(simulate: Simulate) -> None:
    simulation = simulate(max_sequences=1, max_waiting_tokens=100)
    simulation.add("running", num_prompt=5, max_tokens=5)
    simulation.step()
    for i in range(9):
        simulation.add(f"flood{i}", num_prompt=5, max_tokens=5, share_key="flood")
    polite = simulation.add("polite", num_prompt=5, max_tokens=5, share_key="polite")
    simulation.add("flood9", num_prompt=5, max_tokens=5, share_key="flood")
    simulation.step()
    refused = {name for name, one in simulation.finished.items() if one.code == "overloaded"}
    assert refused == {"flood9"}
    simulation.run()
    assert simulation.tokens["polite"] == simulation.expected(polite)
    assert len(simulation.finished) == 12


def test_empty_queue_accepts_a_request_above_the_limit(simulate: Simulate) -> None:
    simulation = simulate(max_waiting_tokens=10)
    simulation.add("large", num_prompt=50, max_tokens=5)
    simulation.run()
    assert simulation.finished["large"].reason == "length"


@pytest.mark.parametrize("is_early", [True, False], ids=["before the limit", "while paused"])
def test_extended_sequence_continues_unchanged(simulation: Simulation, is_early: bool) -> None:
    add = simulation.add("s", max_tokens=4, pause_s=60.0)
    for _ in range(2 if is_early else 8):
        simulation.step()
    assert "s" not in simulation.finished
    assert is_early or len(simulation.tokens["s"]) == 4
    simulation.engine.extend(b"gateway", Extend(sequence_id="s", max_tokens=12))
    # The sequence reaches its second limit, and the pause there times out.
    for _ in range(12):
        simulation.step()
    simulation.clock.now = 61.0
    simulation.run()
    assert simulation.tokens["s"] == simulation.executor.generate(add.prompt, 12, None)
    assert simulation.finished["s"].reason == "length"


def test_pause_timeout_ends_the_sequence_with_length(simulation: Simulation) -> None:
    add = simulation.add("s", max_tokens=4, pause_s=60.0)
    for _ in range(8):
        simulation.step()
    simulation.clock.now = 59.0
    simulation.step()
    assert "s" not in simulation.finished
    simulation.clock.now = 60.0
    simulation.run()
    assert simulation.tokens["s"] == simulation.expected(add)
    assert simulation.finished["s"].completion_tokens == 4


def test_preempted_paused_sequence_continues_after_extension(simulate: Simulate) -> None:
    simulation = simulate(num_pages=6)
    paused = simulation.add("paused", num_prompt=20, max_tokens=4, pause_s=600.0, priority=1)
    for _ in range(6):
        simulation.step()
    long = simulation.add("long", num_prompt=30, max_tokens=50)
    while "long" not in simulation.finished:
        simulation.step()
    assert stats_of(simulation).num_preemptions == 1
    simulation.engine.extend(b"gateway", Extend(sequence_id="paused", max_tokens=9))
    for _ in range(10):
        simulation.step()
    simulation.clock.now = 700.0
    simulation.run()
    assert simulation.tokens["long"] == simulation.expected(long)
    assert simulation.tokens["paused"] == simulation.executor.generate(paused.prompt, 9, None)


def test_sequences_that_resume_leave_no_slots_to_waiting_ones(simulate: Simulate) -> None:
    """More sequences than slots are active then, and no step may have more of them than slots."""
    simulation = simulate(max_sequences=3)
    asked = [simulation.add("line", max_tokens=60, is_background=True)]
    for _ in range(3):
        simulation.step()
    names = [f"paused {number}" for number in range(3)]
    for name in names:
        simulation.add(name, max_tokens=4, pause_s=600.0)
        for _ in range(8):
            simulation.step()
    asked += [simulation.add(f"running {number}", max_tokens=30) for number in range(2)]
    for _ in range(4):
        simulation.step()
    for name in names:
        simulation.engine.extend(b"gateway", Extend(sequence_id=name, max_tokens=20))
    asked += [simulation.add(f"waiting {number}", max_tokens=5) for number in range(4)]
    simulation.executor.batches.clear()
    while not {add.sequence_id for add in asked} <= simulation.finished.keys():
        simulation.step()
    assert max(len(batch.samples) for batch in simulation.executor.batches) <= 3
    for add in asked:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
    simulation.clock.now = 700.0
    simulation.run()


def test_extension_stops_at_the_context_length(simulate: Simulate) -> None:
    simulation = simulate(max_model_len=30)
    add = simulation.add("s", num_prompt=20, max_tokens=2, pause_s=9.0)
    simulation.engine.extend(b"gateway", Extend(sequence_id="s", max_tokens=10_000))
    simulation.engine.extend(b"gateway", Extend(sequence_id="nobody", max_tokens=3))
    simulation.run()
    assert simulation.tokens["s"] == simulation.executor.generate(add.prompt, 10, None)


def test_a_paused_sequence_can_be_aborted(simulation: Simulation) -> None:
    simulation.add("s", max_tokens=4, pause_s=60.0)
    for _ in range(8):
        simulation.step()
    simulation.engine.abort(b"gateway", Abort(sequence_id="s"))
    simulation.run()
    assert simulation.finished["s"].reason == "abort"


def test_repeatedly_broken_adapter_is_refused(simulation: Simulation) -> None:
    simulation.executor.not_finite_for.add("a")
    for i in range(3):
        simulation.add(f"bad{i}", digest="a")
        simulation.run()
        assert simulation.finished[f"bad{i}"].code == "not_finite"
    simulation.add("refused", digest="a")
    good = simulation.add("good", digest="b")
    simulation.run()
    assert simulation.finished["refused"].code == "adapter_quarantined"
    assert simulation.tokens["good"] == simulation.expected(good)
