"""Background sequences, which use only what other sequences leave free."""

from __future__ import annotations

import pytest

from loramux.engine.scheduling.scheduler import BACKGROUND_SHARE, MAX_YIELDS, QUIET_STEPS
from loramux.engine.sequences.sequence import SequenceState
from tests.engine.scheduling.test_scheduler import Bench
from tests.engine.simulated_engine import Simulate


def filled(num_sequences: int = 4, **limits: int) -> Bench:
    """A bench on which background sequences take all slots, each in a decode step."""
    bench = Bench(max_sequences=num_sequences, **limits)
    for number in range(num_sequences):
        bench.add(f"line {number}", max_tokens=1000, is_background=True)
    for _ in range(num_sequences):
        bench.step()
    assert len(bench.running) == num_sequences
    return bench


def test_background_sequences_fill_all_slots() -> None:
    bench = filled(max_batch_tokens=16)
    assert bench.step() == {f"line {number}": 1 for number in range(4)}


def test_new_sequence_gets_a_slot_in_the_next_step_and_runs_alone() -> None:
    bench = filled()
    bench.add("chat")
    assert bench.step() == {"chat": 3}
    assert bench.running == {"chat", "line 0", "line 1", "line 2"}
    step = bench.step()
    assert (step.pop("chat"), len(step)) == (1, 1), "background sequences have few rows beside it"


def test_new_sequence_gets_pages_in_the_next_step() -> None:
    bench = Bench(num_pages=8, max_batch_tokens=32, max_sequences=4)
    for name in "ab":
        bench.add(name, num_prompt=12, is_background=True)
    assert bench.step() == {"a": 12, "b": 12}
    bench.add("chat", num_prompt=12)
    assert bench.step() == {"chat": 12}
    assert bench.running == {"chat", "a"}


def test_new_sequence_gets_room_for_its_adapter() -> None:
    bench = Bench(num_pages=8, max_batch_tokens=32, max_sequences=4, sizes={"x": 5})
    for name in "ab":
        bench.add(name, num_prompt=12, is_background=True)
    bench.step()
    bench.add("chat", max_tokens=4, digest="x")
    for _ in range(5):
        if "chat" in bench.step():
            break
    assert "chat" in bench.running


def test_short_prompt_does_not_wait_for_a_long_one_while_lines_fill_the_slots() -> None:
    bench = filled(num_pages=4096, max_batch_tokens=16)
    bench.add("book", num_prompt=1000)
    bench.step()
    bench.add("chat")
    assert bench.step()["chat"] == 3


def test_lines_that_hold_no_adapter_slot_are_not_preempted_for_one() -> None:
    bench = Bench(num_pages=64, max_batch_tokens=128, max_sequences=8, num_slots=1, sizes={"x": 1, "y": 1})
    bench.add("chat", digest="x")
    bench.step()
    for number in range(3):
        bench.add(f"line {number}", is_background=True)
    bench.step()
    bench.step()
    bench.add("other", digest="y")
    for _ in range(20):
        bench.step()
    assert bench.scheduler.num_preemptions == 0
    assert bench.running == {"chat", "line 0", "line 1", "line 2"}


def test_adapter_of_lines_alone_gives_up_its_slot() -> None:
    bench = Bench(num_pages=64, max_batch_tokens=32, max_sequences=8, num_slots=1, sizes={"x": 1, "y": 1})
    for number in range(3):
        bench.add(f"line {number}", max_tokens=100, digest="x", is_background=True)
    for _ in range(4):
        bench.step()
    assert len(bench.running) == 3
    bench.add("other", digest="y")
    for _ in range(6):
        bench.step()
    assert bench.running == {"other"}
    assert bench.scheduler.num_preemptions == 3


def test_lines_are_not_preempted_for_a_sequence_that_still_could_not_begin() -> None:
    bench = Bench(num_pages=8, max_batch_tokens=64, max_sequences=8)
    bench.add("chat", num_prompt=20, max_tokens=4)
    bench.add("line", num_prompt=3, max_tokens=9, is_background=True)
    bench.step()
    bench.step()
    bench.add("other", num_prompt=20)
    bench.step()
    assert bench.scheduler.num_preemptions == 0
    assert bench.running == {"chat", "line"}


