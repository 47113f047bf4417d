"""Blobs in memory: for tests and trials."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from loramux.adapter_store.blobs import BlobStore, check_key
from loramux.adapter_store.errors import BlobNotFound


class MemoryBlobStore(BlobStore):
    """Holds every blob in a dictionary."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def check(self) -> None:
        """Memory is always there."""

    def put(self, key: str, source: Path | bytes) -> bool:
        data = source if isinstance(source, bytes) else source.read_bytes()
        with self._lock:
            if check_key(key) in self._blobs:
                return False
            self._blobs[key] = data
        return True

    def get(self, key: str, destination: Path) -> None:
        destination.write_bytes(self.read_bytes(key))

    def read_bytes(self, key: str) -> bytes:
        try:
            return self._blobs[check_key(key)]
        except KeyError:
            raise BlobNotFound(f"no blob {key}") from None

    def exists(self, key: str) -> bool:
        return check_key(key) in self._blobs

    def delete(self, key: str) -> None:
        with self._lock:
            self._blobs.pop(check_key(key), None)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        with self._lock:
            keys = sorted(key for key in self._blobs if key.startswith(prefix))
        yield from keys

    def remove_unfinished(self) -> None:
        """A crash leaves nothing of this store."""
