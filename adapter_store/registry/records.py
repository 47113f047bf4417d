"""The facts about adapters that cross this package's border."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

VersionState = Literal["pending", "validating", "ready", "rejected", "quarantined", "archived"]
UploadState = Literal["open", "used"]
AliasAction = Literal["set", "rollback"]

UNFINISHED: tuple[VersionState, ...] = ("pending", "validating")
"""States of a version that has no verdict yet."""

DEFAULT_ALIAS = "default"
"""The alias that a bare adapter name means."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A tenant's named adapter; its weights are in its versions."""

    id: str
    tenant_id: str
    tenant_slug: str
    name: str
    created_us: int
    disabled_us: int | None
    """Since when it answers no request; None while it does."""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable set of weights, or the record of why it was refused.

    `digest`, `max_rank`, `num_pages` and `canonical_bytes` are known once validation has passed, `ready_us` once the
    version is ready. `report` holds what validation found; of a rejected version it has `{"error": {"code",
    "message", "param"}}`.
    """

    id: str
    adapter_id: str
    number: int
    state: VersionState
    digest: str | None
    max_rank: int | None
    num_pages: int | None
    canonical_bytes: int | None
    report: Mapping[str, Any]
    created_us: int
    ready_us: int | None
    pinned_us: int | None
    """Since when it is to stay in the page pool."""


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """A version that an alias names; its part of the requests is `weight` out of the sum of the alias's weights."""

    version_id: str
    number: int
    weight: int


@dataclass(frozen=True, slots=True)
class Alias:
    """A name for versions of an adapter, `targets` in the order of their numbers; `revision` counts its changes."""

    name: str
    revision: int
    targets: tuple[AliasTarget, ...]
    updated_us: int


@dataclass(frozen=True, slots=True)
class AliasChange:
    """What an alias named from one of its revisions on, and the key (or "system") that brought it."""

    id: str
    name: str
    revision: int
    actor: str
    action: AliasAction
    targets: tuple[AliasTarget, ...]
    created_us: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Another tenant that may call an adapter, and pays for its calls."""

    adapter_id: str
    tenant_id: str
    tenant_slug: str
    created_us: int


@dataclass(frozen=True, slots=True)
class UploadFile:
    """A file as the client declared it: name, bytes, and the SHA-256 of its bytes in hexadecimal."""

    name: str
    size: int
    sha256: str
    parts_id: str | None = None
    """What the blob store calls it while the client puts its parts there."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Files on their way to becoming a version; open until used or expired.

    One with a `source_url` is used from the start, and has no `files` before a server has read them from there.
    """

    id: str
    adapter_id: str
    files: tuple[UploadFile, ...]
    state: UploadState
    created_us: int
    expires_us: int
    source_url: str | None


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A ready version that a request runs with, as resolved once from a model name."""

    tenant_id: str
    tenant_slug: str
    adapter_id: str
    adapter_name: str
    version_id: str
    version: int
    digest: str
    max_rank: int
