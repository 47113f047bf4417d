"""One staging process, from its start to its end, and the packets that go to and fro."""

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
"""How long a process may take to notice that its engine is done with it."""

OPEN_S = 30.0
"""How long a process may take until its tiers are open."""

PING_S = 2.0
"""A process from which something is awaited, and that has said nothing for this long, is asked whether it runs."""

SILENCE_S = 10.0
"""How long it may take to say so: one that is stopped, or hangs, is ended."""

COMMAND = (sys.executable, "-m", "loramux.adapter_store.tiers.staging_process")


class StagingLink:
    """Starts a process that shares the memory behind `memory_fd`. But for `wait` and `close`, no call waits.

    Raises OSError where none can be started.
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
        # By when it must say something; it is to begin with saying that it has opened its tiers.
        self._due_s = self._heard_s + OPEN_S
        self.is_lost = False
        """Whether `packets` came to the last one, since the process is dead or dying."""

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room in the socket; `flush` tries again."""
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._end.fileno()

    def wait(self, timeout_s: float) -> bool:
        """Whether a packet or the end has come within that time."""
        return bool(select.select([self._end], [], [], max(0.0, timeout_s))[0])

    def send(self, message: ToStaging | StagingConfig) -> None:
        self._unsent.append(encode(message))
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                self._end.send(self._unsent[0])
            except OSError:
                # There is no room yet or, as `packets` will find, nobody to read it.
                return
            self._unsent.popleft()

    def packets(self) -> Iterator[tuple[FromStaging, list[int]]]:
        """What has come, with the descriptors that came with it, which the receiver closes."""
        while not self.is_lost:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._end, MAX_PACKET_BYTES, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # Told once, where it died with packets of ours unread; behind that are its last ones.
                continue
            if packet:
                self._heard_s, self._due_s = self._clock(), math.inf
                yield decode_from_staging(packet), descriptors
            else:
                self.is_lost = True

    def watch(self) -> None:
        """See that the process runs; to be called after `packets`, again and again, while something is awaited of it.

        It is killed if it does not, which `packets` then tells.
        """
        now_s = self._clock()
        if now_s >= self._due_s:
            print(f"the staging process says nothing: process {self.process.pid} is killed", file=sys.stderr)
            self.process.kill()
            self._due_s = now_s + SILENCE_S
        elif self._due_s == math.inf and now_s - self._heard_s >= PING_S:
            self._due_s = now_s + SILENCE_S
            self.send(Ping())

    def end(self) -> int:
        """Free what is left of a process that is lost; its exit code."""
        self._end.close()
        self.process.kill()
        return self.process.wait()

    def close(self) -> None:
        """End the process."""
        self._end.close()
        try:
            # It ends by itself once it finds that we are gone.
            self.process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            self.end()


def _environment() -> dict[str, str]:
    """Ours, with credentials for the blob store, and the same code; without what tunes the memory of steps."""
    kept = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
