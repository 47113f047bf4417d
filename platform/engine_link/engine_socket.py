"""Where an engine listens: a socket that its user alone can reach, at a path that a gateway can be told."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

MAX_SOCKET_PATH = 107
"""Bytes of a unix socket's path (Linux, sun_path)."""

TEMPORARY_PREFIX = "loramux-engine-"
SOCKET_NAME = "engine.sock"
LOCK_NAME = "lock"


class SocketUnusable(Exception):
    """There is no place for the socket; the message says why."""


class EngineSocketDirectory:
    """A directory of mode 0700 for one engine's socket, held by a lock for as long as its owner lives.

    `preferred` is used where the socket fits into it: then its path is the same at every start. Elsewhere, or without
    one, a temporary directory is made. Those that dead owners left are removed by whoever makes the next.
    Raises SocketUnusable.
    """

    def __init__(self, preferred: Path | None = None) -> None:
        self._is_temporary = preferred is None or not _takes_sockets(preferred)
        if self._is_temporary:
            _remove_abandoned()
            # Created 0700 by mkdtemp: nobody else can reach the socket inside.
            directory = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
        else:
            assert preferred is not None
            directory = preferred.absolute()
        self._directory = directory
        self._lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise SocketUnusable(f"another server's engine listens in {directory}") from None
        self.path = directory / SOCKET_NAME
        if len(os.fsencode(self.path)) > MAX_SOCKET_PATH:
            self.close()
            raise SocketUnusable(f"the temporary directory's path is too long for a unix socket: {directory}")
        # What an owner that was killed left there.
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove what was made; again: nothing."""
        if self._lock < 0:
            return
        (self._directory / SOCKET_NAME).unlink(missing_ok=True)
        if self._is_temporary:
            (self._directory / LOCK_NAME).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._directory.rmdir()
        os.close(self._lock)
        self._lock = -1


def _takes_sockets(directory: Path) -> bool:
    """Whether the directory can be private and hold a socket, which some shared file systems cannot."""
    probe = directory.absolute() / f"probe-{os.getpid()}.sock"
    if len(os.fsencode(probe)) > MAX_SOCKET_PATH:
        return False
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(probe))
        probe.unlink()
    except OSError:
        return False
    return True


def _remove_abandoned() -> None:
    """Remove temporary directories of ours whose owners are dead, which is who holds no lock."""
    for directory in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            _remove_if_abandoned(directory)


def _remove_if_abandoned(directory: Path) -> None:
    try:
        lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        # Somebody is just making or removing it.
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The lock last: a directory without one is never looked at again.
        for name in (SOCKET_NAME, LOCK_NAME):
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()
    finally:
        os.close(lock)
