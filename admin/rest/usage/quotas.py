"""`/quotas`: limits for tenants, keys and adapters, their effective values, and checks of hypothetical requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from typing_extensions import TypedDict

from loramux.admin.rest.access import (
    Caller,
    PlatformAdmin,
    Reader,
    Services,
    find_tenant,
    known_names,
    tenant_filter,
)
from loramux.admin.rest.bodies import QuotaChange, QuotaLimit, QuotaQuestion, QuotaSubject, read_json
from loramux.admin.rest.etags import IfMatch, tagged
from loramux.admin.rest.listing import (
    DeletedDocument,
    ListDocument,
    Paging,
    TenantParam,
    check_identifier,
    list_document,
    paged,
    seconds,
    whole_list,
)
from loramux.admin.rest.services import AdminServices
from loramux.admin.rest.usage.quota_subjects import caller_of, subject_of
from loramux.platform.errors import ApiError, InvalidRequest, NotFound, PermissionDenied
from loramux.platform.quotas.decisions import PolicyVerdict
from loramux.platform.quotas.metrics import METRICS
from loramux.platform.quotas.overview import EffectiveLimit
from loramux.platform.quotas.policies import QuotaPolicy
from loramux.platform.requests.openapi import takes

router = APIRouter(prefix="/quotas", tags=["quotas"])

Named = Annotated[str | None, Query(max_length=64)]


class QuotaDocument(TypedDict):
    """One limit, in `unit`: amounts of money are in nanos, billionths of the currency. `subject_id` is the ID of the
    limited tenant, key or adapter, or `platform`, and `subject` is its name.
    """

    id: str
    object: Literal["quota"]
    scope: str
    subject_id: str | None
    subject: str
    tenant_id: str | None
    tenant: str | None
    metric: str
    unit: str
    mode: str
    limit: int
    burst: int
    created_at: int
    updated_at: int


class LimitDocument(QuotaDocument):
    """A limit with its current use."""

    is_inherited: bool
    used: int
    reserved: int
    remaining: int
    is_exceeded: bool
    num_exceeded: int
    window_start: int | None
    window_end: int | None
    reset_at: int | None


class EffectiveLimits(ListDocument[LimitDocument]):
    """All limits that apply to a caller."""

    tenant_id: str | None
    key_id: str | None
    adapter_id: str | None


class VerdictDocument(TypedDict):
    """One limit's decision on a request."""

    policy_id: str
    scope: str
    metric: str
    unit: str
    mode: str
    limit: int
    cost: int
    remaining: int
    admits: bool
    is_too_large: bool
    wait_s: float


class RefusalDocument(TypedDict):
    """The error that the request would get."""

    message: str
    type: str
    param: str | None
    code: str


class QuotaCheckDocument(TypedDict):
    """The limits' decisions on a request, and the status and error that the request would get."""

    object: Literal["quota.check"]
    is_admitted: bool
    status: int
    error: RefusalDocument | None
    policy_id: str | None
    retry_after: str | None
    verdicts: list[VerdictDocument]


@router.post("", openapi_extra=takes(QuotaLimit))
async def set_quota(request: Request, services: Services, caller: PlatformAdmin) -> QuotaDocument:
    """Set a metric's limit for a tenant, a key, an adapter or the platform. This replaces any earlier limit."""
    return await _set(services, caller, await read_json(request, QuotaLimit))


@router.put("/tenants/{tenant}/{metric}", openapi_extra=takes(QuotaChange))
async def put_quota(
    tenant: str, metric: str, request: Request, services: Services, caller: PlatformAdmin
) -> QuotaDocument:
    """Set a tenant's limit for a metric. A tenant or metric in the body must match the path.

    The call creates or replaces the whole limit, so it needs no If-Match.
    """
    body = await read_json(request, QuotaChange)
    owner = await find_tenant(services, caller, tenant)
    if body.tenant not in (None, owner.id, owner.slug):
        raise InvalidRequest("tenant does not match the path", param="tenant")
    if body.metric not in (None, metric):
        raise InvalidRequest("metric does not match the path", param="metric")
    if body.limit is None:
        raise InvalidRequest("limit is required", param="limit", code="missing_required_parameter")
    _refuse_others(body)
    policy = await services.call(services.usage.quotas.set, owner.id, metric, body.limit, body.burst, body.mode)
    return describe_quota(policy, await _names(services, caller, [policy]))


