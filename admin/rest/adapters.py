"""`/adapters`: adapters, and the aliases that name their versions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from loramux.adapter_store.records import Adapter
from loramux.admin.rest.access import Caller, Reader, Services, Writer, find_tenant, tenant_filter
from loramux.admin.rest.bodies import AliasTarget, NewAdapter, read_json
from loramux.admin.rest.listing import (
    After,
    Before,
    Document,
    Limit,
    TenantParam,
    list_document,
    seconds,
)
from loramux.admin.services import AdminServices
from loramux.migrations.paging import Page
from loramux.platform.errors import InvalidRequest, NotFound

router = APIRouter(prefix="/adapters")


@router.post("", status_code=201)
async def create_adapter(request: Request, services: Services, caller: Writer) -> Document:
    """Make an adapter, which has no version yet."""
    body = await read_json(request, NewAdapter)
    tenant = await find_tenant(services, caller, body.tenant)
    return describe_adapter(await services.call(services.registry.create_adapter, tenant.id, body.name), {})


@router.get("")
async def list_adapters(
    services: Services,
    caller: Reader,
    tenant: TenantParam = None,
    name: Annotated[str | None, Query(max_length=63, description="Needs tenant.")] = None,
    limit: Limit = 20,
    after: After = None,
    before: Before = None,
) -> Document:
    """List adapters with the versions that their aliases name."""
    tenant_id = await tenant_filter(services, caller, tenant)
    if name is None:
        page = await services.call(services.registry.list_adapters, tenant_id, limit, after, before)
    elif tenant_id is None:
        raise InvalidRequest("a name is looked up within one tenant: give tenant as well", param="tenant")
    else:
        found = await services.call(services.registry.find_adapter, tenant_id, name)
        page = Page(() if found is None else (found,), False)
    aliases = await services.call(lambda: {a.id: services.registry.aliases(a.id) for a in page.data})
    return list_document(page, lambda adapter: describe_adapter(adapter, aliases[adapter.id]))


@router.get("/{adapter_id}")
async def get_adapter(adapter_id: str, services: Services, caller: Reader) -> Document:
    """One adapter with the versions that its aliases name."""
    adapter = await find_adapter(services, caller, adapter_id)
    return describe_adapter(adapter, await services.call(services.registry.aliases, adapter.id))


@router.get("/{adapter_id}/aliases")
async def list_aliases(adapter_id: str, services: Services, caller: Reader) -> Document:
    """The version that each alias names."""
    adapter = await find_adapter(services, caller, adapter_id)
    return {"object": "aliases", "data": await services.call(services.registry.aliases, adapter.id)}


@router.put("/{adapter_id}/aliases/{name}")
async def set_alias(adapter_id: str, name: str, request: Request, services: Services, caller: Writer) -> Document:
    """Point an alias at a ready version; running requests finish on the old one."""
    adapter = await find_adapter(services, caller, adapter_id)
    body = await read_json(request, AliasTarget)
    await services.call(services.registry.set_alias, adapter.id, name, body.version)
    return {"object": "alias", "adapter_id": adapter.id, "name": name, "version": body.version}


async def find_adapter(services: AdminServices, caller: Caller, adapter_id: str) -> Adapter:
    """The adapter; one of a tenant that the caller may not see is as unknown as one that does not exist."""
    adapter = await services.call(services.registry.get_adapter, adapter_id)
    if adapter is None or not caller.may_see(adapter.tenant_id):
        raise NotFound("there is no such adapter", code="adapter_not_found")
    return adapter


def describe_adapter(adapter: Adapter, aliases: dict[str, int]) -> Document:
    return {
        "id": adapter.id,
        "object": "adapter",
        "tenant_id": adapter.tenant_id,
        "tenant": adapter.tenant_slug,
        "name": adapter.name,
        "model": f"{adapter.tenant_slug}/{adapter.name}",
        "aliases": aliases,
        "created_at": seconds(adapter.created_us),
    }