@pytest.mark.parametrize("share_key", ["", "other"])
def test_background_sequences_wait_for_all_others(share_key: str) -> None:
    bench = Bench(max_sequences=1)
    bench.add("running", max_tokens=2)
    bench.add("line", max_tokens=2, is_background=True, priority=-9)
    bench.add("chat", max_tokens=2, share_key=share_key)
    names = [name for _ in range(6) for name in bench.step()]
    assert names == ["running"] * 2 + ["chat"] * 2 + ["line"] * 2


def test_endless_prompts_do_not_stop_background_sequences() -> None:
    bench = filled(num_pages=4096, max_batch_tokens=8)
    bench.add("book", num_prompt=8 * 4 * MAX_YIELDS)
    steps = [bench.step() for _ in range(2 * MAX_YIELDS + 2)]
    assert [len(step) > 1 for step in steps] == [False] * MAX_YIELDS + [True] + [False] * MAX_YIELDS + [True]
    bench = filled(num_pages=4096, max_batch_tokens=8)
    for number in range(4 * MAX_YIELDS):
        bench.add(f"chat {number}", max_tokens=1)
    steps = [bench.step() for _ in range(2 * MAX_YIELDS + 2)]
    assert sum(any(name.startswith("line") for name in step) for step in steps) >= 2


def test_rows_are_few_until_others_have_been_gone_for_a_while() -> None:
    bench = Bench(num_pages=4096, max_batch_tokens=64, max_sequences=4)
    bench.add("chat", max_tokens=2)
    bench.add("line", num_prompt=64 * QUIET_STEPS, is_background=True)
    assert bench.step() == {"chat": 3}
    few = 64 // BACKGROUND_SHARE
    assert bench.step() == {"chat": 1, "line": few}
    steps = [bench.step()["line"] for _ in range(QUIET_STEPS + 1)]
    assert steps == [few] * (QUIET_STEPS - 1) + [64, 64]


def test_share_that_waited_too_long_gets_one_sequence_through() -> None:
    bench = Bench(max_sequences=1, num_pages=256)
    bench.add("line", max_tokens=3, is_background=True)
    lines = bench.add("other line", max_tokens=3, is_background=True)
    seen = []
    for number in range(3000):
        bench.add(f"chat {number}", max_tokens=1)
        seen += bench.step()
        if seen.count("line") == 3:
            break
    assert seen.count("line") == 3, "it is not preempted again"
    assert lines.state is SequenceState.WAITING


def test_lines_do_not_count_against_the_tenants_other_requests() -> None:
    bench = filled(num_pages=256)
    for _ in range(50):
        bench.step()
    bench.add("polite", max_tokens=50, share_key="polite")
    bench.step()
    bench = filled(num_pages=256)
    for _ in range(50):
        bench.step()
    chat, polite = bench.add("chat"), bench.add("polite", share_key="polite")
    bench.step()
    assert bench.scheduler.queue.served(chat) == pytest.approx(bench.scheduler.queue.served(polite), abs=10)


def test_all_sequences_end_with_the_same_tokens(simulate: Simulate) -> None:
    """Background sequences that are preempted again and again lose no token, and keep no page."""
    simulation = simulate(num_pages=40, max_sequences=4, adapters={"a": 2, "b": 2})
    for number in range(12):
        digest = (None, "a", "b")[number % 3]
        simulation.add(f"line {number}", num_prompt=20, max_tokens=30, digest=digest, is_background=True)
    for _ in range(10):
        simulation.step()
    for number in range(30):
        simulation.add(f"chat {number}", num_prompt=9, max_tokens=3, digest=(None, "b")[number % 2], share_key="x")
        for _ in range(3):
            simulation.step()
    simulation.run()
    assert len(simulation.finished) == 42
    assert {len(simulation.tokens[f"line {number}"]) for number in range(12)} == {30}
    assert {len(simulation.tokens[f"chat {number}"]) for number in range(30)} == {3}
    assert simulation.scheduler.num_preemptions > 0
