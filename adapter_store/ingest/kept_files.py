"""Files that this server has received for uploads, kept on its disk until their version is validated."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

MAX_KEPT_BYTES = 1 << 30
"""Maximum size of all kept files. Without its kept file, a version is validated from the blob store."""


class KeptFiles:
    """The most recently received files, whose bytes are as declared and which the blob store has, too. Thread-safe.

    In `directory`, their names begin with `kept-`.
    """

    def __init__(self, directory: Path, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def upload_ids(self) -> set[str]:
        with self._lock:
            return {upload_id for upload_id, _ in self._sizes}

    def keep(self, upload_id: str, name: str, path: Path) -> None:
        """Move a received file here, and delete the oldest ones if all together are too large."""
        size = path.stat().st_size
        if size > self._max_bytes:
            return
        with self._lock:
            path.replace(self._path(upload_id, name))
            self._remove(upload_id, name)
            self._sizes[upload_id, name] = size
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                self._delete(*next(iter(self._sizes)))

    def has(self, upload_id: str, name: str) -> bool:
        with self._lock:
            return (upload_id, name) in self._sizes

    def take(self, upload_id: str, name: str, destination: Path) -> bool:
        """Move a kept file to `destination`, or return False if it is not kept."""
        with self._lock:
            if not self._remove(upload_id, name):
                return False
            try:
                self._path(upload_id, name).replace(destination)
            except FileNotFoundError:
                # Somebody has emptied the directory.
                return False
            return True

    def forget(self, upload_id: str) -> None:
        with self._lock:
            for key in [key for key in self._sizes if key[0] == upload_id]:
                self._delete(*key)

    def _delete(self, upload_id: str, name: str) -> None:
        self._remove(upload_id, name)
        self._path(upload_id, name).unlink(missing_ok=True)

    def _remove(self, upload_id: str, name: str) -> bool:
        size = self._sizes.pop((upload_id, name), 0)
        self._num_bytes -= size
        return size > 0

    def _path(self, upload_id: str, name: str) -> Path:
        return self._directory / f"kept-{upload_id}-{name}"
