"""What can go wrong with adapters, their uploads and their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_PARAM_LEN = 200


def printable(text: str, max_len: int) -> str:
    """A tenant's text for other eyes: cut, with `?` for what is invisible or turns the line around."""
    shown = text if len(text) <= max_len else text[: max_len - 3] + "..."
    return "".join(character if character.isprintable() else "?" for character in shown)


class StoreError(Exception):
    """Base of every error of the adapter store."""


class Refused(StoreError):
    """Something that a client sent is refused: a stable code, a sentence, and the field or tensor at fault."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = None if param is None else printable(param, _MAX_PARAM_LEN)


class AdapterRejected(Refused):
    """An adapter's files do not pass validation. `report` says what they passed until then."""

    def __init__(
        self, code: str, message: str, param: str | None = None, report: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(code, message, param)
        self.report: Mapping[str, Any] = report or {}


class UploadRefused(Refused):
    """An upload's declaration or its bytes are wrong, or it came too late."""


class LimitReached(StoreError):
    """A tenant has as much on its way into the store as it may: `code` says what, and time may help."""

    def __init__(self, code: str, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidName(Refused):
    """An adapter's or alias's name is malformed or reserved."""


class InvalidAlias(Refused):
    """An alias cannot name these versions, or cannot be removed."""


class InvalidGrant(Refused):
    """An adapter cannot be granted to this tenant."""


class AdapterExists(StoreError):
    """The tenant already has an adapter of that name."""


class AdapterInUse(StoreError):
    """The adapter has versions: it can be disabled, not deleted."""


class TenantNotFound(StoreError):
    """There is no such tenant."""


class AdapterNotFound(StoreError):
    """There is no such adapter."""


class VersionNotFound(StoreError):
    """The adapter has no such version."""


class VersionNotReady(StoreError):
    """The version has not passed validation."""


class VersionInUse(StoreError):
    """An alias names the version: move the alias first."""


class AliasNotFound(StoreError):
    """The adapter has no such alias."""


class AliasChanged(StoreError):
    """Somebody else has moved the alias meanwhile."""


class NothingToRollBack(StoreError):
    """The alias has no such earlier revision."""


class GrantNotFound(StoreError):
    """The tenant was not granted the adapter."""


class UploadNotFound(StoreError):
    """There is no such upload."""


class ClaimLost(StoreError):
    """Another server holds the version now, or it has been decided."""


class SourceUnavailable(StoreError):
    """The operator's bucket that a version is to come from cannot be read now."""


class OriginalNotKept(StoreError):
    """The version was made before uploaded files were kept."""


class FileNotFound(StoreError):
    """A version has no file of that name."""


class AdapterUnavailable(StoreError):
    """The adapter's bytes cannot be had now; a later try may succeed."""


class LoadCancelled(AdapterUnavailable):
    """Whoever asked for the adapter no longer wants it."""


class AdapterCorrupt(StoreError):
    """Bytes differ from what their checksum says; they are never served."""


class BlobNotFound(StoreError):
    """No blob has that key."""


class BlobTooLarge(StoreError):
    """The blob has more bytes than the caller takes."""


class PartsMissing(StoreError):
    """The parts of a blob that have arrived are not what was announced."""


class BlobStoreUnavailable(StoreError):
    """The blob store cannot be reached or refuses to work; the message says which and why.

    `retry_after_s` is how long it is left alone after it failed again and again, where it is.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BlobDamaged(AdapterCorrupt, BlobStoreUnavailable):
    """Each time the blob was read, its bytes were other than the checksum that is kept with it says.

    It is either error's kind: a file that can be made again is, and who has no other source tries later.
    """


class InvalidBlobUrl(StoreError):
    """The blob store's URL cannot be used; the message says how to mend it."""
