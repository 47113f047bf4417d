"""Starts the other workers of a tensor-parallel engine, and sends them what they execute."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from loramux.engine.device.device_faults import reason_of
from loramux.engine.parallel.process_groups import new_group
from loramux.engine.parallel.worker_messages import ToWorker
from loramux.engine.protocol.errors import EngineError

WORKER_COMMAND = (sys.executable, "-m", "loramux.engine.server.worker_process")
"""A worker's command line, without its arguments (see `worker_process.py`)."""

JOIN = b"join"
"""Tells a worker that all workers have loaded their share of the model, so that it joins the group."""

JOIN_POLL_S = 0.02
"""How often to look whether a worker has ended while the workers connect, in seconds."""

END_S = 0.5
"""How long workers may take to end once their connections are closed, in seconds. Then they are killed. It is less than
`END_GRACE_S` of the engine process, which must still send its last traces.
"""

EXIT_AFTER_WORKER_S = 1.0
"""How long this process may take to end by itself after a worker, in seconds, if exchanges do not report it."""


class WorkerLost(EngineError):
    """A worker of a tensor-parallel engine did not start, or has ended, so the engine cannot run steps.

    `status` is the exit status of a worker that has ended.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    connection: Connection

    def send(self, encoded: bytes) -> None:
        try:
            self.connection.send_bytes(encoded)
        except OSError as error:
            raise self.lost() from error

    def await_signal(self) -> None:
        """Wait until the worker has loaded its share of the model or, the second time, is ready for steps.

        The signal is empty, or the reason why the worker cannot start.
        """
        reason = self.receive()
        if reason:
            raise WorkerLost(f"tensor-parallel worker {self.number} did not start: {reason}")

    def receive(self) -> str:
        try:
            return self.connection.recv_bytes().decode()
        except (EOFError, OSError) as error:
            raise self.lost() from error

    def lost(self) -> WorkerLost:
        _end([self])
        return WorkerLost(self.how_it_ended, self.process.returncode)

    @property
    def how_it_ended(self) -> str:
        return f"tensor-parallel worker {self.number} has ended with exit status {self.process.poll()}"


class Workers:
    """The processes of workers 1 to `size` - 1. This process is worker 0.

    `configuration` is the engine's configuration as JSON, and `device` is `cpu` or `cuda`. The processes end when this
    one does. Always call `close`. Other methods raise WorkerLost if a worker has ended.

    On GPUs, a step that waits for a worker that has ended waits for ever, and no call can be interrupted. From `join`
    on, this process therefore exits soon after a worker has ended.
    """

    def __init__(self, configuration: bytes, size: int, device: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="loramux-workers-")
        meeting = Path(self._directory.name) / "meeting"
        self.group = new_group(device, meeting, size, 0)
        self._workers: list[_Worker] = []
        self._is_closed = threading.Event()
        with ExitStack() as stack:
            stack.callback(self.close)
            for number in range(1, size):
                self._workers.append(_start(meeting, number))
                self._workers[-1].send(configuration)
            stack.pop_all()

    def join(self, base: str) -> None:
        """Wait until all workers have loaded their share of the model, and connect them. Call `await_ready` next.

        `base` identifies the files that this process has loaded. Raises WorkerLost if a worker has loaded others, or
        with the worker's reason if it cannot load its share.
        """
        for worker in self._workers:
            worker.await_signal()
            if worker.receive() != base:
                raise WorkerLost(
                    f"tensor-parallel worker {worker.number} read other files than worker 0: the files in the model "
                    "directory changed while the engine started, so start it again"
                )
        for worker in self._workers:
            worker.send(JOIN)
        self._join_group()
        if not self.group.reports_ends:
            processes = {os.pidfd_open(worker.process.pid): worker for worker in self._workers}
            threading.Thread(target=self._follow, args=(processes,), name="follow-workers", daemon=True).start()

    def await_ready(self) -> None:
        """Wait until all workers are ready for steps. Raises WorkerLost with the reason if one of them is not."""
        for worker in self._workers:
            worker.await_signal()
        # Until now, the others may have been reading the file through which they meet.
        self._directory.cleanup()

    def _follow(self, processes: Mapping[int, _Worker]) -> None:
        """Exit soon after a worker has ended, unless the workers were closed. The keys are PID file descriptors."""
        ended = wait(processes)
        is_closed = self._is_closed.wait(EXIT_AFTER_WORKER_S)
        for descriptor in processes:
            os.close(descriptor)
        if is_closed:
            return
        lost = [processes[descriptor] for descriptor in processes if descriptor in ended]
        statuses = [worker.process.poll() or 0 for worker in lost]
        if max(statuses) <= 0:
            # Otherwise, the last line on standard error is the worker's own.
            for worker in lost:
                print(worker.how_it_ended, file=sys.stderr, flush=True)
        os._exit(max(1, *statuses))

    def _join_group(self) -> None:
        """Connect the workers. Raises WorkerLost as soon as one of them has ended."""
        failures: list[Exception] = []

        def join() -> None:
            try:
                self.group.join()
            except Exception as error:
                failures.append(error)

        # On a thread of its own, because gloo waits for a worker that has ended as for any other.
        thread = threading.Thread(target=join, name="join-workers", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(JOIN_POLL_S)
            for worker in self._workers:
                if worker.process.poll() is not None:
                    raise worker.lost()
        if failures:
            raise WorkerLost(f"the tensor-parallel workers cannot connect: {reason_of(failures[0])}") from failures[0]

    @staticmethod
    def encode(message: ToWorker) -> bytes:
        """Encode a message, on any thread."""
        return msgspec.msgpack.encode(message)

    def send(self, message: ToWorker) -> None:
        encoded = self.encode(message)
        for worker in self._workers:
            worker.send(encoded)

    def send_each(self, messages: Sequence[bytes]) -> None:
        """Send the encoded message `i` to worker `i` + 1."""
        for worker, message in zip(self._workers, messages, strict=True):
            worker.send(message)

    def filenos(self) -> list[int]:
        """File descriptors that become readable when a worker ends."""
        return [worker.connection.fileno() for worker in self._workers]

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def check(self, timeout_s: float = 0.0) -> None:
        """Return after `timeout_s` seconds if all workers are running."""
        # Once it has joined the group, a worker sends nothing, so its connection is readable only at its end.
        ended = wait([worker.connection for worker in self._workers], timeout_s)
        for worker in self._workers:
            if worker.connection in ended:
                raise worker.lost()

    def close(self) -> None:
        """End all workers."""
        self._is_closed.set()
        _end(self._workers)
        self.group.close()
        self._directory.cleanup()


def _start(meeting: Path, number: int) -> _Worker:
    ours, theirs = Pipe()
    with theirs:
        arguments = theirs.fileno(), meeting, number, os.getpid()
        process = subprocess.Popen(  # noqa: S603 - our own program
            (*WORKER_COMMAND, *map(str, arguments)), stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
        )
    return _Worker(number, process, ours)


def _end(workers: Sequence[_Worker]) -> None:
    """Close the workers' connections, and kill those that have not ended after END_S seconds."""
    for worker in workers:
        worker.connection.close()
    deadline_s = time.monotonic() + END_S
    for worker in workers:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline_s - time.monotonic()))
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
