"""The Unix socket where an engine listens for gateways. Only the engine's user can reach it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

MAX_SOCKET_PATH = 107
"""Longest path of a Unix socket, in bytes (Linux, sun_path)."""

TEMPORARY_PREFIX = "loramux-engine-"
SOCKET_NAME = "engine.sock"
LOCK_NAME = "lock"


class SocketUnusable(Exception):
    """The socket cannot be created. The message says why."""


class EngineSocketDirectory:
    """A directory with mode 0700 for one engine's socket, locked by the process that supervises the engine.

    `preferred` is used if it can hold the socket, so that the path is the same at every start. Otherwise a temporary
    directory is created, and temporary directories of dead processes are removed first. Raises SocketUnusable.
    """

    def __init__(self, preferred: Path | None = None) -> None:
        self._is_temporary = preferred is None or not _takes_sockets(preferred)
        if self._is_temporary:
            _remove_abandoned()
            # mkdtemp creates the directory with mode 0700, so no other user can reach the socket inside.
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
            raise SocketUnusable(f"another server's engine uses {directory}") from None
        self.path = directory / SOCKET_NAME
        if len(os.fsencode(self.path)) > MAX_SOCKET_PATH:
            self.close()
            raise SocketUnusable(f"the temporary directory's path is too long for a Unix socket: {directory}")
        # A supervisor that was killed may have left its socket behind.
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the socket and, if one was created, the temporary directory. Closing again does nothing."""
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
    """Return whether the directory can be made private and hold a socket. Some shared file systems support neither."""
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
    """Remove this user's unlocked temporary directories. Their processes are dead."""
    for directory in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            _remove_if_abandoned(directory)


def _remove_if_abandoned(directory: Path) -> None:
    try:
        lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        # Another process is creating or removing the directory.
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Remove the lock last, because a directory without a lock file is never examined again.
        for name in (SOCKET_NAME, LOCK_NAME):
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()
    finally:
        os.close(lock)
