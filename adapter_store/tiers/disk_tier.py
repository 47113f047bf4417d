"""A bounded LRU tier of packed adapters on a local disk, shared by all engines on a host."""

from __future__ import annotations

import fcntl
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from loramux.adapter_store.atomic_files import AtomicFiles
from loramux.adapter_store.directory_lock import DirectoryBusy, DirectoryLock
from loramux.adapter_store.tiers.tier_contents import MAX_LISTED, KeptAdapter, TierContents

_SUFFIX = ".packed"
_MAX_SET_ASIDE = 8
_SWEEP_EVERY_S = 60.0
_KEEPS_ACCESS_TIME: int = getattr(os, "O_NOATIME", 0)


@dataclass(slots=True)
class _Known:
    size: int
    used_ns: int


class HeldFile:
    """An open file in the tier. No engine evicts it before it is closed. Use it in a `with` block."""

    def __init__(self, tier: DiskTier, descriptor: int, status: os.stat_result) -> None:
        self._tier = tier
        self.descriptor = descriptor
        self.status = status

    def __enter__(self) -> HeldFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        self._tier.trim()


class DiskTier:
    """Files `DIRECTORY/PACK_KEY/DIGEST.packed`, shared by all of a user's engines on one host. Thread-safe.

    Files survive restarts. Files with other pack keys count toward the bound and are evicted like any others. An engine
    that adds a file keeps the whole directory within its own `max_bytes`, so configure all engines alike. Unfinished
    files and the few in `set_aside` do not count toward the bound.

    A reader holds a shared `flock` on its file. An eviction tries to take an exclusive lock and skips files that are
    being read. A reader waits only while an eviction holds the lock of its file. Changes, but not reads, also need the
    directory's lock. A process that hangs while holding that lock delays each addition by up to 5 s. The files' access
    times record the order of use, which therefore survives restarts. Only this class sets these times. The kernel
    releases a process's locks when the process dies. The unfinished files of a dead process are removed at the next
    start, or when an engine adds a file more than a minute after its last sweep.
    """

    def __init__(self, directory: Path, max_bytes: int, pack_key: str) -> None:
        self._max_bytes = max_bytes
        self._directory = directory
        self._own = directory / pack_key
        self._set_aside = directory / "set_aside"
        # Other users of the host must not be able to read tenants' adapters.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self._own, self._set_aside):
            path.mkdir(parents=True, exist_ok=True)
        self.used_bytes = 0
        self.num_evictions = 0
        # Least recently used first. Additions and uses by other engines are noticed when this engine adds or evicts a
        # file.
        self._files: OrderedDict[Path, _Known] = OrderedDict()
        self._lock = threading.Lock()
        self._changes = DirectoryLock(directory / "lock")
        # None if the directory's contents are unknown.
        self._last_change: int | None = None
        with self._changing():
            self._atomic_files = AtomicFiles(directory)
            self._sweep()
            self._evict(self._max_bytes)

    def hold(self, digest: str) -> HeldFile | None:
        """Open an adapter's file and protect it from eviction until it is closed.

        Returns None if there is no such file.
        """
        path = self._path(digest)
        opened = _open_shared(path)
        now_ns = time.time_ns()
        with self._lock:
            known = self._files.get(path)
            if known is not None and opened is not None:
                known.used_ns = now_ns
                self._files.move_to_end(path)
            elif known is not None:
                self.used_bytes -= self._files.pop(path).size
        if opened is None:
            return None
        descriptor, status = opened
        try:
            # The file's access time records this use across restarts and for other engines.
            os.utime(descriptor, ns=(now_ns, status.st_mtime_ns))
        except BaseException:
            os.close(descriptor)
            raise
        return HeldFile(self, descriptor, status)

    def new_file(self) -> Path:
        """Return a path for a new file, to be passed to `add` or `set_aside`."""
        return self._atomic_files.new_file()

    def add(self, digest: str, file: Path) -> None:
        """Move a finished file into the tier.

        The file is deleted if it is larger than the tier, or if too little space is free after the eviction of all
        files that are not being read.
        """
        status = file.stat()
        if status.st_size > self._max_bytes:
            file.unlink()
            return
        path = self._path(digest)
        with self._changing():
            if time.monotonic() > self._sweep_due:
                self._sweep()
            with self._lock:
                # If another engine has since added the same adapter's file, this file replaces it.
                known = self._files.pop(path, None)
                self.used_bytes -= known.size if known else 0
            self._evict(self._max_bytes - status.st_size)
            if self.used_bytes > self._max_bytes - status.st_size:
                file.unlink()
                path.unlink(missing_ok=True)
                return
            now_ns = time.time_ns()
            os.utime(file, ns=(now_ns, status.st_mtime_ns))
            os.replace(file, path)
            with self._lock:
                self._files[path] = _Known(status.st_size, now_ns)
                self.used_bytes += status.st_size

    def forget(self, digest: str, inode: int) -> None:
        """Set aside an adapter's corrupt file, unless another engine has already replaced it."""
        path = self._path(digest)
        with self._changing():
            try:
                if path.stat().st_ino != inode:
                    return
                self._put_aside(path)
            except FileNotFoundError:
                # Another engine has set the file aside or evicted it.
                pass
            with self._lock:
                known = self._files.pop(path, None)
                self.used_bytes -= known.size if known else 0

    def purge(self, digest: str) -> None:
        """Delete all copies of an adapter, like `purge_files`. Raises OSError."""
        # If another engine has deleted the files, this engine must not make the others rescan the directory.
        copies = (f"*/{digest}{_SUFFIX}", "set_aside/*")
        if any(True for pattern in copies for _ in self._directory.glob(pattern)):
            purge_files(self._directory, (digest,))

    def set_aside(self, file: Path) -> None:
        """Keep a corrupt file for inspection. Only the newest few are kept."""
        with self._changes.hold():
            self._put_aside(file)

    def trim(self) -> None:
        """Evict files if the tier still exceeds its bound because files were being read during earlier evictions."""
        if self.used_bytes > self._max_bytes:
            # If another engine holds the lock, that engine or a later call evicts the files.
            with suppress(DirectoryBusy), self._changing():
                self._evict(self._max_bytes)

    def contents(self) -> TierContents:
        """Return the tier's size and use, and list the files with this engine's pack key.

        Files that other engines have added since this engine's last change are not included.
        """
        now_ns = time.time_ns()
        with self._lock:
            own = ((path, known) for path, known in reversed(self._files.items()) if path.parent == self._own)
            return TierContents(
                tier="disk",
                used_bytes=self.used_bytes,
                max_bytes=self._max_bytes,
                num_adapters=len(self._files),
                num_evictions=self.num_evictions,
                adapters=tuple(
                    KeptAdapter(
                        digest=path.name.removesuffix(_SUFFIX),
                        num_bytes=known.size,
                        idle_s=max(0.0, (now_ns - known.used_ns) / 1e9),
                    )
                    for path, known in islice(own, MAX_LISTED)
                ),
            )

    def _path(self, digest: str) -> Path:
        return self._own / f"{digest}{_SUFFIX}"

    # `_changing` takes the directory's lock. The methods after it require the lock.

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock for a change. If other engines have changed the directory, rescan it first."""
        with self._changes.hold():
            if self._changes.num_changes != self._last_change:
                self._scan()
            number = self._changes.note_change()
            # Until the change completes, treat the directory's contents as unknown.
            self._last_change = None
            yield
            self._last_change = number

    def _sweep(self) -> None:
        self._atomic_files.sweep()
        self._sweep_due = time.monotonic() + _SWEEP_EVERY_S

    def _scan(self) -> None:
        found = []
        for path in self._directory.glob(f"*/*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((path, _Known(status.st_size, status.st_atime_ns)))
        with self._lock:
            self._files = OrderedDict(sorted(found, key=lambda item: item[1].used_ns))
            self.used_bytes = sum(known.size for known in self._files.values())

    def _evict(self, num_bytes: int) -> None:
        """Remove files until the rest take at most `num_bytes`, or until all remaining files are being read."""
        for minds_others in (True, False):
            with self._lock:
                files = list(self._files.items())
            for path, known in files:
                if self.used_bytes <= num_bytes:
                    return
                self._try_remove(path, known, minds_others)

    def _try_remove(self, path: Path, known: _Known, minds_others: bool) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            descriptor = None
        try:
            if descriptor is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                used_ns = os.fstat(descriptor).st_atime_ns
                if minds_others and used_ns > known.used_ns:
                    # Another engine has used the file since.
                    known.used_ns = used_ns
                    with self._lock:
                        self._files.move_to_end(path)
                    return
                path.unlink(missing_ok=True)
                self.num_evictions += 1
            with self._lock:
                if self._files.pop(path, None) is not None:
                    self.used_bytes -= known.size
        except BlockingIOError:
            # The file is being read.
            return
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _put_aside(self, file: Path) -> None:
        place = self._set_aside / uuid.uuid4().hex
        os.replace(file, place)
        os.utime(place)
        kept = sorted(self._set_aside.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in kept[:-_MAX_SET_ASIDE]:
            path.unlink(missing_ok=True)


def purge_files(directory: Path, digests: Collection[str]) -> None:
    """Delete the packed files of adapters from the disk tier in `directory`, for every target, and all files that were
    set aside, because these do not say whose bytes they contain. An engine that is reading a file finishes first.
    """
    if not digests or not directory.is_dir():
        return
    changes = DirectoryLock(directory / "lock")
    with changes.hold():
        changes.note_change()
        for digest in digests:
            for path in directory.glob(f"*/{digest}{_SUFFIX}"):
                path.unlink(missing_ok=True)
        for path in directory.glob("set_aside/*"):
            path.unlink(missing_ok=True)


def _open_shared(path: Path) -> tuple[int, os.stat_result] | None:
    """Open a file under a shared lock, or return None if the file is gone or being removed."""
    try:
        # Reading must not change the access time, which records the order of use.
        descriptor = os.open(path, os.O_RDONLY | _KEEPS_ACCESS_TIME)
    except FileNotFoundError:
        return None
    try:
        # Only an eviction holds the exclusive lock, and only briefly.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        status = os.fstat(descriptor)
        if status.st_nlink:
            return descriptor, status
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
