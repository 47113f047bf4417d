"""A lock that lets processes change a shared directory one at a time."""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.002
_MAX_POLL_S = 0.05


class DirectoryBusy(OSError):
    """Another process has held the directory's lock for too long."""


class DirectoryLock:
    """A lock between processes: a `flock` on a file that also stores the number of the directory's last change.

    The kernel releases the lock of a process that dies. A process that read the directory at change `n` need not read
    it again while the number is still `n`. The directory must be on a file system with working locks, such as a local
    one.
    """

    def __init__(self, path: Path, patience_s: float = 5.0) -> None:
        self._patience_s = patience_s
        self._threads = threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self._descriptor)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock. Raises DirectoryBusy if another process does not release it within `patience_s`."""
        with self._threads:
            self._acquire()
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    @property
    def num_changes(self) -> int:
        """Number of the last change. Read it only while holding the lock."""
        return int.from_bytes(os.pread(self._descriptor, 8, 0), "little")

    def note_change(self) -> int:
        """Record a change before making it: if this process dies midway, other processes reread the directory."""
        number = (self.num_changes + 1) % (1 << 64)
        os.pwrite(self._descriptor, number.to_bytes(8, "little"), 0)
        return number

    def _acquire(self) -> None:
        give_up, poll_s = time.monotonic() + self._patience_s, _POLL_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise DirectoryBusy("another process holds the disk tier's lock") from None
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
            else:
                return
