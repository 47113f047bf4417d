"""Finds the tenant, key or adapter that a request body names, and refuses contradictory combinations."""

from __future__ import annotations

from loramux.admin.rest.access import Caller, find_tenant
from loramux.admin.rest.bodies import QuotaSubject
from loramux.admin.rest.services import AdminServices
from loramux.platform.errors import InvalidRequest, NotFound
from loramux.platform.quotas.overview import QuotaCaller
from loramux.platform.quotas.policies import PLATFORM


async def subject_of(services: AdminServices, caller: Caller, body: QuotaSubject) -> str:
    named = [name for name in ("key", "adapter") if getattr(body, name) is not None]
    scope = body.scope or (named[0] if named else "tenant")
    for name in named:
        if name != scope:
            raise InvalidRequest(f"a {scope} quota has no {name}", param=name)
    if scope == PLATFORM:
        if caller.principal.tenant_id is not None:
            raise NotFound("there is no such quota", param="scope", code="quota_not_found")
        if body.tenant is not None:
            raise InvalidRequest("a platform quota has no tenant", param="tenant")
        return PLATFORM
    if scope != "tenant" and not named:
        raise InvalidRequest(f"{scope} is required", param=scope, code="missing_required_parameter")
    tenant_id = None
    if body.tenant is not None:
        tenant_id = (await find_tenant(services, caller, body.tenant)).id
    if scope == "key":
        return (await _key(services, caller, tenant_id, body.key or ""))[0]
    if scope == "adapter":
        return (await _adapter(services, caller, tenant_id, body.adapter or ""))[0]
    if tenant_id is None:
        raise InvalidRequest("tenant is required", param="tenant", code="missing_required_parameter")
    return tenant_id


async def caller_of(services: AdminServices, caller: Caller, body: QuotaSubject) -> QuotaCaller:
    """Return the caller of a hypothetical request. If the body names no tenant, the caller belongs to the key's tenant
    or, without a key, to the adapter's owner.
    """
    if body.scope is not None:
        raise InvalidRequest("specify a tenant, a key or an adapter", param="scope")
    tenant_id = None
    if body.tenant is not None:
        tenant_id = (await find_tenant(services, caller, body.tenant)).id
    key_id = adapter_id = None
    if body.key is not None:
        key_id, tenant_id = await _key(services, caller, tenant_id, body.key)
    if body.adapter is not None:
        adapter_id, owner_id = await _adapter(services, caller, tenant_id, body.adapter, is_owners=False)
        tenant_id = tenant_id or owner_id
    if tenant_id is None:
        raise InvalidRequest("tenant is required", param="tenant", code="missing_required_parameter")
    return QuotaCaller(tenant_id=tenant_id, key_id=key_id, adapter_id=adapter_id)


async def _key(services: AdminServices, caller: Caller, tenant_id: str | None, key_id: str) -> tuple[str, str]:
    key = (
        await services.call(services.accounts.api_keys.get, key_id)
        if key_id.isascii() and key_id.isprintable()
        else None
    )
    if key is None or key.tenant_id is None or not caller.may_see_key(key.tenant_id, key.id):
        raise NotFound("there is no such key", param="key", code="key_not_found")
    if tenant_id not in (None, key.tenant_id):
        raise InvalidRequest("the key belongs to another tenant", param="tenant")
    return key.id, key.tenant_id


async def _adapter(
    services: AdminServices, caller: Caller, tenant_id: str | None, name: str, is_owners: bool = True
) -> tuple[str, str]:
    """Return the IDs of the adapter and its owner. With `is_owners=False`, the given tenant can also be a grantee."""
    adapter = await services.call(services.adapters.registry.get_adapter, name)
    # If the caller cannot see the adapter, fall back to a lookup by name, as for an unknown identifier.
    is_seen = adapter is not None and caller.may_see(adapter.tenant_id)
    if not is_seen and tenant_id is not None:
        adapter = await services.call(services.adapters.registry.find_adapter, tenant_id, name)
    if adapter is None or not caller.may_see_adapter(adapter.tenant_id, adapter.id):
        raise NotFound("there is no such adapter", param="adapter", code="adapter_not_found")
    if is_owners and tenant_id not in (None, adapter.tenant_id):
        raise InvalidRequest("the adapter belongs to another tenant", param="tenant")
    return adapter.id, adapter.tenant_id
