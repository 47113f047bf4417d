"""Request bodies of the admin routes. Types are strict, and unknown fields are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field

from loramux.adapter_store.registry.aliases import DEFAULT_WEIGHT, KEPT, KEPT_OVERFLOW, KEPT_SHARE
from loramux.adapter_store.registry.base_sharing import MAX_SHARE_BASE_CACHE
from loramux.adapter_store.registry.evals import PPM, safe_name
from loramux.adapter_store.registry.records import CanaryRule, RequiredEval
from loramux.adapter_store.registry.registry import MAX_VERSION
from loramux.migrations.events import EventType
from loramux.platform.accounts.tenants import MAX_FLOOR_BYTES, MAX_RESPONSE_DAYS, MAX_WEIGHT
from loramux.platform.bodies.request_body import parse_body, read_body
from loramux.platform.bodies.sampling_fields import MAX_MODEL_NAME
from loramux.platform.errors import InvalidRequest
from loramux.platform.evals.cases import MAX_FILE_BYTES
from loramux.platform.events.webhooks import MAX_URL
from loramux.platform.service_tiers import ServiceTier

MAX_BODY_BYTES = 64 * 1024
MAX_LIFETIME_S = 10 * 366 * 86_400
MAX_ASKED_TOKENS = 10**9
MAX_EVAL_BYTES = 2 * MAX_FILE_BYTES + MAX_BODY_BYTES
"""Largest body that starts an eval. JSON can double the size of the file in it."""

_MAX_BYTES = "max_body_bytes"

B = TypeVar("B", bound="_Body")
R = TypeVar("R", bound=Callable[..., object])


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class NewTenant(_Body):
    slug: str
    display_name: str | None = None
    timezone: str = "UTC"


class TenantPatch(_Body):
    """Changes to a tenant. Null leaves a field as it is. A tenant's administrator may change only `display_name`."""

    display_name: str | None = Field(default=None, min_length=1, max_length=200)
    weight: int | None = Field(default=None, ge=1, le=MAX_WEIGHT)
    state: Literal["active", "suspended"] | None = None
    timezone: str | None = None
    host_floor_bytes: int | None = Field(default=None, ge=0, le=MAX_FLOOR_BYTES)
    response_days: int | None = Field(default=None, ge=0, le=MAX_RESPONSE_DAYS)
    max_service_tier: ServiceTier | None = None
    default_service_tier: ServiceTier | None = None


class NewKey(_Body):
    """A null `tenant` creates a platform key.

    `adapters` lists the only adapters that the key may name, each as an identifier or `[tenant/]name`. A key has the
    service tiers of its tenant unless it names its own. It cannot exceed the `max_service_tier` of its tenant.
    """

    tenant: str | None
    name: str = Field(default="default", min_length=1, max_length=200)
    scopes: list[str] | None = Field(default=None, max_length=16)
    expires_in_s: int | None = Field(default=None, ge=1, le=MAX_LIFETIME_S)
    adapters: list[str] | None = Field(default=None, max_length=64)
    max_service_tier: ServiceTier | None = None
    default_service_tier: ServiceTier | None = None


class KeyPatch(_Body):
    """Changes to a key. Null leaves a field as it is. An empty list of `adapters` removes the restriction, and the
    service tier `inherit` stands for the tenant's.
    """

    name: str | None = Field(default=None, min_length=1, max_length=200)
    scopes: list[str] | None = Field(default=None, max_length=16)
    expires_in_s: int | None = Field(default=None, ge=1, le=MAX_LIFETIME_S)
    adapters: list[str] | None = Field(default=None, max_length=64)
    max_service_tier: ServiceTier | Literal["inherit"] | None = None
    default_service_tier: ServiceTier | Literal["inherit"] | None = None


class Rotation(_Body):
    """A key's rotation. The current secret stays valid for `grace_s` seconds. With `keep_previous`, the one before it
    does, until its own grace period ends.
    """

    grace_s: int = Field(default=86_400, ge=0, le=90 * 86_400)
    keep_previous: bool = False


class NewAdapter(_Body):
    tenant: str
    name: str


class DeclaredFile(_Body):
    name: str
    size: int
    sha256: str


class NewUpload(_Body):
    files: list[DeclaredFile] = Field(max_length=16)


class NewVersion(_Body):
    """Either an `upload_id` or a `source`. Only a platform administrator may specify a source."""

    upload_id: str | None = None
    source: str | None = None


