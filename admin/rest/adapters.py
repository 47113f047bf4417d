"""`/adapters`: adapters, and taking them out of service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request

from loramux.adapter_store.records import Adapter, Alias, AliasTarget
from loramux.admin.rest.access import Caller, Reader, Services, Writer, find_tenant, tenant_filter
from loramux.admin.rest.bodies import NewAdapter, read_json
from loramux.admin.rest.listing import (
    After,
    Before,
    Document,
    Limit,
    ListDocument,
    TenantParam,
    list_document,
    seconds,
)
from loramux.admin.rest.warm_and_drain import drain
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
) -> ListDocument[Document]:
    """List adapters with the versions that their aliases name."""
    tenant_id = await tenant_filter(services, caller, tenant)
    if name is None:
        page = await services.call(services.registry.list_adapters, tenant_id, limit, after, before)
    elif tenant_id is None:
        raise InvalidRequest("a name is looked up within one tenant: give tenant as well", param="tenant")
    else:
        found = await services.call(services.registry.find_adapter, tenant_id, name)
        page = Page(() if found is None else (found,), False)
    aliases = await services.call(services.aliases.of, [adapter.id for adapter in page.data])
    return list_document(page, lambda adapter: describe_adapter(adapter, aliases[adapter.id]))


@router.get("/{adapter_id}")
async def get_adapter(adapter_id: str, services: Services, caller: Reader) -> Document:
    """One adapter with the versions that its aliases name."""
    adapter = await find_adapter(services, caller, adapter_id)
    return await _described(services, adapter)


@router.post("/{adapter_id}/disable")
async def disable_adapter(adapter_id: str, services: Services, caller: Writer) -> Document:
    """Answer no new request for the adapter; running ones finish. Nothing is deleted: see `enable`."""
    adapter = await find_adapter(services, caller, adapter_id)
    disabled = await services.call(services.version_states.set_disabled, adapter.id, True)
    is_drained = await drain(services, await services.call(services.version_states.unserved_digests, adapter.id))
    return {**await _described(services, disabled), "drained": is_drained}


@router.post("/{adapter_id}/enable")
async def enable_adapter(adapter_id: str, services: Services, caller: Writer) -> Document:
    """Answer requests again, with the versions and aliases that there were."""
    adapter = await find_adapter(services, caller, adapter_id)
    return await _described(services, await services.call(services.version_states.set_disabled, adapter.id, False))


async def find_adapter(services: AdminServices, caller: Caller, adapter_id: str) -> Adapter:
    """The adapter; one of a tenant that the caller may not see is as unknown as one that does not exist."""
    adapter = await services.call(services.registry.get_adapter, adapter_id)
    if adapter is None or not caller.may_see(adapter.tenant_id):
        raise NotFound("there is no such adapter", code="adapter_not_found")
    return adapter


async def _described(services: AdminServices, adapter: Adapter) -> Document:
    return describe_adapter(adapter, (await services.call(services.aliases.of, [adapter.id]))[adapter.id])


def describe_targets(targets: Sequence[AliasTarget]) -> list[Document]:
    return [{"version": target.number, "weight": target.weight} for target in targets]


def describe_adapter(adapter: Adapter, aliases: Mapping[str, Alias]) -> Document:
    return {
        "id": adapter.id,
        "object": "adapter",
        "tenant_id": adapter.tenant_id,
        "tenant": adapter.tenant_slug,
        "name": adapter.name,
        "model": f"{adapter.tenant_slug}/{adapter.name}",
        "state": "active" if adapter.disabled_us is None else "disabled",
        "aliases": {name: describe_targets(alias.targets) for name, alias in aliases.items()},
        "created_at": seconds(adapter.created_us),
    }
