"""Where bytes are kept: one interface for a local directory, S3 and memory."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loramux.adapter_store.blobs.circuit_breaker import BreakerState
from loramux.adapter_store.errors import BlobNotFound, BlobTooLarge

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,127}){0,7}")


MAX_READ_BYTES = 64 << 20
"""Larger blobs are not read into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobInfo:
    """What a store says of a blob without reading it; `sha256` (hexadecimal) where it keeps one that it checked."""

    size: int
    etag: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PresignedPut:
    """A request by which anybody may put these bytes and no others, once: exactly these headers belong to it."""

    url: str
    method: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PresignedParts:
    """The same for a large blob: part `i` takes the bytes `[i * part_bytes, (i + 1) * part_bytes)`, the last fewer.

    `upload_id` is what `complete_parts` and `abort_parts` ask for.
    """

    upload_id: str
    part_bytes: int
    parts: tuple[PresignedPut, ...]


class BlobStore(ABC):
    """Immutable blobs by key. Safe to use from several threads.

    Keys are parts of letters, digits, `.`, `_` and `-`, joined by `/`; another key is a ValueError. A blob is there
    whole or not at all, and is durable once `put` returns. Every method raises BlobStoreUnavailable while the store
    cannot be reached.
    """

    @property
    def breaker_state(self) -> BreakerState:
        """Whether the store is asked at all; a store without a breaker always is."""
        return "closed"

    @abstractmethod
    def check(self) -> None:
        """Raise BlobStoreUnavailable, with a sentence that helps, unless blobs can be kept here."""

    @abstractmethod
    def put(self, key: str, source: Path | bytes, deadline_s: float | None = None) -> bool:
        """Keep a file's or given bytes; False where the key is taken, whose blob then stays as it is.

        After BlobStoreUnavailable the blob may be there or not. `deadline_s` is as for `get`.
        """

    @abstractmethod
    def get(self, key: str, destination: Path, max_bytes: int | None = None, deadline_s: float | None = None) -> None:
        """Write a blob to a file; after any error the file may hold a part of it.

        Raises BlobNotFound, and BlobTooLarge before more than `max_bytes` were written. Where the store is reached
        over a network the call ends within `deadline_s`; its default grows with the blob.
        """

    @abstractmethod
    def read_bytes(self, key: str) -> bytes:
        """A small blob; raises BlobNotFound, or BlobTooLarge above `MAX_READ_BYTES`."""

    @abstractmethod
    def head(self, key: str) -> BlobInfo | None:
        """What is known of a blob; None where there is none."""

    def exists(self, key: str) -> bool:
        return self.head(key) is not None

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a blob; no error where there is none."""

    @abstractmethod
    def list_keys(self, prefix: str = "") -> Iterator[str]:
        """The keys that begin with `prefix`, sorted."""

    @abstractmethod
    def remove_unfinished(self) -> None:
        """Remove what puts left behind that a crash ended; one that is still at work is not disturbed."""

    def presign_put(self, key: str, size: int, sha256: str, expires_s: int) -> PresignedPut | None:
        """A request that puts a blob without us for `expires_s` seconds; None where clients must send it to us.

        It is bound to the size and the key's being free, and to the SHA-256 (hexadecimal) where the store knows that:
        who relies on the bytes checks them. None also for blobs that `presign_parts` takes.
        """
        return None

    def presign_parts(self, key: str, size: int, expires_s: int) -> PresignedParts | None:
        """Requests that put the parts of a large blob; None for small ones and where clients must send it to us."""
        return None

    def complete_parts(self, key: str, upload_id: str, size: int) -> bool:
        """Make a blob of the parts that came; False where the key is taken, whose blob then stays as it is.

        Raises PartsMissing where they have not `size` bytes in all, and BlobNotFound where there is no such upload.
        """
        raise BlobNotFound("no such upload")

    def abort_parts(self, key: str, upload_id: str) -> None:  # noqa: B027 (nothing to do where there are no parts)
        """Drop an upload and the parts that came; no error where there is none."""


def check_key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError("this is not a blob key: one has up to eight parts of letters, digits, '.', '_' and '-'")
    return key


def check_size(size: int, max_bytes: int | None) -> None:
    """Raise BlobTooLarge for a blob of more bytes than are wanted."""
    if max_bytes is not None and size > max_bytes:
        raise BlobTooLarge(f"the blob has {size} bytes, more than {max_bytes}")


def canonical_key(digest: str) -> str:
    return f"adapters/{digest}.safetensors"


def packed_key(digest: str, pack_key: str) -> str:
    return f"packed/{digest}/{pack_key}"


def upload_key(upload_id: str, name: str) -> str:
    return f"{UPLOADS}{upload_id}/{name}"


UPLOADS = "uploads/"
"""The prefix of files that have not become a version yet."""
