"""Settlements that the database could not take, on the local disk until it can."""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from loramux.platform.reservations import Closing

CURRENT, REPLAYING, REFUSED = "settlements.jsonl", "replaying.jsonl", "refused.jsonl"

log = structlog.get_logger()


class SpoolFull(Exception):
    """What waits has reached the most that may."""


@dataclass(frozen=True, slots=True)
class SpoolContents:
    """What a file of the spool holds: the records that are whole, and how many lines are not."""

    closings: tuple[Closing, ...]
    num_damaged: int


class SettlementSpool:
    """Append-only files in a directory of one process; each record is a line of its CRC-32 and JSON, and is fsynced.

    Settling twice changes nothing, so that records may be replayed as often as it takes. To replay, the file is put
    aside (`begin_replay`) while new records go to another, and is removed (`end_replay`) once all of it is settled. A
    torn last line, as a crash leaves it, was acknowledged to nobody; a damaged one elsewhere is reported and kept.
    Blocking.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._end_torn_line()
        self._num_bytes = sum(self._size(name) for name in (CURRENT, REPLAYING))

    @property
    def num_bytes(self) -> int:
        """How much waits; 0: nothing."""
        return self._num_bytes

    @property
    def is_full(self) -> bool:
        return self._num_bytes >= self._max_bytes

    def append(self, closing: Closing) -> None:
        """Keep a settlement; it is on the disk when this returns. Raises SpoolFull and OSError."""
        body = msgspec.json.encode(closing)
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        with self._lock:
            if self._num_bytes + len(line) > self._max_bytes:
                raise SpoolFull(f"{self._num_bytes} bytes of settlements wait in {self._directory}")
            path = self._directory / CURRENT
            is_new = not path.exists()
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                before = os.fstat(file).st_size
                try:
                    _write_all(file, line)
                    os.fsync(file)
                except OSError:
                    # Half a line would swallow the next one.
                    with contextlib.suppress(OSError):
                        os.ftruncate(file, before)
                    raise
            finally:
                os.close(file)
            if is_new:
                self._sync_directory()
            self._num_bytes += len(line)

    def begin_replay(self) -> SpoolContents:
        """What is to be settled now: what an unfinished replay left, else all that has gathered."""
        with self._lock:
            replaying = self._directory / REPLAYING
            if not replaying.exists():
                if not (self._directory / CURRENT).exists():
                    return SpoolContents((), 0)
                (self._directory / CURRENT).rename(replaying)
                self._sync_directory()
        return _read(replaying)

    def end_replay(self, refused: Iterable[Closing] = ()) -> None:
        """All of it is settled, but for what the database `refused` for good, which is kept for a person to look at."""
        with self._lock:
            replaying = self._directory / REPLAYING
            if not replaying.exists():
                return
            kept = [msgspec.json.encode(closing) for closing in refused]
            kept += [line for line in _lines(replaying) if _record(line) is None]
            if kept:
                log.error("settlements could not be replayed and are kept", count=len(kept), file=REFUSED)
                with (self._directory / REFUSED).open("ab") as file:
                    file.writelines(line + b"\n" for line in kept)
                    file.flush()
                    os.fsync(file.fileno())
            replaying.unlink(missing_ok=True)
            self._sync_directory()
            self._num_bytes = self._size(CURRENT)

    def _end_torn_line(self) -> None:
        """Cut what a crash left of a line off the end."""
        path = self._directory / CURRENT
        if not path.exists():
            return
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            log.warning("a settlement was cut short by a crash before it was acknowledged", num_bytes=len(data))
            os.truncate(path, len(whole))

    def _size(self, name: str) -> int:
        path = self._directory / name
        return path.stat().st_size if path.exists() else 0

    def _sync_directory(self) -> None:
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _read(path: Path) -> SpoolContents:
    records = [_record(line) for line in _lines(path)]
    return SpoolContents(tuple(record for record in records if record is not None), records.count(None))


def _lines(path: Path) -> Iterator[bytes]:
    for line in path.read_bytes().split(b"\n"):
        if line:
            yield line


def _record(line: bytes) -> Closing | None:
    """The settlement of a line; None where the line is not as it was written."""
    checksum, _, body = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    try:
        return msgspec.json.decode(body, type=Closing)
    except msgspec.MsgspecError:
        return None