class WeightedVersion(_Body):
    version: int
    weight: int = 100


class EvalDemand(_Body):
    """The score that a version needs in its newest finished eval of a file. `sha256` is the checksum of the file's
    lines, as an eval reports it. `judge` is the judge of these evals, as in their own `judge`. A file with lines that
    need a judge needs it here, too.
    """

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    name: str = Field(default="the file", min_length=1, max_length=255)
    min_score: float = Field(ge=0, le=1)
    judge: str | None = Field(default=None, min_length=1, max_length=MAX_MODEL_NAME)

    def demand(self) -> RequiredEval:
        name = safe_name(self.name, self.sha256)
        return RequiredEval(self.sha256, name, round(self.min_score * PPM), self.judge)


class CanaryBounds(_Body):
    """When the alias goes back to a revision without these versions on its own. At least one bound is needed."""

    max_error_rate: float | None = Field(default=None, ge=0, lt=1)
    max_first_token_s: float | None = Field(default=None, gt=0, le=3600)
    min_requests: int = Field(default=20, ge=1, le=1000)

    def rule(self) -> CanaryRule:
        """Raises InvalidRequest."""
        if self.max_error_rate is None and self.max_first_token_s is None:
            raise InvalidRequest("specify max_error_rate or max_first_token_s", param="canary", code="invalid_canary")
        return CanaryRule(
            max_error_rate=self.max_error_rate,
            max_first_token_s=self.max_first_token_s,
            min_requests=self.min_requests,
        )


class AliasTargets(_Body):
    """Either one `version` or several `targets`. `warm` loads the versions into the engine before the alias moves.

    An alias keeps the eval that it demands, its `overflow` and its `share_base_cache` until a call sends another value
    or null. The overflow is the served base or another adapter: see docs/service-tiers.md. `share_base_cache` is the
    number of each prompt's last tokens that the adapter computes: see docs/concepts.md. A `canary` watches only this
    move.
    """

    version: int | None = None
    targets: list[WeightedVersion] | None = Field(default=None, max_length=64)
    warm: bool = True
    require_eval: EvalDemand | None = None
    canary: CanaryBounds | None = None
    overflow: str | None = Field(default=None, min_length=1, max_length=200, examples=["acme/small"])
    share_base_cache: int | None = Field(default=None, ge=1, le=MAX_SHARE_BASE_CACHE, examples=[256])

    def demand(self) -> RequiredEval | None:
        if "require_eval" not in self.model_fields_set:
            return KEPT
        return None if self.require_eval is None else self.require_eval.demand()

    def named_overflow(self) -> str | None:
        return self.overflow if "overflow" in self.model_fields_set else KEPT_OVERFLOW

    def num_own_tokens(self) -> int | None:
        return self.share_base_cache if "share_base_cache" in self.model_fields_set else KEPT_SHARE

    def weights(self) -> dict[int, int]:
        """The weights by version number. Raises InvalidRequest."""
        if (self.version is None) == (self.targets is None):
            raise InvalidRequest("specify either version or targets", param="targets")
        if self.targets is None:
            assert self.version is not None
            return {self.version: DEFAULT_WEIGHT}
        weights = {target.version: target.weight for target in self.targets}
        if len(weights) < len(self.targets):
            raise InvalidRequest("a version is listed twice", param="targets", code="invalid_targets")
        return weights


class EvalRun(_Body):
    """An eval. `file` is the text of a file of JSON lines. `compare` is the number of another version of the adapter,
    and `judge` the name of a model that the tenant may call. With `share_base_cache`, the version is compared with
    itself behind an alias that has this option, and the divergence is measured.
    """

    name: str = Field(min_length=1, max_length=255, examples=["tickets.jsonl"])
    file: str = Field(
        min_length=1, max_length=MAX_FILE_BYTES, examples=['{"prompt": "2 + 2 =", "contains": "4", "max_tokens": 8}']
    )
    compare: int | None = Field(default=None, ge=1, le=MAX_VERSION)
    share_base_cache: int | None = Field(default=None, ge=1, le=MAX_SHARE_BASE_CACHE, examples=[256])
    judge: str | None = Field(default=None, min_length=1, max_length=MAX_MODEL_NAME)


class BaseWeight(_Body):
    base: str = Field(pattern="^[0-9a-f]{64}$")
    weight: int


