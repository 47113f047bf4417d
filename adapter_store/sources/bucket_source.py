"""Adapter files in an operator's bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loramux.adapter_store.blobs.interface import BlobStore, check_size
from loramux.adapter_store.errors import (
    AdapterRejected,
    BlobNotFound,
    BlobStoreUnavailable,
    BlobTooLarge,
    SourceUnavailable,
)


class BucketSource:
    """The files below one prefix of a bucket; see `Source`."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    @property
    def facts(self) -> dict[str, Any]:
        # Only the operator may see the bucket and its address.
        return {}

    def has(self, name: str) -> bool:
        with _translated(name, 0):
            return self._store.exists(name)

    def size(self, name: str, max_bytes: int) -> int:
        with _translated(name, max_bytes):
            found = self._store.head(name)
            if found is None:
                raise BlobNotFound(name)
            check_size(found.size, max_bytes)
            return found.size

    def fetch_file(self, name: str, destination: Path, max_bytes: int) -> None:
        with _translated(name, max_bytes):
            self._store.get(name, destination, max_bytes)


@contextmanager
def _translated(name: str, max_bytes: int) -> Iterator[None]:
    """Translate errors of the blob store into AdapterRejected or SourceUnavailable."""
    try:
        yield
    except BlobNotFound:
        raise AdapterRejected("source_not_found", "the source has no such file", name) from None
    except BlobTooLarge:
        raise AdapterRejected("file_too_large", f"the file is larger than {max_bytes} bytes", name) from None
    except BlobStoreUnavailable as error:
        raise SourceUnavailable(str(error)) from error
