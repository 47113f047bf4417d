"""Where bytes are kept: one interface for a local directory, S3 and memory."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,127}){0,7}")


class BlobStore(ABC):
    """Immutable blobs by key. Safe to use from several threads.

    Keys are parts of letters, digits, `.`, `_` and `-`, joined by `/`; another key is a ValueError. A blob is there
    whole or not at all, and is durable once `put` returns. Every method raises BlobStoreUnavailable while the store
    cannot be reached.
    """

    @abstractmethod
    def check(self) -> None:
        """Raise BlobStoreUnavailable, with a sentence that helps, unless blobs can be kept here."""

    @abstractmethod
    def put(self, key: str, source: Path | bytes) -> bool:
        """Keep a file's or given bytes; False where the key is taken, whose blob then stays as it is."""

    @abstractmethod
    def get(self, key: str, destination: Path) -> None:
        """Write a blob to a file; raises BlobNotFound, and after any error the file may hold a part of it."""

    @abstractmethod
    def read_bytes(self, key: str) -> bytes:
        """A small blob; raises BlobNotFound."""

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a blob; no error where there is none."""

    @abstractmethod
    def list_keys(self, prefix: str = "") -> Iterator[str]:
        """The keys that begin with `prefix`, sorted."""

    @abstractmethod
    def remove_unfinished(self) -> None:
        """Remove what puts left behind that a crash ended; one that is still at work is not disturbed."""


def check_key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a blob key")
    return key


def canonical_key(digest: str) -> str:
    return f"adapters/{digest}.safetensors"


def packed_key(digest: str, pack_key: str) -> str:
    return f"packed/{digest}/{pack_key}"


def upload_key(upload_id: str, name: str) -> str:
    return f"{UPLOADS}{upload_id}/{name}"


UPLOADS = "uploads/"
"""The prefix of files that have not become a version yet."""
