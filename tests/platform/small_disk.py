"""A disk that a test fills and empties: a small tmpfs if it can be mounted, otherwise an imitation."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from sqlalchemy import Connection, event

from loramux.migrations.database import Database
from loramux.platform.generation import settlement_spool
from tests.migrated import migrated_sqlite

BALLAST = "ballast"
DATABASE = "loramux.db"
DISK_MB = 8


class SmallDisk(Protocol):
    directory: Path
    database: Database

    def fill(self) -> None:
        """Leave no free space, not even in SQLite's write-ahead log."""

    def free(self) -> None:
        """Free the space again."""


@contextlib.contextmanager
def mounted(directory: Path | str, size_mb: int) -> Iterator[None]:
    """Mount a small disk at the directory, or skip the test if that is not permitted."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "none", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk is not permitted")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path | str) -> None:
    assert os.path.ismount(directory)
    with Path(directory, BALLAST).open("ab", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))


class MountedDisk:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.database = Database(migrated_sqlite(directory / DATABASE))

    def fill(self) -> None:
        empty_log(self.directory / DATABASE)
        fill(self.directory)

    def free(self) -> None:
        (self.directory / BALLAST).unlink()


class ImitatedDisk:
    """Fails SQLite's commits, and writes that extend the spool's file, as a full disk does."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.database = Database(migrated_sqlite(directory / DATABASE))
        self._is_full = False
        self._changes_before: dict[Any, int] = {}
        engine = self.database._engine
        event.listen(engine, "begin", self._note_begin)
        self._commit = engine.dialect.do_commit
        monkeypatch.setattr(engine.dialect, "do_commit", self._commit_or_fail)
        self._write_all = settlement_spool._write_all
        monkeypatch.setattr(settlement_spool, "_write_all", self._write_or_fail)

    def fill(self) -> None:
        self._is_full = True

    def free(self) -> None:
        self._is_full = False

    def _note_begin(self, connection: Connection) -> None:
        driver = connection.connection.dbapi_connection
        self._changes_before[driver] = driver.total_changes  # type: ignore[union-attr]

    def _commit_or_fail(self, connection: Any) -> None:
        driver = connection.dbapi_connection
        if self._is_full and driver.total_changes > self._changes_before[driver]:
            raise sqlite3.OperationalError("database or disk is full")
        self._commit(connection)

    def _write_or_fail(self, file: int, data: bytes, offset: int) -> None:
        if self._is_full and offset + len(data) > os.fstat(file).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._write_all(file, data, offset)


def empty_log(database: Path) -> None:
    """Truncate SQLite's write-ahead log, so that the next writer needs new space."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        for _ in range(100):
            if connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0:
                return
    raise AssertionError("SQLite's log was never free of readers and writers")


@contextlib.contextmanager
def small_disk(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    with tempfile.TemporaryDirectory(prefix="loramux-disk-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        with mounted(directory, DISK_MB) if kind == "mounted" else contextlib.nullcontext():
            disk: SmallDisk
            disk = MountedDisk(directory) if kind == "mounted" else ImitatedDisk(directory, monkeypatch)
            yield disk
            disk.database.close()
