"""The blob store interface, implemented by a local directory and S3."""

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
"""Largest blob that can be read into memory, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobInfo:
    """A blob's metadata. `sha256` (hexadecimal) is set if the store keeps the blob's SHA-256."""

    size: int
    etag: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PresignedPut:
    """A signed request that lets anyone put a blob, or one part of a blob. Send it with exactly these `headers`."""

    url: str
    method: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PresignedParts:
    """Signed requests for a large blob: part `i` contains bytes `[i * part_bytes, (i + 1) * part_bytes)`.

    The last part may be shorter. `upload_id` is the argument for `complete_parts` and `abort_parts`.
    """

    upload_id: str
    part_bytes: int
    parts: tuple[PresignedPut, ...]


class BlobStore(ABC):
    """Immutable blobs by key. Safe to use from several threads.

    A key consists of up to eight parts separated by `/`. Each part has up to 128 letters, digits, `.`, `_` and `-`, and
    begins with a letter, a digit or `_`. Any other key raises ValueError. A blob is either complete or absent, and is
    durable once `put` returns. Every method raises BlobStoreUnavailable while the store cannot be reached.
    """

    @property
    def breaker_state(self) -> BreakerState:
        """State of the store's circuit breaker. It is always `closed` if the store has none."""
        return "closed"

    @abstractmethod
    def check(self) -> None:
        """Check that blobs can be stored here. Raises BlobStoreUnavailable with a message for the operator."""

    @abstractmethod
    def put(self, key: str, source: Path | bytes, deadline_s: float | None = None) -> bool:
        """Store a file or bytes and return True, or keep the existing blob and return False if the key is taken.

        If `put` raises BlobStoreUnavailable, the blob may or may not exist. `deadline_s` works as in `get`.
        """

    @abstractmethod
    def get(self, key: str, destination: Path, max_bytes: int | None = None, deadline_s: float | None = None) -> None:
        """Write a blob to a file, which may contain part of the blob after any error.

        Raises BlobNotFound, or BlobTooLarge before it writes more than `max_bytes`. A networked store returns or fails
        within `deadline_s`, which by default grows with the blob's size.
        """

    @abstractmethod
    def read_bytes(self, key: str) -> bytes:
        """Read a small blob into memory. Raises BlobNotFound, or BlobTooLarge above `MAX_READ_BYTES`."""

    @abstractmethod
    def head(self, key: str) -> BlobInfo | None:
        """Return a blob's metadata, or None if there is no such blob."""

    def exists(self, key: str) -> bool:
        return self.head(key) is not None

    @abstractmethod
    def delete(self, key: str) -> None: ...

    @abstractmethod
    def list_keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that begin with `prefix`, sorted."""

    @abstractmethod
    def remove_unfinished(self) -> None:
        """Remove the leftovers of crashed puts, without disturbing puts in progress."""

    def presign_put(self, key: str, size: int, sha256: str, expires_s: int) -> PresignedPut | None:
        """Return a request that lets a client put a blob directly within `expires_s` seconds.

        The result is None if the client must upload through the server, or if the blob needs `presign_parts`. The store
        accepts only `size` bytes, only while the key is free and, if it supports checksums, only bytes with this
        SHA-256 (hexadecimal). Code that relies on the bytes must check them anyway.
        """
        return None

    def presign_parts(self, key: str, size: int, expires_s: int) -> PresignedParts | None:
        """Return presigned requests that let a client upload a large blob in parts.

        The result is None if the blob is small or the client must upload through the server.
        """
        return None

    def complete_parts(self, key: str, upload_id: str, size: int) -> bool:
        """Assemble a blob from its uploaded parts. Returns False and keeps the existing blob if the key is taken.

        Raises PartsMissing unless the parts total `size` bytes, or BlobNotFound if there is no such upload.
        """
        raise BlobNotFound("no such upload")

    def abort_parts(self, key: str, upload_id: str) -> None:  # noqa: B027 (nothing to do without parts)
        """Abort an upload and delete its parts. Does nothing if there is no such upload."""


def check_key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError("invalid blob key: use up to eight parts of letters, digits, '.', '_' and '-'")
    return key


def check_size(size: int, max_bytes: int | None) -> None:
    if max_bytes is not None and size > max_bytes:
        raise BlobTooLarge(f"the blob has {size} bytes, more than {max_bytes}")


def canonical_key(digest: str) -> str:
    return f"adapters/{digest}.safetensors"


def packed_key(digest: str, pack_key: str, base: str | None = None) -> str:
    """Return the key of a packed file. `base` is the fingerprint of the base's weights if the file depends on them."""
    return f"packed/{digest}/{pack_key}" if base is None else f"packed/{digest}/{pack_key}-{base[:16]}"


def upload_key(upload_id: str, name: str) -> str:
    return f"{UPLOADS}{upload_id}/{name}"


UPLOADS = "uploads/"
"""Key prefix of uploaded files, which are deleted once their version has a verdict."""
