"""Grammars are followed in other processes. Their delays and failures affect only their own sequences."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from llguidance import LLMatcher

from loramux.adapter_store.sandbox.confinement import CALLS, FILES, REQUIRED
from loramux.adapter_store.validation.validator import missing_measures
from loramux.engine.constraints import grammars as grammars_module
from loramux.engine.constraints.grammar import Grammar
from loramux.engine.constraints.grammars import TOO_COSTLY, Grammars
from loramux.engine.constraints.process_link import NOT_RUNNING, UNUSABLE
from loramux.engine.constraints.time_budgets import TimeBudgets
from loramux.engine.protocol.messages import Abort, Extend, SamplingParams
from tests.adapter_store.sandbox import lesser_kernel
from tests.adapter_store.waiting import wait_until
from tests.engine.byte_vocabulary import EOS, VOCAB_SIZE, text
from tests.engine.constraints.test_constrained_sequences import PERSON_GRAMMAR, add, run
from tests.engine.simulated_engine import GRAMMAR_PROCESS, GREEDY, Simulate, Simulation, simulate_engine, stats_of

AMBIGUOUS = 'start: e "!"\ne: e e e | e e | /[xy]/'
"""A grammar whose masks take time that grows with the cube of the answer's length."""

FIFTY = LLMatcher.grammar_from_regex("[xy]{50}")
TWENTY = LLMatcher.grammar_from_regex("[xy]{20}")


@pytest.fixture
def simulation(simulate: Simulate) -> Simulation:
    """An engine whose patience with late masks is limited."""
    return simulate(eos=(EOS,), grammar_clock=time.monotonic)


