from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import closing
from contextvars import ContextVar
from pathlib import Path

import pytest

from loramux.adapter_store.sandbox import lanes
from loramux.adapter_store.sandbox.confined_pool import ConfinedPool, Ended, ForkLimits, ForkServerFailed
from loramux.adapter_store.sandbox.lanes import TooManyWaiting
from tests.adapter_store.sandbox.processes import is_running

PROGRAM = """
import sys, time
from loramux.adapter_store.sandbox.fork_server import fork_for_each_request
fork_for_each_request(idle_s=None)
cpu_s, path = sys.stdin.read().split()
while time.process_time() < float(cpu_s): pass
open(path).read()
print(cpu_s)
"""
"""Uses an amount of processor time, and then waits until somebody has opened and closed the FIFO at a path."""

LONG, TOO_LONG = "0.3", "60"
"""Processor times that exceed a quick turn, and also a full turn."""

caller: ContextVar[str] = ContextVar("caller")


class Asked:
    """A request that counts its forks."""

    def __init__(self, pool: ConfinedPool, tenant_id: str, cpu_s: str = "0", gate: Path = Path(os.devnull)) -> None:
        self.num_forks = 0
        self.ended: Ended | None = None
        self.has_begun = threading.Event()
        self._request = f"{cpu_s} {gate}".encode()
        self.future: Future[Ended] = pool.submit(tenant_id, self.encode, self.decode)

    def encode(self) -> bytes:
        self.num_forks += 1
        self.has_begun.set()
        return self._request

    def decode(self, ended: Ended) -> Ended:
        self.ended = ended
        return ended

    def result(self) -> Ended:
        return self.future.result(100)


Open = Callable[..., ConfinedPool]


@pytest.fixture
def open_pool() -> Iterator[Open]:
    opened = []

    def open_one(
        num_processes: int = 2, max_waiting_per_tenant: int = 10, program: str = PROGRAM, wall_s: float = 60
    ) -> ConfinedPool:
        opened.append(
            ConfinedPool(
                (sys.executable, "-S", "-c", program),
                event="test_failed",
                num_processes=num_processes,
                max_full=1,
                quick=ForkLimits(wall_s, cpu_s=0.1),
                full=ForkLimits(wall_s, cpu_s=1),
                max_waiting_per_tenant=max_waiting_per_tenant,
                clock=lambda: 0.0,
            )
        )
        return opened[-1]

    yield open_one
    for pool in opened:
        pool.close()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A FIFO that blocks forks."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def open_gate(gate: Path) -> None:
    """Release the fork that waits, once there is one."""
    with gate.open("w"):
        pass


def test_a_short_request_is_answered_by_one_fork(open_pool: Open) -> None:
    asked = Asked(open_pool(), "a")
    assert asked.result().stdout == b"0\n"
    assert asked.num_forks == 1


def test_a_request_that_exceeds_its_quick_turn_is_repeated_and_answered(open_pool: Open) -> None:
    asked = Asked(open_pool(), "a", LONG)
    ended = asked.result()
    assert (ended.stdout, ended.ran_out_of_time) == (b"0.3\n", False)
    assert asked.num_forks == 2


def test_a_request_that_exceeds_its_full_turn_is_not_repeated(open_pool: Open) -> None:
    asked = Asked(open_pool(), "a", TOO_LONG)
    assert asked.result().ran_out_of_time
    assert asked.num_forks == 2


def test_a_request_that_gets_no_processor_time_has_no_result(open_pool: Open, gate: Path) -> None:
    asked = Asked(open_pool(wall_s=0.05), "a", "0", gate)
    with pytest.raises(ForkServerFailed, match=r"it did not finish a request in 0\.05 s"):
        asked.result()
    assert (asked.num_forks, asked.ended) == (2, None)


