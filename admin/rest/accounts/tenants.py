"""`/tenants`: the accounts that own adapters and keys."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from loramux.admin.rest import purging
from loramux.admin.rest.access import PlatformAdmin, Reader, Services, Writer, find_tenant
from loramux.admin.rest.bodies import NewTenant, PurgeRequest, TenantPatch, read_json
from loramux.admin.rest.etags import IfMatch, tagged
from loramux.admin.rest.listing import ListDocument, Paging, list_document, paged, seconds
from loramux.admin.rest.purging import PurgeDocument
from loramux.migrations.paging import Page
from loramux.platform.accounts.tenants import Tenant, TenantChanges
from loramux.platform.errors import NotFound, PermissionDenied
from loramux.platform.requests.openapi import errors, takes

router = APIRouter(prefix="/tenants", tags=["tenants"])


class TenantDocument(TypedDict):
    """One account. `weight` is its relative share in fair scheduling. The keys of a suspended tenant are refused.

    In an engine's host memory, other tenants cannot evict this tenant's adapters below `host_floor_bytes`. If the
    floors of all tenants do not fit, those of the tenants that sent requests first take precedence. A floor makes room
    for others once its tenant has sent no request for an hour.

    Responses, chat completions and conversations are stored for `response_days` days. If it is 0, they are not stored.

    A request that names no service tier gets `default_service_tier`. No request gets a better tier than
    `max_service_tier`.
    """

    id: str
    object: Literal["tenant"]
    slug: str
    display_name: str
    state: Literal["active", "suspended"]
    weight: int
    timezone: str
    host_floor_bytes: int
    response_days: int
    max_service_tier: str
    default_service_tier: str
    created_at: int


@router.post("", status_code=201, openapi_extra=takes(NewTenant))
async def create_tenant(
    request: Request, response: Response, services: Services, caller: PlatformAdmin
) -> TenantDocument:
    """Create a tenant."""
    body = await read_json(request, NewTenant)
    return tagged(
        response,
        describe_tenant(
            await services.call(services.accounts.tenants.create, body.slug, body.display_name, body.timezone)
        ),
    )


@router.get("")
@paged
async def list_tenants(services: Services, caller: Reader, paging: Paging) -> ListDocument[TenantDocument]:
    """List the tenants that the caller may see, newest first."""
    own = caller.principal.tenant_id
    if own is not None:
        return list_document(Page((await find_tenant(services, caller, own),), False), describe_tenant)
    return list_document(await services.call(services.accounts.tenants.list, *paging), describe_tenant)


@router.get("/{id_or_slug}")
async def get_tenant(id_or_slug: str, response: Response, services: Services, caller: Reader) -> TenantDocument:
    """Get one tenant."""
    return tagged(response, describe_tenant(await find_tenant(services, caller, id_or_slug)))


@router.patch("/{id_or_slug}", openapi_extra=takes(TenantPatch))
async def change_tenant(
    id_or_slug: str, request: Request, response: Response, services: Services, caller: Writer, if_match: IfMatch
) -> TenantDocument:
    """Change a tenant's display name, weight, state, host memory floor, time zone, storage of answers or service
    tiers.

    In the state `suspended`, the tenant's keys are refused, immediately by this server and within five seconds by other
    gateways. Running requests finish, and no data is deleted. A new time zone starts new budget windows immediately. A
    tenant's own administrator may change only the display name.
    """
    tenant = await find_tenant(services, caller, id_or_slug)
    body = await read_json(request, TenantPatch)
    own = body.model_copy(update={"display_name": None})
    if caller.principal.tenant_id is not None and own != TenantPatch():
        raise PermissionDenied("only a platform administrator may change more than a tenant's display name")
    changes = TenantChanges(**body.model_dump())
    changed = await services.call(
        services.accounts.tenants.update, tenant.id, changes, if_match.check_by(describe_tenant)
    )
    if changed is None:
        raise NotFound("there is no such tenant", param="tenant", code="tenant_not_found")
    if body.state is not None:
        services.accounts.api_keys.forget_recent()
    return tagged(response, describe_tenant(changed))


@router.delete("/{id_or_slug}", status_code=204, responses=errors(409))
async def delete_tenant(id_or_slug: str, services: Services, caller: PlatformAdmin) -> Response:
    """Delete a tenant created by mistake.

    A tenant with adapters, unrevoked keys, prices or usage can only be suspended, and then purged.
    """
    tenant = await find_tenant(services, caller, id_or_slug)
    await services.call(services.accounts.tenants.delete, tenant.id)
    return Response(status_code=204)


@router.post("/{id_or_slug}/purge", openapi_extra=takes(PurgeRequest), responses=errors(409))
async def purge_tenant(id_or_slug: str, request: Request, services: Services, caller: PlatformAdmin) -> PurgeDocument:
    """Purge a suspended tenant with its adapters, keys, quotas, prices and requests. This cannot be undone.

    Running requests are cancelled first. If some are still running after ten seconds, the call fails with
    `requests_running`. The ledger keeps only sums, without the names of end users, and the audit log keeps its entries.
    A call that fails or is interrupted can be repeated. The slug can be used again.
    """
    tenant = await find_tenant(services, caller, id_or_slug)
    return await purging.purge_tenant(services, tenant, await read_json(request, PurgeRequest))


def describe_tenant(tenant: Tenant) -> TenantDocument:
    return {
        "id": tenant.id,
        "object": "tenant",
        "slug": tenant.slug,
        "display_name": tenant.display_name,
        "state": "active" if tenant.state == "active" else "suspended",
        "weight": tenant.weight,
        "timezone": tenant.timezone,
        "host_floor_bytes": tenant.host_floor_bytes,
        "response_days": tenant.response_days,
        "max_service_tier": tenant.max_service_tier,
        "default_service_tier": tenant.default_service_tier,
        "created_at": seconds(tenant.created_us),
    }
