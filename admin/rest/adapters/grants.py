"""`/adapters/{id}/grants`: other tenants that may call an adapter and pay for their own calls."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from loramux.adapter_store.registry.records import Grant
from loramux.admin.rest.access import PlatformAdmin, Reader, Services, Writer, find_tenant
from loramux.admin.rest.adapters.adapters import find_adapter
from loramux.admin.rest.listing import ListDocument, seconds, whole_list

router = APIRouter(prefix="/adapters/{adapter_id}/grants", tags=["grants"])


class GrantDocument(TypedDict):
    """Another tenant that may call an adapter and pays for its own calls."""

    object: Literal["grant"]
    adapter_id: str
    tenant_id: str
    tenant: str
    created_at: int


@router.get("")
async def list_grants(adapter_id: str, services: Services, caller: Reader) -> ListDocument[GrantDocument]:
    """List the tenants that have a grant for the adapter."""
    adapter = await find_adapter(services, caller, adapter_id)
    grants = await services.call(services.adapters.grants.list, adapter.id)
    return whole_list([_describe(grant) for grant in grants])


@router.put("/{tenant}")
async def add_grant(adapter_id: str, tenant: str, services: Services, caller: PlatformAdmin) -> GrantDocument:
    """Let a tenant call the adapter by its full name. That tenant pays for its calls.

    Requires a platform administrator, because a grant names another tenant, and tenants must not learn of each other.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    granted = await find_tenant(services, caller, tenant)
    return _describe(await services.call(services.adapters.grants.add, adapter, granted.id))


@router.delete("/{tenant}", status_code=204)
async def remove_grant(adapter_id: str, tenant: str, services: Services, caller: Writer) -> Response:
    """Revoke a grant. The tenant's next request gets the same 404 as requests from tenants without a grant."""
    adapter = await find_adapter(services, caller, adapter_id)
    await services.call(services.adapters.grants.remove, adapter.id, tenant)
    return Response(status_code=204)


def _describe(grant: Grant) -> GrantDocument:
    return {
        "object": "grant",
        "adapter_id": grant.adapter_id,
        "tenant_id": grant.tenant_id,
        "tenant": grant.tenant_slug,
        "created_at": seconds(grant.created_us),
    }
