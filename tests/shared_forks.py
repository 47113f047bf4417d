"""Forking processes that tests share. Starting one takes a quarter of a second, and most tests need it for one fork.

A forking process keeps nothing of its requests, so a test cannot see that it has served others.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loramux.adapter_store.sandbox import confined_pool, fork_server
from loramux.adapter_store.sandbox.fork_server import ForkServer
from loramux.adapter_store.validation import validator

MAX_REST_S = fork_server.IDLE_S / 2
"""A process that has rested for longer is not used again. Its last request was earlier, and it exits when idle."""

_Kind = tuple[object, ...]


class _RestingProcesses:
    """The processes of closed fork servers, by command and environment. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resting: dict[_Kind, list[tuple[float, fork_server._Running]]] = defaultdict(list)

    def add(self, kind: _Kind, running: fork_server._Running) -> None:
        with self._lock:
            self._resting[kind].append((time.monotonic(), running))

    def take(self, kind: _Kind) -> fork_server._Running | None:
        with self._lock:
            resting = self._resting[kind]
            while resting:
                closed_s, running = resting.pop()
                if running.process.poll() is None and time.monotonic() - closed_s < MAX_REST_S:
                    return running
                running.link.close()
                running.process.wait()
                running.errors.close()
        return None


_processes = _RestingProcesses()


class SharedForkServer(ForkServer):
    """First takes over the process of a closed fork server with the same command, if there is one."""

    _may_take_over = True

    @property
    def _kind(self) -> _Kind:
        return tuple(self._command), tuple(sorted(self._environment.items()))

    def close(self) -> None:
        if not self._turn.acquire(blocking=False):
            # A fork is running, and ends with the process.
            super().close()
            return
        with self._lock:
            self._is_closed = True
            running, self._running = self._running, None
        self._turn.release()
        if running is not None:
            _processes.add(self._kind, running)

    def _start(self) -> None:
        with self._lock:
            if self._may_take_over and not self._is_closed:
                # A process that has rested may exit before its next request. Its successor must be new, because a
                # request is only tried twice.
                self._may_take_over = False
                self._running = _processes.take(self._kind)
        if self._running is None:
            super()._start()


@contextmanager
def shared_forks() -> Iterator[None]:
    """Make the pools and validators that are created in the block use shared processes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (confined_pool, validator):
            patch.setattr(module, "ForkServer", SharedForkServer)
        yield