class TrafficWeights(_Body):
    """The weights by which requests are divided between bases. An empty list stops the division."""

    weights: list[BaseWeight] = Field(
        max_length=64, examples=[[{"base": "3f9c" * 16, "weight": 90}, {"base": "1b07" * 16, "weight": 10}]]
    )

    def by_base(self) -> dict[str, int]:
        """The weights by the bases' identifiers. Raises InvalidRequest."""
        weights = {one.base: one.weight for one in self.weights}
        if len(weights) < len(self.weights):
            raise InvalidRequest("a base is listed twice", param="weights", code="invalid_weights")
        return weights


class NewWebhook(_Body):
    """A webhook. `types` are the types of events to deliver, or null for all. A tenant's key can omit the `tenant`."""

    url: str = Field(min_length=1, max_length=MAX_URL, examples=["https://hooks.example.com/loramux"])
    tenant: str | None = None
    types: list[EventType] | None = Field(default=None, min_length=1, max_length=16, examples=[["version.ready"]])


class Rollback(_Body):
    """The rollback of an alias. `revision` defaults to the one before the last move."""

    revision: int | None = None
    warm: bool = True


class QuotaSubject(_Body):
    """The subject of a quota: a tenant, a tenant's key or adapter, or, with `scope: platform`, every tenant."""

    scope: Literal["platform", "tenant", "key", "adapter"] | None = None
    tenant: str | None = None
    key: str | None = None
    adapter: str | None = None
    """An adapter's identifier or, with `tenant`, its name."""


class QuotaLimit(QuotaSubject):
    """`burst` defaults to `limit`. `mode` defaults to its current value, or to `hard` for a new quota."""

    metric: str
    limit: int
    burst: int | None = None
    mode: str | None = None


class QuotaChange(QuotaSubject):
    """Changes to a limit. Absent fields stay as they are. The subject and metric, if given, must match the quota."""

    metric: str | None = None
    limit: int | None = None
    burst: int | None = None
    mode: str | None = None


class QuotaQuestion(QuotaSubject):
    """A hypothetical request, checked against the current quotas or, if `quota` is given, with that quota in force.
    `is_batch` says that the request belongs to a batch.
    """

    prompt_tokens: int = Field(ge=0, le=MAX_ASKED_TOKENS)
    max_tokens: int = Field(ge=0, le=MAX_ASKED_TOKENS)
    n: int = Field(default=1, ge=1, le=128)
    is_batch: bool = False
    quota: QuotaLimit | None = None


class PurgeRequest(_Body):
    """A purge. With `dry_run`, the call only tells what it would delete. Otherwise, `confirm` must repeat the name of
    what is purged: `tenant/adapter@version`, `tenant/adapter` or the tenant's slug.
    """

    dry_run: bool = False
    confirm: str | None = None


class NewPrice(_Body):
    """Prices in billionths of the currency (nanos) per million tokens. By default, `cached` equals `prompt`, and the
    price applies once all gateways can have read it. Requests of batches pay `batch_percent` of it, from 0 to 100, and
    requests of the service tiers `flex` and `priority` pay `flex_percent` and `priority_percent`, from 0 to 1000.
    """

    tenant: str | None = None
    scope: str = "all"
    prompt: int
    cached: int | None = None
    completion: int
    batch_percent: int = 100
    flex_percent: int = 100
    priority_percent: int = 100
    currency: str = "USD"
    effective_at: int | None = Field(default=None, ge=0, lt=2**40)


def takes_up_to(num_bytes: int) -> Callable[[R], R]:
    """Let a route's body have more than MAX_BODY_BYTES."""

    def mark(route: R) -> R:
        setattr(route, _MAX_BYTES, num_bytes)
        return route

    return mark


async def body_of(request: Request) -> bytes:
    """Return the request's body. It is read only after the caller has been authorized, and kept for later calls."""
    if not hasattr(request.state, "body"):
        max_bytes = getattr(request.scope.get("endpoint"), _MAX_BYTES, MAX_BODY_BYTES)
        request.state.body = await read_body(request, max_bytes)
    return bytes(request.state.body)


async def read_json(request: Request, kind: type[B]) -> B:
    """The request's body, as one of this module's types."""
    return parse_body(await body_of(request), kind)


async def read_optional_json(request: Request, kind: type[B]) -> B:
    """Like `read_json`, for a type whose fields all have defaults. A request without a body gets the defaults."""
    return parse_body(await body_of(request) or b"{}", kind)
