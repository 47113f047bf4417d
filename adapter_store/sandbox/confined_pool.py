"""A pool of confined processes that tenants share fairly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import structlog

from loramux.adapter_store.sandbox.fork_server import (
    Ended,
    ForkLimits,
    ForkServer,
    ForkServerFailed,
    last_line,
    worker_environment,
)
from loramux.adapter_store.sandbox.lanes import Lane, Lanes, TooManyWaiting, Turn

__all__ = ["ConfinedPool", "Ended", "ForkLimits", "ForkServerFailed", "TooManyWaiting"]

Result = TypeVar("Result")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """`context` is the caller's, so that log entries name the caller's request."""

    encode: Callable[[], bytes]
    decode: Callable[[Ended], Any]
    future: Future[Any]
    context: Context


class ConfinedPool:
    """Runs requests in forks of `num_processes` processes, each started when it is first needed.

    `command` must call `fork_for_each_request` and confine its forks. A fork first runs within the limits `quick`. A
    request that exceeds them is repeated within the limits `full`, by at most `max_full` processes at a time. Both must
    limit the processor time. `Lanes` defines the order of requests: each tenant has one at a time, and the wait caused
    by other tenants is bounded. Outside the light lane, all forks have the niceness of `full`. A failing process is
    logged as `event`. Thread-safe.

    Only the processor time shows that a request is too much work: on a busy machine, any fork can exceed its wall time.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        event: str,
        num_processes: int,
        max_full: int,
        quick: ForkLimits,
        full: ForkLimits,
        max_waiting_per_tenant: int,
        pause: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._event = event
        self._num_processes = num_processes
        self._quick = quick
        self._busy = replace(quick, niceness=full.niceness)
        self._full = full
        self._servers = [ForkServer(command, worker_environment()) for _ in range(num_processes)]
        # Guards the fields below. Notified when a request may run or the pool is closed.
        self._changed = threading.Condition()
        self._lanes: Lanes[_Request] = Lanes(quick.cpu_s, num_processes, max_full, max_waiting_per_tenant, clock, pause)
        # Last in, first out, so that few concurrent requests start few processes.
        self._idle = list(self._servers)
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, tenant_id: str, encode: Callable[[], bytes], decode: Callable[[Ended], Result]) -> Future[Result]:
        """Return a future of the decoded end of the request's fork. Raises TooManyWaiting or ForkServerFailed.

        `encode` returns the fork's standard input. It is called for each fork, and `decode` once, in a thread of the
        pool. The tenant's next request starts afterwards. If the future is cancelled, no fork starts for it any more,
        but a running fork ends first. The future raises ForkServerFailed if no process can be started, the pool is
        closed, or the fork exceeded the wall time of `full`, and anything that `encode` or `decode` raises.
        """
        future: Future[Result] = Future()
        request = _Request(encode, decode, future, copy_context())
        with self._changed:
            if self._is_closed:
                raise ForkServerFailed("it was stopped")
            if len(self._threads) < self._num_processes:
                thread = threading.Thread(target=self._run_turns, name="confined pool", daemon=True)
                thread.start()
                self._threads.append(thread)
            self._lanes.append_request(tenant_id, request)
            self._changed.notify()
        future.add_done_callback(lambda done: self._drop_request(tenant_id, request) if done.cancelled() else None)
        return future

    def close(self) -> None:
        """Kill the running forks, stop the processes and threads, and let all requests fail with ForkServerFailed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for server in self._servers:
            server.close()
        for thread in self._threads:
            thread.join()
        with self._changed:
            waiting = self._lanes.drop_requests()
        for request in waiting:
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(ForkServerFailed("it was stopped"))

    def _drop_request(self, tenant_id: str, request: _Request) -> None:
        with self._changed:
            self._lanes.drop_request(tenant_id, request)

    def _run_turns(self) -> None:
        while True:
            with self._changed:
                turn = None
                while not self._is_closed and (turn := self._lanes.next_turn()) is None:
                    self._changed.wait(self._lanes.pause_s())
                if turn is None:
                    return
                server = self._idle.pop()
            self._run_turn(turn, server)

    def _run_turn(self, turn: Turn[_Request], server: ForkServer) -> None:
        request = turn.request
        limits = {Lane.LIGHT: self._quick, Lane.BUSY: self._busy, Lane.FULL: self._full}[turn.lane]
        cpu_s, has_ended = 0.0, True
        resolve: Callable[[], None] | None = None
        try:
            ended = server.run(request.context.run(request.encode), limits)
            # A fork that waits without computing uses up its turn too.
            cpu_s = max(ended.cpu_s, limits.cpu_s) if ended.ran_out_of_time else ended.cpu_s
            has_ended = not (turn.is_quick and ended.ran_out_of_time)
            if has_ended and ended.took_too_long:
                raise ForkServerFailed(
                    f"it did not finish a request in {limits.wall_s:g} s, in which it used {ended.cpu_s:.2f} s of "
                    "processor time"
                )
            if has_ended:
                resolve = partial(request.future.set_result, request.context.run(self._decoded, request, ended))
        except Exception as error:
            if isinstance(error, ForkServerFailed) and not self._is_closed:
                request.context.run(_log.warning, self._event, error=str(error))
            resolve = partial(request.future.set_exception, error)
        with self._changed:
            self._idle.append(server)
            self._lanes.end_turn(turn, cpu_s, has_ended or request.future.cancelled())
            self._changed.notify_all()
        # A caller with a result can send its next request at once, so the turn has to end first.
        if resolve is not None and request.future.set_running_or_notify_cancel():
            resolve()

    def _decoded(self, request: _Request, ended: Ended) -> Any:
        if ended.returncode > 0:
            _log.warning(self._event, error=last_line(ended.stderr))
        return request.decode(ended)