def test_a_killed_request_counts(open_pool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_LIGHT_USE_S", 0.5)
    pool = open_pool()
    Asked(pool, "a", TOO_LONG).result()
    for tenant_id, num_forks in (("a", 1), ("b", 2)):
        asked = Asked(pool, tenant_id, LONG)
        asked.result()
        assert asked.num_forks == num_forks, "a tenant with long requests skips the quick turn"


def test_a_long_request_leaves_a_process_to_other_tenants(open_pool: Open, gate: Path) -> None:
    pool = open_pool()
    Asked(pool, "long", TOO_LONG).result()
    long = [Asked(pool, "long", "0", gate), Asked(pool, "long", LONG)]
    long[0].has_begun.wait()
    assert Asked(pool, "short").result().returncode == 0
    assert not long[0].future.done()
    assert long[1].num_forks == 0, "a tenant has one request at a time"
    open_gate(gate)
    assert [one.result().returncode for one in long] == [0, 0]


def test_waiting_requests_of_a_tenant_are_bounded(open_pool: Open, gate: Path) -> None:
    pool = open_pool(max_waiting_per_tenant=2)
    asked = [Asked(pool, "a", "0", gate), Asked(pool, "a")]
    with pytest.raises(TooManyWaiting):
        Asked(pool, "a")
    asked[1].future.cancel()
    asked[1] = Asked(pool, "a")
    open_gate(gate)
    # A caller that has its answer can ask at once.
    for _ in range(20):
        asked.pop(0).result()
        asked.append(Asked(pool, "a"))


def test_a_cancelled_request_starts_no_fork(open_pool: Open, gate: Path) -> None:
    pool = open_pool()
    running, cancelled, next_one = Asked(pool, "a", "0", gate), Asked(pool, "a"), Asked(pool, "a")
    running.has_begun.wait()
    assert cancelled.future.cancel()
    open_gate(gate)
    assert next_one.result().returncode == 0
    assert cancelled.num_forks == 0


def test_a_request_that_is_cancelled_between_its_turns_gets_no_full_turn(open_pool: Open, gate: Path) -> None:
    pool = open_pool()
    Asked(pool, "long", TOO_LONG).result()
    blocking = Asked(pool, "long", "0", gate)
    blocking.has_begun.wait()
    cancelled, next_one = Asked(pool, "a", LONG), Asked(pool, "a")
    cancelled.has_begun.wait()
    assert cancelled.future.cancel()
    assert next_one.result().returncode == 0
    open_gate(gate)
    blocking.result()
    assert cancelled.num_forks == 1


def test_a_running_request_that_is_cancelled_keeps_its_tenants_turn(open_pool: Open, gate: Path) -> None:
    pool = open_pool()
    cancelled, next_one = Asked(pool, "a", "0", gate), Asked(pool, "a")
    cancelled.has_begun.wait()
    assert cancelled.future.cancel()
    assert Asked(pool, "b").result().returncode == 0
    assert next_one.num_forks == 0
    open_gate(gate)
    assert next_one.result().returncode == 0
    with pytest.raises(CancelledError):
        cancelled.result()
    assert cancelled.ended is not None, "the caller can keep what the fork has found out"


def test_few_concurrent_requests_start_few_processes(open_pool: Open, gate: Path) -> None:
    pool = open_pool(num_processes=4)
    assert [server.pid for server in pool._servers] == [None] * 4
    for number in range(8):
        Asked(pool, f"t{number}").result()
    assert sum(server.pid is not None for server in pool._servers) == 1


def test_requests_run_in_the_callers_context(open_pool: Open) -> None:
    def seen_by_encode() -> bytes:
        seen.append(caller.get())
        return b"0 /dev/null"

    seen: list[str] = []
    token = caller.set("me")
    asked = open_pool().submit("a", seen_by_encode, lambda _: seen.append(caller.get()))
    caller.reset(token)
    asked.result(100)
    assert seen == ["me", "me"]


def test_an_error_reaches_the_caller_and_ends_the_turn(open_pool: Open) -> None:
    pool = open_pool()

    def fail(*_: object) -> bytes:
        raise ValueError("not encodable")

    with pytest.raises(ValueError, match="not encodable"):
        pool.submit("a", fail, len).result(100)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not encodable"):
        pool.submit("a", lambda: b"0 /dev/null", fail).result(100)
    assert Asked(pool, "a").result().returncode == 0


def test_a_process_that_cannot_start_fails_its_request_only(open_pool: Open) -> None:
    pool = open_pool(program="raise SystemExit('no numpy here')")
    for _ in range(3):
        with pytest.raises(ForkServerFailed, match="no numpy here"):
            Asked(pool, "a").result()


def test_close_ends_running_and_waiting_requests(open_pool: Open, gate: Path) -> None:
    pool = open_pool()
    asked = [Asked(pool, tenant_id, "0", gate) for tenant_id in ("a", "b", "a", "c")]
    cancelled = Asked(pool, "d")
    cancelled.future.cancel()
    for one in asked[:2]:
        one.has_begun.wait()
    pids = [server.pid for server in pool._servers]
    for _ in range(2):
        pool.close()
    for one in asked:
        with pytest.raises(ForkServerFailed, match="stopped"):
            one.result()
    assert not any(thread.is_alive() for thread in pool._threads)
    assert not any(is_running(pid) for pid in pids if pid is not None)
    with pytest.raises(ForkServerFailed, match="stopped"):
        Asked(pool, "a")


def test_a_pool_without_requests_can_be_closed(open_pool: Open) -> None:
    with closing(open_pool()) as pool:
        assert pool._threads == []