@router.get("")
@paged
async def list_quotas(
    services: Services, caller: Reader, paging: Paging, tenant: TenantParam = None
) -> ListDocument[QuotaDocument]:
    """List the limits for a tenant, its keys and its adapters, or all limits, including the platform's. A key that is
    restricted to adapters sees only its own limits and its adapters' limits.
    """
    tenant_id = await tenant_filter(services, caller, tenant)
    page = await services.call(services.usage.quotas.list, tenant_id, *paging, caller.subject_ids)
    names = await _names(services, caller, page.data)
    return list_document(page, lambda policy: describe_quota(policy, names))


@router.get("/effective")
async def effective_quotas(
    services: Services, caller: Reader, tenant: Named = None, key: Named = None, adapter: Named = None
) -> EffectiveLimits:
    """List the limits that apply to a tenant, to one of its keys or to requests for an adapter, with their current use.

    A key that is restricted to adapters sees only its own limits and its adapters' limits.
    """
    asked = QuotaSubject(tenant=tenant or caller.principal.tenant_id, key=key, adapter=adapter)
    who = await caller_of(services, caller, asked)
    limits = await services.call(services.usage.quota_overview.effective, who)
    names = await _names(services, caller, [limit.policy for limit in limits])
    return {
        **whole_list([describe_limit(limit, names) for limit in limits if _may_see(caller, limit.policy)]),
        "tenant_id": who.tenant_id,
        "key_id": who.key_id,
        "adapter_id": who.adapter_id,
    }


@router.post("/check", openapi_extra=takes(QuotaQuestion))
async def check_quotas(request: Request, services: Services, caller: Reader) -> QuotaCheckDocument:
    """Check whether a request would be admitted now or, with `quota`, if that limit were in force. Nothing is run or
    reserved.

    A key that is restricted to adapters cannot make this call, because the result depends on the whole tenant's usage.
    """
    if caller.adapter_ids is not None:
        raise PermissionDenied("this key is restricted to certain adapters and cannot check its tenant's limits")
    body = await read_json(request, QuotaQuestion)
    if body.tenant is None and caller.principal.tenant_id is not None:
        body = body.model_copy(update={"tenant": caller.principal.tenant_id})
    who = await caller_of(services, caller, body)
    trial = None
    if (wanted := body.quota) is not None:
        subject_id = await subject_of(services, caller, wanted)
        trial = await services.call(
            services.usage.quotas.propose, subject_id, wanted.metric, wanted.limit, wanted.burst, wanted.mode
        )
    is_batch = body.is_batch or (trial is not None and METRICS[trial.metric].is_for_batches)
    answer = await services.call(
        services.usage.quota_overview.check,
        replace(who, is_batch=is_batch),
        prompt_tokens=body.prompt_tokens,
        completion_tokens=body.n * body.max_tokens,
        trial=trial,
    )
    refusal = answer.refusal
    return {
        "object": "quota.check",
        "is_admitted": refusal is None,
        "status": 200 if refusal is None else refusal.status,
        "error": None if refusal is None else _describe_refusal(refusal),
        "policy_id": None if refusal is None else refusal.policy.id,
        "retry_after": None if refusal is None else refusal.response_headers().get("retry-after"),
        "verdicts": [_describe_verdict(verdict) for verdict in answer.verdicts],
    }


@router.get("/{quota_id}")
async def get_quota(quota_id: str, response: Response, services: Services, caller: Reader) -> QuotaDocument:
    """Get one limit."""
    policy = await _find(services, caller, quota_id)
    return tagged(response, describe_quota(policy, await _names(services, caller, [policy])))


@router.patch("/{quota_id}", openapi_extra=takes(QuotaChange))
async def change_quota(
    quota_id: str, request: Request, response: Response, services: Services, caller: PlatformAdmin, if_match: IfMatch
) -> QuotaDocument:
    """Change a limit, its burst or its mode."""
    body = await read_json(request, QuotaChange)
    policy = await _find(services, caller, quota_id)
    if body.metric not in (None, policy.metric):
        raise InvalidRequest("a quota's metric cannot change: create another quota", param="metric")
    if body.tenant is not None and (await find_tenant(services, caller, body.tenant)).id != policy.tenant_id:
        raise InvalidRequest("the quota belongs to another tenant", param="tenant")
    _refuse_others(body)
    names = await _names(services, caller, [policy])

    def check(current: QuotaPolicy) -> None:
        if_match.check(describe_quota(current, names))

    changed = await services.call(services.usage.quotas.change, policy.id, body.limit, body.burst, body.mode, check)
    return tagged(response, describe_quota(changed, names))