@pytest.mark.parametrize("is_patient", [True, False])
def test_answers_do_not_depend_on_when_masks_come(
    simulate: Simulate, is_patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(*, waits: bool) -> dict[str, list[int]]:
        made = simulate(eos=(EOS,))
        if not waits:
            monkeypatch.setattr(made.grammars, "wait", lambda *_, **__: None)
            monkeypatch.setattr(made.grammars, "is_awaited", lambda grammar: is_patient)
        for number in range(6):
            sampling = SamplingParams(seed=number, presence_penalty=0.5)
            made.engine.add(b"", add(str(number), PERSON_GRAMMAR, f"prompt {number}", sampling=sampling))
        for number in range(3):
            made.engine.add(b"", add(f"free {number}", prompt=f"text {number}", max_tokens=40))
        tokens, ends = run(made)
        assert {end.reason for name, end in ends.items() if name.isdigit()} == {"stop"}
        made.engine.check_integrity()
        return dict(tokens)

    assert answers(waits=False) == answers(waits=True)


@pytest.mark.parametrize(("isolation_key", "num_full_pages"), [(b"", 0), (b"key", 3)])
def test_a_late_mask_costs_a_sequence_no_slot(
    monkeypatch: pytest.MonkeyPatch, isolation_key: bytes, num_full_pages: int
) -> None:
    """Unless its last token has filled a page, which is then cached and not written again."""
    made = simulate_engine(eos=(EOS,), lookahead=True)
    monkeypatch.setattr(made.grammars, "wait", lambda *_, **__: None)
    made.engine.add(b"", add("late", FIFTY, max_tokens=60, isolation_key=isolation_key))
    until(made, lambda: "late" in made.finished)
    assert (made.finished["late"].reason, len(made.tokens["late"])) == ("stop", 50)
    stats = stats_of(made)
    assert stats.recomputed_tokens > 0, "masks were late"
    assert stats.num_preemptions <= num_full_pages
    made.engine.check_integrity()
    made.grammars.close()


def test_a_costly_grammar_is_followed_to_its_end(simulation: Simulation) -> None:
    no_end = SamplingParams(seed=1, logit_bias=((ord("!"), -100.0),))
    simulation.engine.add(b"", add("costly", AMBIGUOUS, max_tokens=80, sampling=no_end))
    simulation.engine.add(b"", add("beside", max_tokens=100, sampling=GREEDY))
    tokens, ends = run(simulation)
    assert re.fullmatch("[xy]{80}", text(tokens["costly"]))
    assert {name: end.reason for name, end in ends.items()} == {"costly": "length", "beside": "length"}
    counts = simulation.grammars.counts()
    assert (counts.num_compiled, counts.num_masks, counts.num_processes) == (1, 80, 1)


def test_sequences_of_a_tenant_share_a_compiled_grammar(simulation: Simulation) -> None:
    for number in range(4):
        key = b"one" if number < 3 else b"other"
        simulation.engine.add(b"", add(str(number), FIFTY, max_tokens=60, isolation_key=key))
    run(simulation)
    counts = simulation.grammars.counts()
    assert (counts.num_compiled, counts.num_reused, counts.num_processes) == (2, 2, 2)


def test_a_grammar_that_ends_with_the_last_token_ends_as_complete(simulation: Simulation) -> None:
    simulation.engine.add(b"", add("exact", FIFTY, max_tokens=50))
    simulation.engine.add(b"", add("cut", FIFTY, max_tokens=49))
    _, ends = run(simulation)
    assert {name: (end.reason, end.completion_tokens) for name, end in ends.items()} == {
        "exact": ("stop", 50),
        "cut": ("length", 49),
    }


def test_a_sequence_pauses_at_its_limit_and_goes_on(simulation: Simulation) -> None:
    simulation.engine.add(b"", add("paused", FIFTY, max_tokens=10, pause_s=5.0))
    until(simulation, lambda: len(simulation.tokens["paused"]) == 10)
    simulation.engine.extend(b"", Extend(sequence_id="paused", max_tokens=100))
    until(simulation, lambda: "paused" in simulation.finished)
    assert (simulation.finished["paused"].reason, len(simulation.tokens["paused"])) == ("stop", 50)


def test_a_grammar_that_fails_at_a_pause_ends_its_sequence(simulation: Simulation) -> None:
    simulation.engine.add(b"", add("paused", FIFTY, max_tokens=10, pause_s=5.0))
    until(simulation, lambda: len(simulation.tokens["paused"]) == 10)
    (grammar,) = simulation.engine._constrained
    simulation.grammars._fail([grammar], TOO_COSTLY)
    simulation.engine.extend(b"", Extend(sequence_id="paused", max_tokens=100))
    until(simulation, lambda: "paused" in simulation.finished)
    assert (simulation.finished["paused"].code, len(simulation.tokens["paused"])) == ("grammar_failed", 10)


def test_other_sequences_run_while_a_mask_is_computed(simulation: Simulation) -> None:
    simulation.engine.add(b"", add("late", FIFTY, max_tokens=60))
    until(simulation, lambda: len(simulation.tokens["late"]) > 5)
    fork = fork_of(simulation)
    os.kill(fork, signal.SIGSTOP)
    try:
        simulation.engine.add(b"", add("beside", max_tokens=50, sampling=GREEDY))
        until(simulation, lambda: "beside" in simulation.finished)
        assert "late" not in simulation.finished
    finally:
        os.kill(fork, signal.SIGCONT)
    until(simulation, lambda: "late" in simulation.finished)
    assert (simulation.finished["late"].reason, len(simulation.tokens["late"])) == ("stop", 50)
    simulation.engine.check_integrity()


def test_a_grammar_that_runs_out_of_time_ends_its_sequence_alone(simulation: Simulation) -> None:
    """A fork that is killed stands for one that runs out of time or memory."""
    kill_a_fork_with_two_sequences(simulation, looks_ahead=False)
    failed, ended = sorted(simulation.finished.values(), key=lambda end: end.reason)
    assert (failed.reason, failed.code, failed.message) == ("error", "grammar_failed", TOO_COSTLY)
    assert failed.completion_tokens == len(simulation.tokens[failed.sequence_id])
    assert (ended.reason, len(simulation.tokens[ended.sequence_id])) == ("stop", 50)


def test_the_process_is_replaced_if_it_ends(simulation: Simulation) -> None:
    simulation.engine.add(b"", add("lasting", FIFTY, max_tokens=60))
    until(simulation, lambda: len(simulation.tokens["lasting"]) > 5)
    process = simulation.grammars._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    # Its fork ends with it.
    simulation.engine.add(b"", add("new", FIFTY, max_tokens=60, isolation_key=b"new"))
    until(simulation, lambda: len(simulation.finished) == 2)
    assert {end.reason for end in simulation.finished.values()} == {"stop"}


@pytest.mark.parametrize("command", [("/nonexistent",), ("false",), (sys.executable, "-c", "import os; os.abort()")])
def test_a_process_that_cannot_start_ends_only_sequences_with_grammars(
    simulate: Simulate, command: tuple[str, ...]
) -> None:
    made = simulate(eos=(EOS,), grammar_process=command, grammar_clock=time.monotonic)
    made.engine.add(b"", add("constrained", FIFTY, max_tokens=60))
    made.engine.add(b"", add("beside", max_tokens=50, sampling=GREEDY))
    _, ends = run(made)
    assert (ends["constrained"].code, ends["constrained"].message) == ("grammar_failed", NOT_RUNNING)
    assert ends["beside"].reason == "length"


def test_the_reason_why_a_vocabulary_is_not_usable_is_for_the_operator(
    simulate: Simulate, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = (sys.executable, "-P", "-m", "loramux.engine.constraints.grammar_process", str(tmp_path), "10", "1")
    made = simulate(eos=(EOS,), grammar_process=command, grammar_clock=time.monotonic)
    made.engine.add(b"", add("constrained", FIFTY))
    _, ends = run(made)
    assert ends["constrained"].message == UNUSABLE
    assert "tokenizer.json cannot be used" in capfd.readouterr().err


def test_an_idle_fork_that_dies_is_replaced(simulation: Simulation) -> None:
    simulation.engine.add(b"", add("before", FIFTY, max_tokens=60))
    until(simulation, lambda: "before" in simulation.finished)
    os.kill(fork_of(simulation), signal.SIGKILL)
    assert select.select([simulation.grammars.fileno()], [], [], 60)[0]
    simulation.engine.add(b"", add("after", FIFTY, max_tokens=60))
    until(simulation, lambda: "after" in simulation.finished)
    assert simulation.finished["after"].reason == "stop"


def test_answers_for_ended_sequences_are_read_without_a_step(simulation: Simulation) -> None:
    """Otherwise the descriptor would stay readable, and the engine's loop would spin."""
    simulation.engine.add(b"", add("gone", FIFTY, max_tokens=60))
    until(simulation, lambda: len(simulation.tokens["gone"]) > 5)
    simulation.engine.abort(b"", Abort(sequence_id="gone"))
    os.kill(fork_of(simulation), signal.SIGKILL)
    assert select.select([simulation.grammars.fileno()], [], [], 60)[0]
    until(simulation, lambda: simulation.grammars.receive() or not simulation.grammars.counts().num_processes)
    assert not select.select([simulation.grammars.fileno()], [], [], 0)[0]


def test_tenants_beyond_the_limit_wait_for_a_fork(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_FORKS", 2)
    for number in range(6):
        key = f"key {number % 3}".encode()
        simulation.engine.add(b"", add(str(number), FIFTY, max_tokens=60, isolation_key=key))
    _, ends = run(simulation)
    assert {end.reason for end in ends.values()} == {"stop"}
    assert simulation.grammars.counts().num_processes == 2


def test_tenants_take_turns_with_forks(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_FORKS", 1)
    monkeypatch.setattr(grammars_module, "TURN_S", 0.0)
    five, busy = LLMatcher.grammar_from_regex("[xy]{5}"), list[str]()

    def keep_busy() -> bool:
        """Two sequences of the first tenant overlap at any time."""
        while sum(name not in simulation.finished for name in busy) < 2:
            busy.append(f"busy {len(busy)}")
            simulation.engine.add(b"", add(busy[-1], five, max_tokens=60, isolation_key=b"busy"))
        return "other" in simulation.finished

    until(simulation, lambda: keep_busy() or simulation.tokens["busy 1"])
    simulation.engine.add(b"", add("other", five, max_tokens=60, isolation_key=b"other"))
    until(simulation, keep_busy)
    until(simulation, lambda: len(simulation.finished) == 1 + len(busy))
    assert {end.reason for end in simulation.finished.values()} == {"stop"}
    assert {len(answer) for answer in simulation.tokens.values()} == {5}


def test_turns_end_one_at_a_time(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_FORKS", 2)
    now = [0.0]
    grammars = simulate(eos=(EOS,), grammar_clock=lambda: now[0]).grammars

    def replaced_at(now_s: float) -> set[bytes]:
        now[0] = now_s
        forks = set(grammars._forks)
        for _ in range(5):
            grammars.receive()
        return forks - set(grammars._forks)

    first = [grammars.request(key, TWENTY) for key in (b"a", b"b")]
    grammars.wait(first, 60.0)
    for key in (b"c", b"d"):
        grammars.request(key, TWENTY)
    assert not replaced_at(0.9)
    assert replaced_at(1.0) == {b"a"}
    assert not replaced_at(1.2)
    assert replaced_at(1.25) == {b"b"}


def test_a_turn_of_another_tenant_costs_nothing(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_FORKS", 1)
    monkeypatch.setattr(grammars_module, "FREE_COMPILE_S", 60.0)
    now = [0.0]
    grammars = simulate(eos=(EOS,), grammar_clock=lambda: now[0]).grammars
    grammar = grammars.request(b"a", TWENTY, "a")
    grammars.wait([grammar], 60.0)
    assert grammars.take_spent()["a"] > 0
    other = grammars.request(b"b", TWENTY, "b")
    now[0] = 1.0
    grammars.receive()
    grammars.wait([other], 60.0)
    grammar.accept(ord("x"))
    now[0] = 2.0
    grammars.receive()
    grammars.wait([grammar], 60.0)
    assert grammar.is_ready
    assert grammars.take_spent()["a"] == 0


def test_an_aborted_sequence_is_forgotten(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation.engine.add(b"", add("gone", FIFTY, max_tokens=60))
    until(simulation, lambda: len(simulation.tokens["gone"]) > 5)
    (fork,) = simulation.grammars._forks.values()
    simulation.engine.abort(b"", Abort(sequence_id="gone"))
    assert not fork.grammars
    monkeypatch.setattr(grammars_module, "IDLE_S", 0.0)
    until(simulation, lambda: simulation.grammars.poll() == [] and simulation.grammars.counts().num_processes == 0)


def test_a_tenant_that_has_used_much_time_waits_while_others_run(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "FREE_TOKEN_S", -1.0)
    monkeypatch.setattr(grammars_module, "SHARED_S", 3600.0)
    simulation.engine.add(b"", add("costly", FIFTY, max_tokens=60, share_key="costly"))
    until(simulation, lambda: simulation.tokens["costly"])
    simulation.engine.add(b"", add("beside", max_tokens=400, sampling=GREEDY, share_key="other"))
    until(simulation, lambda: "beside" in simulation.finished)
    assert len(simulation.tokens["costly"]) < 10, "each token costs a second, of which a twentieth is refilled"
    # The other tenant's next request may come soon.
    for _ in range(100):
        simulation.engine.step()
    assert len(simulation.tokens["costly"]) < 10
    # Alone, the tenant no longer waits.
    simulation.grammars._shared_until_s = 0.0
    until(simulation, lambda: "costly" in simulation.finished)
    assert (simulation.finished["costly"].reason, len(simulation.tokens["costly"])) == ("stop", 50)


def hold_a_tenant(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, num_sequences: int = 1, **fields: object
) -> None:
    """Have sequences of the tenant `costly` wait for masks without end, while the tenant `other` gets 400 tokens."""
    monkeypatch.setattr(grammars_module, "FREE_TOKEN_S", -100.0)
    monkeypatch.setattr(grammars_module, "SHARED_S", 3600.0)
    names = [f"costly {number}" for number in range(num_sequences)]
    for name in names:
        simulation.engine.add(b"", add(name, TWENTY, max_tokens=60, share_key="costly", **fields))
    until(simulation, lambda: all(simulation.tokens[name] for name in names))
    simulation.engine.add(b"", add("before", max_tokens=400, sampling=GREEDY, share_key="other"))
    until(simulation, lambda: "before" in simulation.finished)
    assert not any(name in simulation.finished for name in names)


@pytest.mark.parametrize(("held", "tier"), [("default", "default"), ("priority", "flex")])
def test_held_requests_take_no_place_from_others(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, held: str, tier: str
) -> None:
    simulation = simulate(eos=(EOS,), grammar_clock=time.monotonic, max_sequences=2)
    hold_a_tenant(simulation, monkeypatch, service_tier=held)
    for number in range(4):
        fields = {"share_key": "costly", "service_tier": held}
        simulation.engine.add(b"", add(f"held {number}", TWENTY, max_tokens=60, **fields))
    simulation.engine.add(b"", add("free", max_tokens=9, sampling=GREEDY, share_key="other", service_tier=tier))
    until(simulation, lambda: "free" in simulation.finished)
    assert not any(simulation.tokens[f"held {number}"] for number in range(4))
    assert stats_of(simulation).waiting.slot >= 4
    simulation.grammars._shared_until_s = 0.0
    until(simulation, lambda: len(simulation.finished) == 7)
    simulation.engine.check_integrity()


def test_pages_come_from_sequences_that_wait_for_held_masks(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate(eos=(EOS,), grammar_clock=time.monotonic, num_pages=30)
    hold_a_tenant(simulation, monkeypatch, num_sequences=3, prompt="Tell me more. " * 6)
    assert stats_of(simulation).num_preemptions == 3, "the sequence of the other tenant was not among the victims"


def test_new_sequences_get_pages_of_sequences_that_wait_for_held_masks(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate(eos=(EOS,), grammar_clock=time.monotonic, num_pages=48)
    hold_a_tenant(simulation, monkeypatch, num_sequences=3, prompt="Tell me more. " * 6)
    simulation.engine.add(b"", add("new", prompt="x" * 490, max_tokens=9, sampling=GREEDY, share_key="other"))
    until(simulation, lambda: "new" in simulation.finished)


def test_sequences_that_wait_for_masks_leave_their_slots_to_others_of_their_tenant(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate(eos=(EOS,), max_sequences=2)
    grammars = simulation.grammars
    for number in range(6):
        simulation.engine.add(b"", add(f"slow {number}", TWENTY, max_tokens=60))

    def are_ready() -> bool:
        grammars.receive()
        return all(grammar.is_ready for grammar in simulation.engine._constrained)

    wait_until(are_ready, 60.0)
    # No further mask arrives.
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "receive", lambda: None)
        patch.setattr(grammars, "wait", lambda *_, **__: None)
        until(simulation, lambda: len(simulation.tokens) == 6)
    until(simulation, lambda: len(simulation.finished) == 6)


def test_a_held_sequence_can_be_aborted(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "FREE_TOKEN_S", -1.0)
    simulation.engine.add(b"", add("costly", FIFTY, max_tokens=60, share_key="costly"))
    until(simulation, lambda: simulation.tokens["costly"])
    simulation.engine.add(b"", add("beside", max_tokens=400, sampling=GREEDY, share_key="other"))
    until(simulation, lambda: any(simulation.grammars._held.values()))
    simulation.engine.abort(b"", Abort(sequence_id="costly"))
    until(simulation, lambda: {"beside", "costly"} <= simulation.finished.keys())
    assert simulation.finished["costly"].reason == "abort"
    simulation.engine.check_integrity()


def test_a_shares_budget_is_bounded_and_refilled() -> None:
    now = [100.0]
    budgets = TimeBudgets(lambda: now[0], burst_s=0.5, refill=0.1)
    budgets.charge("costly", 1.0)
    assert (budgets.left("costly") < 0, budgets.left("other"), budgets.has_debt("other")) == (True, 0.5, False)
    now[0] += 4.9
    assert budgets.left("costly") < 0
    now[0] += 0.2
    assert budgets.left("costly") > 0
    now[0] += 5.0
    assert not budgets.has_debt("costly")


def test_shares_divide_the_refill() -> None:
    now = [0.0]
    budgets = TimeBudgets(lambda: now[0], burst_s=0.5, refill=0.1)
    for share in "abcde":
        budgets.charge(share, 1.0)
    now[0] += 5.0
    assert all(budgets.left(share) < 0 for share in "abcde")
    now[0] += 20.1
    assert all(budgets.left(share) > 0 for share in "abcde")


def kill_a_fork_with_two_sequences(simulation: Simulation, *, looks_ahead: bool) -> list[Grammar]:
    """Kill a fork that works on a grammar while a second one waits, and run both sequences to their ends.

    Returns the grammars that are no longer followed ahead.
    """
    for name in ("first", "second"):
        simulation.engine.add(b"", add(name, FIFTY, max_tokens=60))
    grammars = list(simulation.engine._constrained)
    until(simulation, lambda: len(simulation.tokens["second"]) > 5)
    for grammar in grammars:
        grammar.looks_ahead = looks_ahead
    pid = fork_of(simulation)
    os.kill(pid, signal.SIGSTOP)
    until(simulation, lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    (fork,) = simulation.grammars._forks.values()
    # It may have answered before it stopped.
    until(
        simulation,
        lambda: len(fork.unanswered) == 2 and not select.select([simulation.grammars.fileno()], [], [], 0)[0],
    )
    os.kill(pid, signal.SIGKILL)
    until(simulation, lambda: len(simulation.finished) == 2)
    return [grammar for grammar in grammars if not grammar.looks_ahead]


def until(simulation: Simulation, holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        if not simulation.step():
            time.sleep(0.001)


def fork_of(simulation: Simulation) -> int:
    process = simulation.grammars._process
    assert process is not None
    (fork,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(fork)


def test_without_patience_a_wait_lasts_no_longer_than_its_free_time(simulate: Simulate) -> None:
    # The clock stands still, so that patience would never end.
    grammars = simulate(eos=(EOS,)).grammars
    grammar = grammars.request(b"", FIFTY)
    grammars.wait([grammar], 0.0, is_patient=False)
    assert not grammar.is_ready
    grammars.wait([grammar], 0.0)
    assert grammar.is_ready


def test_grammars_are_not_followed_without_a_required_sandbox() -> None:
    if CALLS in missing_measures():
        pytest.skip("this machine cannot imitate a lesser one")
    command = (sys.executable, lesser_kernel.__file__, FILES, *GRAMMAR_PROCESS[2:], REQUIRED)
    with closing(Grammars(command, os.environ, VOCAB_SIZE)) as grammars:
        grammar = grammars.request(b"", FIFTY)
        wait_until(lambda: bool(grammars.poll()), 60.0)
        assert (grammar.failure, grammars.counts().num_processes) == (NOT_RUNNING, 0)


FALSE_ANSWERS = r"""
import socket
from loramux.engine.constraints.grammar_messages import LENGTH
link = socket.socket(fileno=0)
forks = []
while message := socket.recv_fds(link, 1, 1):
    if not message[0]:
        break
    forks.append(socket.socket(fileno=message[1][0]))
    begun = b"\x86\xa6number\xff" + b"\xa6forced\x90\xa4mask\xc0\xa7failure\xc0\xa5cpu_s\x00\xa9compile_s\xc0"
    for answer in (begun, b"\xc1"):
        forks[-1].sendall(LENGTH.pack(len(answer)) + answer)
"""
"""A process whose forks answer nonsense."""


def test_a_fork_with_false_answers_ends_only_its_grammar() -> None:
    with closing(Grammars((sys.executable, "-P", "-c", FALSE_ANSWERS), os.environ, VOCAB_SIZE)) as grammars:
        grammar = grammars.request(b"", FIFTY)
        wait_until(lambda: bool(grammars.poll()), 60.0)
        assert (grammar.failure, grammars.counts().num_processes) == (TOO_COSTLY, 0)
