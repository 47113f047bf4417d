"""The engine's connection to its staging process, which loads adapters into shared memory."""

from __future__ import annotations

import math
import os
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from loramux.adapter_store.tiers.staging_messages import (
    MAX_PACKET_BYTES,
    FromStaging,
    Ping,
    StagingConfig,
    ToStaging,
    decode_from_staging,
    encode,
    socket_pair,
)

END_GRACE_S = 1.0
"""Time limit for a process to exit after its engine has closed the connection, in seconds."""

OPEN_S = 30.0
"""Time limit for a process to open its tiers, in seconds."""

PING_S = 2.0
"""A process with a pending answer is pinged if it has sent nothing for this many seconds."""

SILENCE_S = 10.0
"""A process that sends nothing for this many seconds after a ping is considered hung, and is killed."""

COMMAND = (sys.executable, "-m", "loramux.adapter_store.tiers.staging_process")


class StagingLink:
    """Starts a staging process that maps the shared memory of the descriptor `memory_fd`.

    Only `wait`, `end` and `close` block.

    Raises OSError if the process cannot be started.
    """

    def __init__(self, memory_fd: int, clock: Callable[[], float]) -> None:
        ours, theirs = socket_pair()
        ours.setblocking(False)
        shared = (theirs.fileno(), memory_fd)
        with theirs, ExitStack() as stack:
            stack.enter_context(ours)
            self.process = subprocess.Popen(  # noqa: S603 - our own program
                [*COMMAND, *map(str, shared)],
                stdin=subprocess.DEVNULL,
                pass_fds=shared,
                env=_environment(),
            )
            stack.pop_all()
        self._end = ours
        self._unsent: deque[bytes] = deque()
        self._clock = clock
        self._heard_s = clock()
        # Deadline for the next message. The first message must report that the tiers are open.
        self._due_s = self._heard_s + OPEN_S
        self.is_lost = False
        """True once `packets` has reached the end of the stream. The process has then exited or is exiting."""

    @property
    def has_unsent(self) -> bool:
        """True if packets are waiting for room in the socket. `flush` tries to send them."""
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._end.fileno()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for a packet or the end of the stream. Returns False on timeout."""
        return bool(select.select([self._end], [], [], max(0.0, timeout_s))[0])

    def send(self, message: ToStaging | StagingConfig) -> None:
        self._unsent.append(encode(message))
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                self._end.send(self._unsent[0])
            except OSError:
                # Either the socket is full, or the process is gone. `packets` detects the latter.
                return
            self._unsent.popleft()

    def packets(self) -> Iterator[tuple[FromStaging, list[int]]]:
        """Yield each packet that has arrived, with its file descriptors. The caller must close them."""
        while not self.is_lost:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._end, MAX_PACKET_BYTES, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The socket raises this once if the process died with unread packets. The packets that it sent can
                # still be read.
                continue
            if packet:
                self._heard_s, self._due_s = self._clock(), math.inf
                yield decode_from_staging(packet), descriptors
            else:
                self.is_lost = True

    def watch(self) -> None:
        """Ping the process if it has been silent, and kill it if it does not respond.

        Call this method after each call of `packets` while an answer is pending. After a kill, `packets` reaches the
        end of the stream.
        """
        now_s = self._clock()
        if now_s >= self._due_s:
            print(f"the staging process does not respond: killing process {self.process.pid}", file=sys.stderr)
            self.process.kill()
            self._due_s = now_s + SILENCE_S
        elif self._due_s == math.inf and now_s - self._heard_s >= PING_S:
            self._due_s = now_s + SILENCE_S
            self.send(Ping())

    def end(self) -> int:
        self._end.close()
        self.process.kill()
        return self.process.wait()

    def close(self) -> None:
        """Close the connection, and kill the process if it does not exit within END_GRACE_S."""
        self._end.close()
        try:
            # The process exits on its own once it notices that the socket is closed.
            self.process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            self.end()


def _environment() -> dict[str, str]:
    """Return this process's environment with its module path, without allocator tuning, and with one BLAS thread."""
    kept = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    # Packing a DoRA adapter multiplies large matrices. With more BLAS threads, it would take cores from the engine.
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OPENBLAS_NUM_THREADS": "1"}