@router.delete("/{quota_id}")
async def delete_quota(quota_id: str, services: Services, caller: PlatformAdmin) -> DeletedDocument:
    """Delete a limit."""
    if not await services.call(services.usage.quotas.delete, check_identifier(quota_id, "quota")):
        raise NotFound("there is no such quota", code="quota_not_found")
    return {"id": quota_id, "object": "quota", "deleted": True}


def describe_quota(policy: QuotaPolicy, names: Mapping[str, str]) -> QuotaDocument:
    return {
        "id": policy.id,
        "object": "quota",
        "scope": policy.scope,
        "subject_id": policy.subject_id,
        "subject": names.get(policy.subject_id, policy.subject_id),
        "tenant_id": policy.tenant_id,
        "tenant": None if policy.tenant_id is None else names.get(policy.tenant_id, policy.tenant_id),
        "metric": policy.metric,
        "unit": str(METRICS[policy.metric].unit),
        "mode": policy.mode,
        "limit": policy.limit,
        "burst": policy.burst,
        "created_at": seconds(policy.created_us),
        "updated_at": seconds(policy.updated_us),
    }


def describe_limit(limit: EffectiveLimit, names: Mapping[str, str]) -> LimitDocument:
    window = limit.window
    return {
        **describe_quota(limit.policy, names),
        "is_inherited": limit.is_inherited,
        "used": limit.used,
        "reserved": limit.reserved,
        "remaining": limit.remaining,
        "is_exceeded": limit.remaining == 0,
        "num_exceeded": limit.num_exceeded,
        "window_start": None if window is None else seconds(window.start_us),
        "window_end": None if window is None else seconds(window.end_us),
        "reset_at": None if limit.reset_us is None else -(-limit.reset_us // 1_000_000),
    }


def _describe_refusal(refusal: ApiError) -> RefusalDocument:
    return {"message": refusal.message, "type": refusal.type, "param": refusal.param, "code": refusal.code}


def _describe_verdict(verdict: PolicyVerdict) -> VerdictDocument:
    policy = verdict.binding.policy
    return {
        "policy_id": policy.id,
        "scope": policy.scope,
        "metric": policy.metric,
        "unit": str(METRICS[policy.metric].unit),
        "mode": policy.mode,
        "limit": policy.limit,
        "cost": verdict.cost,
        "remaining": verdict.binding.remaining(verdict.counter),
        "admits": verdict.wait_us == 0,
        "is_too_large": verdict.never_admits,
        "wait_s": verdict.wait_us / 1_000_000,
    }


async def _set(services: AdminServices, caller: Caller, body: QuotaLimit) -> QuotaDocument:
    subject_id = await subject_of(services, caller, body)
    policy = await services.call(services.usage.quotas.set, subject_id, body.metric, body.limit, body.burst, body.mode)
    return describe_quota(policy, await _names(services, caller, [policy]))


async def _names(services: AdminServices, caller: Caller, policies: Iterable[QuotaPolicy]) -> Mapping[str, str]:
    ids = [one for policy in policies for one in (policy.subject_id, policy.tenant_id)]
    return await known_names(services, caller, ids)


async def _find(services: AdminServices, caller: Caller, quota_id: str) -> QuotaPolicy:
    policy = await services.call(services.usage.quotas.get, check_identifier(quota_id, "quota"))
    if policy is None or not caller.may_see(policy.tenant_id) or not _may_see(caller, policy):
        raise NotFound("there is no such quota", code="quota_not_found")
    return policy


def _may_see(caller: Caller, policy: QuotaPolicy) -> bool:
    """Return whether the caller can see the policy. A key that is restricted to adapters sees only the policies for
    itself and its adapters.
    """
    return caller.subject_ids is None or policy.subject_id in caller.subject_ids


def _refuse_others(body: QuotaSubject) -> None:
    for name in ("scope", "key", "adapter"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} must not be set: the path determines it", param=name)
