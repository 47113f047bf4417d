"""What can go wrong with adapters, their uploads and their bytes."""

from __future__ import annotations


class StoreError(Exception):
    """Base of every error of the adapter store."""


class Refused(StoreError):
    """Something that a client sent is refused: a stable code, a sentence, and the field or tensor at fault."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class AdapterRejected(Refused):
    """An adapter's files do not pass validation."""


class UploadRefused(Refused):
    """An upload's declaration or its bytes are wrong, or it came too late."""


class InvalidName(Refused):
    """An adapter's or alias's name is malformed or reserved."""


class AdapterExists(StoreError):
    """The tenant already has an adapter of that name."""


class TenantNotFound(StoreError):
    """There is no such tenant."""


class AdapterNotFound(StoreError):
    """There is no such adapter."""


class VersionNotFound(StoreError):
    """The adapter has no such version."""


class VersionNotReady(StoreError):
    """The version has not passed validation."""


class UploadNotFound(StoreError):
    """There is no such upload."""


class AdapterUnavailable(StoreError):
    """The adapter's bytes cannot be had now; a later try may succeed."""


class LoadCancelled(AdapterUnavailable):
    """Whoever asked for the adapter no longer wants it."""


class AdapterCorrupt(StoreError):
    """Bytes differ from what their checksum says; they are never served."""


class BlobNotFound(StoreError):
    """No blob has that key."""


class BlobStoreUnavailable(StoreError):
    """The blob store cannot be reached or refuses to work; the message says which and why."""


class InvalidBlobUrl(StoreError):
    """The blob store's URL cannot be used; the message says how to mend it."""
