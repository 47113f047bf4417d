"""`/quotas`: what a tenant may use, one limit a metric."""

from __future__ import annotations

from fastapi import APIRouter, Request

from loramux.admin.rest.access import PlatformAdmin, Reader, Services, find_tenant, tenant_filter
from loramux.admin.rest.bodies import QuotaLimit, read_json
from loramux.admin.rest.listing import (
    After,
    Before,
    Document,
    Limit,
    ListDocument,
    TenantParam,
    check_identifier,
    list_document,
    seconds,
)
from loramux.platform.errors import NotFound
from loramux.platform.quotas import QuotaPolicy

router = APIRouter(prefix="/quotas")


@router.post("")
async def set_quota(request: Request, services: Services, caller: PlatformAdmin) -> Document:
    """Set a tenant's limit for a metric, in place of the one that it had."""
    body = await read_json(request, QuotaLimit)
    tenant = await find_tenant(services, caller, body.tenant)
    return describe_quota(await services.call(services.quotas.set, tenant.id, body.metric, body.limit, body.burst))


@router.get("")
async def list_quotas(
    services: Services,
    caller: Reader,
    tenant: TenantParam = None,
    limit: Limit = 20,
    after: After = None,
    before: Before = None,
) -> ListDocument[Document]:
    """List limits; a metric without one is unlimited."""
    tenant_id = await tenant_filter(services, caller, tenant)
    return list_document(await services.call(services.quotas.list, tenant_id, limit, after, before), describe_quota)


@router.delete("/{quota_id}")
async def delete_quota(quota_id: str, services: Services, caller: PlatformAdmin) -> Document:
    """Lift a limit."""
    if not await services.call(services.quotas.delete, check_identifier(quota_id, "quota")):
        raise NotFound("there is no such quota", code="quota_not_found")
    return {"id": quota_id, "object": "quota", "deleted": True}


def describe_quota(policy: QuotaPolicy) -> Document:
    return {
        "id": policy.id,
        "object": "quota",
        "tenant_id": policy.tenant_id,
        "metric": policy.metric,
        "limit": policy.limit,
        "burst": policy.burst,
        "created_at": seconds(policy.created_us),
        "updated_at": seconds(policy.updated_us),
    }
