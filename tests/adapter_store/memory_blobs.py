"""A blob store in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from loramux.adapter_store.blobs.interface import MAX_READ_BYTES, BlobInfo, BlobStore, check_key, check_size
from loramux.adapter_store.errors import BlobNotFound


class MemoryBlobStore(BlobStore):
    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def check(self) -> None:
        """Memory is always available."""

    def put(self, key: str, source: Path | bytes, deadline_s: float | None = None) -> bool:
        data = source if isinstance(source, bytes) else source.read_bytes()
        with self._lock:
            if check_key(key) in self._blobs:
                return False
            self._blobs[key] = data
        return True

    def get(self, key: str, destination: Path, max_bytes: int | None = None, deadline_s: float | None = None) -> None:
        data = self._find(key)
        check_size(len(data), max_bytes)
        destination.write_bytes(data)

    def read_bytes(self, key: str) -> bytes:
        data = self._find(key)
        check_size(len(data), MAX_READ_BYTES)
        return data

    def head(self, key: str) -> BlobInfo | None:
        data = self._blobs.get(check_key(key))
        return None if data is None else BlobInfo(size=len(data))

    def delete(self, key: str) -> None:
        with self._lock:
            self._blobs.pop(check_key(key), None)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        with self._lock:
            keys = sorted(key for key in self._blobs if key.startswith(prefix))
        yield from keys

    def remove_unfinished(self) -> None:
        """Nothing survives a crash, so there is nothing to remove."""

    def _find(self, key: str) -> bytes:
        try:
            return self._blobs[check_key(key)]
        except KeyError:
            raise BlobNotFound(f"no blob {key}") from None
