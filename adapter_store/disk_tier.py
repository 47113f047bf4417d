"""Packed adapters on a local disk, bounded, least recently used out first."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections import Counter, OrderedDict
from pathlib import Path

_SUFFIX = ".packed"
_MAX_SET_ASIDE = 8


class DiskTier:
    """Files `DIRECTORY/PACK_KEY/DIGEST.packed`; the directory belongs to one engine.

    What an earlier run left is used again, what it left unfinished is removed, and files of other pack keys count
    and are evicted like any other. Thread-safe.
    """

    def __init__(self, directory: Path, max_bytes: int, pack_key: str) -> None:
        self._max_bytes = max_bytes
        self._own = directory / pack_key
        self._unfinished = directory / "unfinished"
        self._set_aside = directory / "set_aside"
        shutil.rmtree(self._unfinished, ignore_errors=True)
        for path in (self._own, self._unfinished, self._set_aside):
            path.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._holds: Counter[Path] = Counter()
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        found = [(path, path.stat()) for path in directory.glob(f"*/*{_SUFFIX}")]
        for path, status in sorted(found, key=lambda item: item[1].st_mtime_ns):
            self._sizes[path] = status.st_size
        self.used_bytes = sum(self._sizes.values())
        self._evict()

    def hold(self, digest: str) -> Path | None:
        """The file of an adapter, which stays until `release`; None where there is none."""
        path = self._path(digest)
        with self._lock:
            if path not in self._sizes:
                return None
            try:
                # The order of use outlives a restart in the files' times.
                os.utime(path)
            except FileNotFoundError:
                self.used_bytes -= self._sizes.pop(path)
                return None
            self._holds[path] += 1
            self._sizes.move_to_end(path)
        return path

    def release(self, digest: str) -> None:
        with self._lock:
            path = self._path(digest)
            self._holds[path] -= 1
            if self._holds[path] == 0:
                del self._holds[path]
            self._evict()

    def new_file(self) -> Path:
        """A place for a file that is being made; `add` or `set_aside` takes it."""
        return self._unfinished / uuid.uuid4().hex

    def add(self, digest: str, file: Path) -> None:
        """Keep a finished and flushed file; one larger than the whole tier is dropped."""
        size = file.stat().st_size
        if size > self._max_bytes:
            file.unlink()
            return
        path = self._path(digest)
        with self._lock:
            os.replace(file, path)
            self.used_bytes += size - self._sizes.pop(path, 0)
            self._sizes[path] = size
            self._evict()

    def forget(self, digest: str) -> None:
        """Put an adapter's file aside, because its bytes are wrong."""
        path = self._path(digest)
        with self._lock:
            self.used_bytes -= self._sizes.pop(path, 0)
            if path.exists():
                self.set_aside(path)

    def set_aside(self, file: Path) -> None:
        """Keep a file with wrong bytes for whoever looks into it; only the newest few stay."""
        os.replace(file, self._set_aside / uuid.uuid4().hex)
        kept = sorted(self._set_aside.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in kept[:-_MAX_SET_ASIDE]:
            path.unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._own / f"{digest}{_SUFFIX}"

    def _evict(self) -> None:
        while self.used_bytes > self._max_bytes:
            # Few are held, and these were used last: the search ends at once.
            path = next((path for path in self._sizes if path not in self._holds), None)
            if path is None:
                return
            self.used_bytes -= self._sizes.pop(path)
            path.unlink(missing_ok=True)
