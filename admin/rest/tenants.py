"""`/tenants`: the accounts that own adapters and keys."""

from __future__ import annotations

from fastapi import APIRouter, Request

from loramux.admin.rest.access import PlatformAdmin, Reader, Services, find_tenant
from loramux.admin.rest.bodies import NewTenant, TenantChange, read_json
from loramux.admin.rest.listing import After, Before, Document, Limit, ListDocument, list_document, seconds
from loramux.migrations.paging import Page
from loramux.platform.tenants import Tenant

router = APIRouter(prefix="/tenants")


@router.post("", status_code=201)
async def create_tenant(request: Request, services: Services, caller: PlatformAdmin) -> Document:
    """Make a tenant."""
    body = await read_json(request, NewTenant)
    return describe_tenant(await services.call(services.tenants.create, body.slug, body.display_name, body.timezone))


@router.get("")
async def list_tenants(
    services: Services, caller: Reader, limit: Limit = 20, after: After = None, before: Before = None
) -> ListDocument[Document]:
    """List the tenants that the caller may see."""
    own = caller.principal.tenant_id
    if own is not None:
        return list_document(Page((await find_tenant(services, caller, own),), False), describe_tenant)
    return list_document(await services.call(services.tenants.list, limit, after, before), describe_tenant)


@router.get("/{id_or_slug}")
async def get_tenant(id_or_slug: str, services: Services, caller: Reader) -> Document:
    """One tenant."""
    return describe_tenant(await find_tenant(services, caller, id_or_slug))


@router.patch("/{id_or_slug}")
async def change_tenant(id_or_slug: str, request: Request, services: Services, caller: PlatformAdmin) -> Document:
    """Change where a tenant's days and months begin; its budgets start on new windows at once."""
    body = await read_json(request, TenantChange)
    tenant = await find_tenant(services, caller, id_or_slug)
    return describe_tenant(await services.call(services.tenants.set_timezone, tenant.id, body.timezone))


def describe_tenant(tenant: Tenant) -> Document:
    return {
        "id": tenant.id,
        "object": "tenant",
        "slug": tenant.slug,
        "display_name": tenant.display_name,
        "state": tenant.state,
        "weight": tenant.weight,
        "timezone": tenant.timezone,
        "created_at": seconds(tenant.created_us),
    }
