"""Records of adapters, versions, aliases, grants and uploads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loramux.adapter_store.formats.version_files.adapter_task import AdapterTask

VersionState = Literal["pending", "validating", "ready", "rejected", "quarantined", "archived"]
UploadState = Literal["open", "used"]
AliasAction = Literal["set", "rollback"]

UNFINISHED: tuple[VersionState, ...] = ("pending", "validating")
"""States of a version without a verdict."""

BaseVerdict = Literal["ready", "rejected", "pending"]
"""Whether a version is valid for a base. `pending` means that no server of that base has decided yet."""

DEFAULT_ALIAS = "default"
"""The alias that a bare adapter name resolves to."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A tenant's named adapter. Its weights are in its versions."""

    id: str
    tenant_id: str
    tenant_slug: str
    name: str
    created_us: int
    disabled_us: int | None
    """When the adapter was disabled, or None if it is enabled."""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable set of weights with its optional files, or a record of why they were rejected.

    `digest`, `version_digest`, `max_rank`, `num_pages` and `canonical_bytes` are set once validation has passed,
    `ready_us` once the version is ready. `report` contains the findings of validation. For a rejected version, it
    includes `{"error": {"code", "message", "param"}}`.
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
    """When the version was pinned in the page pool, or None if it is not pinned."""
    version_digest: str | None
    """The digest of the weights and the optional files. Without optional files, it equals `digest`."""
    invocation_tokens: Sequence[int] | None
    """The tokens that activate the adapter, or None if it is always active."""
    task: Mapping[str, Any] | None
    """What the adapter is for (`AdapterTask.document`), or None for generation."""


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """One of an alias's versions. Its share of the requests is `weight` divided by the sum of the alias's weights."""

    version_id: str
    number: int
    weight: int


@dataclass(frozen=True, slots=True)
class RequiredEval:
    """The score, in millionths, that a version needs in an eval of this file before an alias gives it requests.

    `judge` is the model that must have judged the answers, or None for a file without lines that need a judge.
    """

    sha256: str
    name: str
    min_ppm: int
    judge: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRule:
    """Bounds within which an alias's new `versions` must stay, or the alias is rolled back."""

    max_error_rate: float | None = None
    """Largest share of failed requests."""
    max_first_token_s: float | None = None
    """Largest 95th percentile of the time to the first token, in seconds."""
    min_requests: int = 20
    """Number of a version's requests from which its bounds count."""
    versions: tuple[int, ...] = ()
    verdict: str | None = None
    """Why the alias was rolled back. None while the versions are watched."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A name for versions of an adapter. `targets` are sorted by version number. `revision` counts the changes."""

    name: str
    revision: int
    targets: tuple[AliasTarget, ...]
    updated_us: int
    required_eval: RequiredEval | None = None
    canary: CanaryRule | None = None
    overflow: str | None = None
    """The model that answers requests to the alias which would be refused: a served base or another adapter."""
    share_base_cache: int | None = None
    """Number of each prompt's last tokens that the adapter computes. The base computes the tokens before, and shares
    their K and V. None if the adapter computes whole prompts.
    """
    not_sharing: tuple[int, ...] = ()
    """Numbers of the alias's versions that ignore `share_base_cache`, because they cannot share."""


@dataclass(frozen=True, slots=True)
class WatchedAlias:
    """An alias with a canary that has no verdict, and the tenants whose requests count."""

    adapter_id: str
    alias: Alias
    tenant_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AliasChange:
    """An alias's targets and `share_base_cache` as of one revision, and the API key (or "system") that set them."""

    id: str
    name: str
    revision: int
    actor: str
    action: AliasAction
    targets: tuple[AliasTarget, ...]
    share_base_cache: int | None
    created_us: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission for another tenant to call an adapter. The calling tenant pays for its calls."""

    adapter_id: str
    tenant_id: str
    tenant_slug: str
    created_us: int


@dataclass(frozen=True, slots=True)
class UploadFile:
    name: str
    size: int
    sha256: str
    parts_id: str | None = None
    """The blob store's ID for the multipart upload, if the client uploads the file in parts."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Files for a future version. An upload is open until it is used, cancelled or expired.

    An upload with a `source_url` counts as used from its creation, and has no `files` until a server has read them from
    that source.
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
    """The ready version that a request runs with. The model name is resolved only once per request."""

    tenant_id: str
    tenant_slug: str
    adapter_id: str
    adapter_name: str
    version_id: str
    version: int
    digest: str
    """The digest of the weights, which identifies the adapter to the engine."""
    max_rank: int
    version_digest: str
    """The digest of the weights and the optional files. Without optional files, it equals `digest`."""
    invocation_tokens: tuple[int, ...] = ()
    """The tokens that activate the adapter. Empty if it is always active."""
    task: AdapterTask | None = None
    """What the adapter is for, or None for generation."""
    base_verdict: BaseVerdict = "ready"
    """Whether the version is valid for the base that this server serves."""
    share_base_cache: int | None = None
    """The option of the alias that the request names: see `Alias`."""

    @property
    def fingerprint(self) -> str:
        """The part after `@` that names exactly this version in requests, such as `sha256:9f86...`."""
        return f"sha256:{self.version_digest}"
