"""Starts the other workers of a tensor-parallel engine, and sends them what they execute."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from loramux.engine.parallel.gloo_group import GlooGroup
from loramux.engine.parallel.worker_messages import ToWorker
from loramux.engine.protocol.errors import EngineError

WORKER_COMMAND = (sys.executable, "-m", "loramux.engine.server.worker_process")
"""A worker's command line, without the file descriptor of its connection, the path of the meeting and its number."""

END_S = 5.0
"""How long a worker may take to end once its connection is closed, in seconds."""


class WorkerLost(EngineError):
    """A worker of a tensor-parallel engine has ended, so the engine cannot run steps any more."""


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
        """Wait until the worker has loaded its share of the model or, the second time, has joined the group."""
        try:
            self.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self.lost() from error

    def lost(self) -> WorkerLost:
        self.end()
        return WorkerLost(f"tensor-parallel worker {self.number} has ended with exit status {self.process.returncode}")

    def end(self) -> None:
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Workers:
    """The processes of workers 1 to `size` - 1. This process is worker 0.

    `configuration` is the engine's configuration as JSON. The processes end when this one does. Always call `close`.
    Other methods raise WorkerLost if a worker has ended.
    """

    def __init__(self, configuration: bytes, size: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="loramux-workers-")
        meeting = Path(self._directory.name) / "meeting"
        self.group = GlooGroup(meeting, size, 0)
        self._encoder = msgspec.msgpack.Encoder()
        self._workers: list[_Worker] = []
        for number in range(1, size):
            ours, theirs = Pipe()
            with theirs:
                process = subprocess.Popen(  # noqa: S603 - our own program
                    (*WORKER_COMMAND, str(theirs.fileno()), str(meeting), str(number)),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            self._workers.append(_Worker(number, process, ours))
            self._workers[-1].send(configuration)

    def join(self) -> None:
        """Wait until all workers have loaded their share of the model, and connect them."""
        for worker in self._workers:
            worker.await_signal()
        self.group.join()
        # The others may still be reading the file through which they meet.
        for worker in self._workers:
            worker.await_signal()
        self._directory.cleanup()

    def send(self, message: ToWorker) -> None:
        encoded = self._encoder.encode(message)
        for worker in self._workers:
            worker.send(encoded)

    def send_each(self, messages: list[ToWorker]) -> None:
        """Send message `i` to worker `i` + 1."""
        for worker, message in zip(self._workers, messages, strict=True):
            worker.send(self._encoder.encode(message))

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
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.end()
        self.group.close()
        self._directory.cleanup()
