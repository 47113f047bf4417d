"""Unfinished files that several processes write to one directory, and names that survive a power failure."""

from __future__ import annotations

import fcntl
import os
import uuid
import weakref
from contextlib import suppress
from pathlib import Path


class AtomicFiles:
    """Hands out paths `DIRECTORY/unfinished/RUN-FILE`, where RUN identifies this object.

    The object locks `DIRECTORY/runs/RUN` for as long as it lives. The lock distinguishes files that a live process is
    still writing from the leftovers of a dead process. Hold the directory's lock when calling the constructor and
    `sweep`, so that a run whose lock is not taken yet does not look dead.
    """

    def __init__(self, directory: Path) -> None:
        self._runs = directory / "runs"
        self._directory = directory / "unfinished"
        for path in (self._runs, self._directory):
            path.mkdir(parents=True, exist_ok=True)
        self._run = uuid.uuid4().hex
        lock = self._runs / self._run
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        weakref.finalize(self, _end_run, lock, descriptor)

    def new_file(self) -> Path:
        """Return a path for a new unfinished file, on the same file system as the file's final path."""
        return self._directory / f"{self._run}-{uuid.uuid4().hex}"

    def sweep(self) -> None:
        """Delete the unfinished files of dead processes."""
        alive = {path.name for path in self._runs.iterdir() if not _remove_if_dead(path)}
        for path in self._directory.iterdir():
            if path.name.partition("-")[0] not in alive:
                path.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_dead(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _end_run(lock: Path, descriptor: int) -> None:
    with suppress(OSError):
        lock.unlink()
    os.close(descriptor)
