"""Keeps settlements on the local disk until the database accepts them."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from loramux.adapter_store.atomic_files import sync_directory
from loramux.platform.admission.records import Closing

CURRENT, LEFT, REFUSED = "settlements.jsonl", "replaying.jsonl", "refused.jsonl"

ALLOCATED_BYTES = 4 << 20
"""Disk space, in bytes, that the spool preallocates at a time. It is enough for 18,000 settlements."""

_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Error numbers of file systems that cannot preallocate space."""

log = structlog.get_logger()


class SpoolFull(Exception):
    """The record would make the spool exceed its maximum size."""


@dataclass(frozen=True, slots=True)
class SpoolContents:
    """The intact records waiting in the spool, and the number of damaged lines."""

    closings: tuple[Closing, ...]
    num_damaged: int


class SettlementSpool:
    """A file of settlements in one process's directory. Blocking.

    Space is preallocated, so the spool keeps working on a full disk until that space is used up. Each record is a line
    with a CRC-32 and a JSON document, written in place after the previous record and fsynced. Zeros fill the rest of
    the file. A file whose first byte is zero counts as empty, regardless of its other bytes.

    `begin_replay` reads the waiting records, and `end_replay` marks them as settled. Settling twice changes nothing, so
    records can be replayed repeatedly. Once no record is waiting, the file is overwritten with zeros.

    A torn last line, left by a crash, was never acknowledged. A damaged line elsewhere is reported and, like a record
    that is refused or fails too often, moved to the file REFUSED. Lines in the file LEFT, which come from an earlier
    version or were copied from the log or from REFUSED by an operator, are replayed at the next start and then removed.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._path = directory / CURRENT
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._allocated = 0
        # These are byte offsets. Records in [0, _settled) are settled, and records in [_settled, _end) are waiting. The
        # last replay has read up to _replayed.
        self._settled = 0
        self._replayed = 0
        self._damaged: list[bytes] = []
        left = directory / LEFT
        self._left_bytes = left.stat().st_size if left.exists() else 0
        data = self._path.read_bytes() if self._path.exists() else b""
        self._end = _end_of_records(data)
        try:
            with self._opened() as file:
                self._clear(file, self._end, len(data.rstrip(b"\0")))
                self._allocate(file, 1)
        except OSError as error:
            # The next call of `append` tries again.
            log.warning("no space could be allocated for the settlement spool", error=str(error))

    @property
    def num_bytes(self) -> int:
        """Size of the waiting records in bytes, or 0 if no record is waiting."""
        return self._left_bytes + self._end - self._settled

    def append(self, closing: Closing) -> None:
        line = record_of(closing)
        with self._lock:
            if self._end + len(line) > self._max_bytes:
                raise SpoolFull(f"the spool holds {self._end} bytes; its limit is {self._max_bytes}")
            with self._opened() as file:
                self._allocate(file, self._end + len(line))
                try:
                    _write_all(file, line, self._end)
                    os.fsync(file)
                except OSError:
                    # Erase the partial line, because it would corrupt the next one.
                    with contextlib.suppress(OSError):
                        _write_all(file, bytes(len(line)), self._end)
                    raise
            self._end += len(line)

    def begin_replay(self) -> SpoolContents:
        """Read the waiting records in order to settle them."""
        with self._lock:
            left = (self._directory / LEFT).read_bytes() if self._left_bytes else b""
            self._replayed = self._end
            lines = [*left.split(b"\n"), *self._read(self._settled, self._end).split(b"\n")]
        found = [(line, _closing_of(line)) for line in lines if line]
        self._damaged = [line for line, closing in found if closing is None]
        return SpoolContents(tuple(closing for _, closing in found if closing is not None), len(self._damaged))

    def end_replay(self, refused: Iterable[Closing] = ()) -> None:
        """Mark all records read by `begin_replay` as settled, and move damaged and `refused` records to the file
        REFUSED.

        Raises OSError if that file cannot be written. All records then remain waiting.
        """
        with self._lock:
            self._set_aside([*map(record_of, refused), *(line + b"\n" for line in self._damaged)])
            if self._left_bytes:
                (self._directory / LEFT).unlink()
                sync_directory(self._directory)
            self._left_bytes, self._damaged = 0, []
            self._settled = self._replayed
            if self._settled == self._end:
                self._empty()

    def set_aside(self, refused: Iterable[Closing]) -> None:
        """Append records that were never in the spool to the file REFUSED. Raises OSError if it cannot be written."""
        with self._lock:
            self._set_aside([*map(record_of, refused)])

    def _set_aside(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        log.error("some settlements could not be replayed and were set aside", count=len(lines), file=REFUSED)
        with (self._directory / REFUSED).open("ab") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self._directory)

    def _empty(self) -> None:
        """Start again at the beginning of the file. If this fails, settled records may harmlessly be replayed."""
        num_bytes, self._settled, self._end = self._end, 0, 0
        if num_bytes == 0:
            return
        with self._opened() as file:
            # This one byte empties the file, even if a crash interrupts the rest.
            self._clear(file, 0, 1)
            if num_bytes > ALLOCATED_BYTES:
                os.ftruncate(file, ALLOCATED_BYTES)
                self._allocated = ALLOCATED_BYTES
            self._clear(file, 1, min(num_bytes, ALLOCATED_BYTES))

    def _allocate(self, file: int, num_bytes: int) -> None:
        if num_bytes <= self._allocated:
            return
        wanted = min(self._max_bytes, -(-num_bytes // ALLOCATED_BYTES) * ALLOCATED_BYTES)
        try:
            os.posix_fallocate(file, 0, wanted)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            log.warning("the file system cannot preallocate space: a full disk will stop the spool", file=CURRENT)
            wanted = self._max_bytes
        os.fsync(file)
        sync_directory(self._directory)
        self._allocated = wanted

    def _clear(self, file: int, start: int, end: int) -> None:
        if start < end:
            _write_all(file, bytes(end - start), start)
            os.fsync(file)

    def _read(self, start: int, end: int) -> bytes:
        if start == end:
            return b""
        with self._path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield file
        finally:
            os.close(file)


def record_of(closing: Closing) -> bytes:
    body = msgspec.json.encode(closing)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _write_all(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        num_written = os.pwrite(file, view, offset)
        view, offset = view[num_written:], offset + num_written


def _end_of_records(data: bytes) -> int:
    """Return the offset of the next record, after the last completely written line."""
    if data.startswith(b"\0"):
        return 0
    end = data.rstrip(b"\0").rfind(b"\n") + 1
    last = data.rfind(b"\n", 0, max(end - 1, 0)) + 1
    is_torn = b"\0" in data[last:end]
    if is_torn or data[end:].strip(b"\0"):
        log.warning("a crash truncated a settlement before it was acknowledged", file=CURRENT)
    return last if is_torn else end


def _closing_of(line: bytes) -> Closing | None:
    checksum, _, body = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    try:
        return msgspec.json.decode(body, type=Closing)
    except msgspec.MsgspecError:
        return None
