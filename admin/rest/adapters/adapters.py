"""`/adapters`: create, list and delete adapters, and take them out of service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from typing_extensions import TypedDict

from loramux.adapter_store.registry.records import Adapter, Alias, AliasTarget
from loramux.admin.rest import purging
from loramux.admin.rest.access import (
    Caller,
    Developer,
    PlatformAdmin,
    Reader,
    Services,
    Writer,
    find_tenant,
    tenant_filter,
)
from loramux.admin.rest.adapters.warm_and_drain import drain
from loramux.admin.rest.bodies import NewAdapter, PurgeRequest, read_json
from loramux.admin.rest.listing import ListDocument, Paging, TenantParam, list_document, paged, seconds
from loramux.admin.rest.purging import PurgeDocument
from loramux.admin.rest.services import AdminServices
from loramux.migrations.paging import Page
from loramux.platform.errors import InvalidRequest, NotFound, PermissionDenied
from loramux.platform.requests.openapi import errors, takes

router = APIRouter(prefix="/adapters", tags=["adapters"])


class TargetDocument(TypedDict):
    """A version that an alias points at. Its share of requests is `weight` divided by the sum of all weights."""

    version: int
    weight: int


class AdapterDocument(TypedDict):
    """A tenant's named adapter. `model` is its name in requests."""

    id: str
    object: Literal["adapter"]
    tenant_id: str
    tenant: str
    name: str
    model: str
    state: Literal["active", "disabled"]
    aliases: dict[str, list[TargetDocument]]
    created_at: int


class DisabledAdapter(AdapterDocument):
    """An adapter taken out of service. `drained` means that no request is still running on the adapter."""

    drained: bool


@router.post("", status_code=201, openapi_extra=takes(NewAdapter))
async def create_adapter(request: Request, services: Services, caller: Developer) -> AdapterDocument:
    """Create an adapter without versions."""
    if caller.principal.adapter_ids is not None:
        raise PermissionDenied("this key is restricted to certain adapters and cannot create others")
    body = await read_json(request, NewAdapter)
    tenant = await find_tenant(services, caller, body.tenant)
    return describe_adapter(await services.call(services.adapters.registry.create_adapter, tenant.id, body.name), {})


@router.get("")
@paged
async def list_adapters(
    services: Services,
    caller: Reader,
    paging: Paging,
    tenant: TenantParam = None,
    name: Annotated[str | None, Query(max_length=63, description="Needs tenant.")] = None,
) -> ListDocument[AdapterDocument]:
    """List adapters with the versions that their aliases point at."""
    tenant_id = await tenant_filter(services, caller, tenant)
    if name is None:
        only = caller.principal.adapter_ids
        page = await services.call(services.adapters.registry.list_adapters, tenant_id, *paging, only)
    elif tenant_id is None:
        raise InvalidRequest("names are looked up within one tenant: specify tenant as well", param="tenant")
    else:
        found = await services.call(services.adapters.registry.find_adapter, tenant_id, name)
        is_seen = found is not None and caller.may_see_adapter(found.tenant_id, found.id)
        page = Page((found,) if found is not None and is_seen else (), False)
    aliases = await services.call(services.adapters.aliases.of, [adapter.id for adapter in page.data])
    return list_document(page, lambda adapter: describe_adapter(adapter, aliases[adapter.id]))


@router.get("/{adapter_id}")
async def get_adapter(adapter_id: str, services: Services, caller: Reader) -> AdapterDocument:
    """Get one adapter with the versions that its aliases point at."""
    adapter = await find_adapter(services, caller, adapter_id)
    return await _described(services, adapter)


@router.post("/{adapter_id}/disable")
async def disable_adapter(adapter_id: str, services: Services, caller: Writer) -> DisabledAdapter:
    """Take an adapter out of service. Running requests finish. Nothing is deleted. `enable` undoes the call."""
    adapter = await find_adapter(services, caller, adapter_id)
    disabled = await services.call(services.adapters.version_states.set_disabled, adapter.id, True)
    is_drained = await drain(services, adapter.id)
    return {**await _described(services, disabled), "drained": is_drained}


@router.post("/{adapter_id}/enable")
async def enable_adapter(adapter_id: str, services: Services, caller: Writer) -> AdapterDocument:
    """Put an adapter back into service with its former versions and aliases."""
    adapter = await find_adapter(services, caller, adapter_id)
    return await _described(
        services, await services.call(services.adapters.version_states.set_disabled, adapter.id, False)
    )


@router.delete("/{adapter_id}", status_code=204, responses=errors(409))
async def delete_adapter(adapter_id: str, services: Services, caller: Writer) -> Response:
    """Delete an adapter that never had a version. `disable` takes any other adapter out of service."""
    adapter = await find_adapter(services, caller, adapter_id)
    await services.call(services.adapters.registry.delete_adapter, adapter.id)
    return Response(status_code=204)


@router.post("/{adapter_id}/purge", openapi_extra=takes(PurgeRequest), responses=errors(409))
async def purge_adapter(adapter_id: str, request: Request, services: Services, caller: PlatformAdmin) -> PurgeDocument:
    """Purge an adapter with its versions, aliases, grants, quotas and uploads. This cannot be undone.

    The adapter is taken out of service, and running requests finish first. If requests are still running after ten
    seconds, the call fails with `requests_running`. The ledger keeps the adapter's usage. A new adapter of that name
    continues the version numbers.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    return await purging.purge_adapter(services, adapter, await read_json(request, PurgeRequest))


async def find_adapter(services: AdminServices, caller: Caller, adapter_id: str) -> Adapter:
    """Find an adapter. Raises the same NotFound whether the adapter is hidden or missing."""
    adapter = await services.call(services.adapters.registry.get_adapter, adapter_id)
    if adapter is None or not caller.may_see_adapter(adapter.tenant_id, adapter.id):
        raise NotFound("there is no such adapter", code="adapter_not_found")
    return adapter


async def _described(services: AdminServices, adapter: Adapter) -> AdapterDocument:
    return describe_adapter(adapter, (await services.call(services.adapters.aliases.of, [adapter.id]))[adapter.id])


def describe_targets(targets: Sequence[AliasTarget]) -> list[TargetDocument]:
    return [{"version": target.number, "weight": target.weight} for target in targets]


def describe_adapter(adapter: Adapter, aliases: Mapping[str, Alias]) -> AdapterDocument:
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
