"""Authenticates callers and limits what each caller can see. Every route declares one of the callers defined here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, cast

from fastapi import Depends, Request

from loramux.adapter_store.registry.registry import SLUG
from loramux.admin.rest import idempotency
from loramux.admin.rest.services import AdminServices
from loramux.migrations.audit import Actor, act_as
from loramux.platform.accounts.names import names_of
from loramux.platform.accounts.principals import Principal
from loramux.platform.accounts.tenants import Tenant
from loramux.platform.errors import NotFound, PermissionDenied, Unauthenticated
from loramux.platform.requests.error_responses import request_id_of

PRINCIPAL = "loramux.principal"
"""ASGI scope key for the principal of the console's in-process calls. HTTP servers never set it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. A platform key sees every tenant. A tenant's key sees only its own tenant."""

    principal: Principal
    release_call_slot: Callable[[], None]
    """Releases the call's slot early, before a route waits for another kind of slot."""

    def may_see(self, tenant_id: str | None) -> bool:
        return self.principal.tenant_id is None or self.principal.tenant_id == tenant_id

    def may_see_adapter(self, tenant_id: str, adapter_id: str | None) -> bool:
        return self.may_see(tenant_id) and self.principal.may_name(adapter_id)

    def may_see_key(self, tenant_id: str | None, key_id: str) -> bool:
        return self.may_see(tenant_id) and (self.adapter_ids is None or key_id == self.principal.key_id)

    @property
    def adapter_ids(self) -> frozenset[str] | None:
        """The adapters that lists are restricted to, or None for all adapters that the caller's scope covers."""
        return self.principal.adapter_ids

    @property
    def key_ids(self) -> frozenset[str] | None:
        """The keys that the caller can see. A restricted key sees only itself. None means every key."""
        return None if self.adapter_ids is None else frozenset({self.principal.key_id})

    @property
    def subject_ids(self) -> frozenset[str] | None:
        """The subjects whose quotas the caller can see: a restricted key and its adapters. None means all subjects."""
        return None if self.adapter_ids is None else self.adapter_ids | {self.principal.key_id}

    @property
    def is_administrator(self) -> bool:
        """True if the caller administers the platform or its own tenant, False for a developer."""
        return not self.principal.scopes.isdisjoint(("platform:admin", "tenant:admin"))


async def services_of(request: Request) -> AdminServices:
    return cast(AdminServices, request.app.state.services)


Services = Annotated[AdminServices, Depends(services_of)]


def require(*scopes: str) -> Callable[[Request, AdminServices], AsyncIterator[Caller]]:
    """Return a dependency that admits keys with one of the scopes: 401 without a valid key, 403 without the scope.

    A tenant's call holds one of the tenant's slots until the route returns or releases the slot. Platform calls need no
    slot.
    """

    async def caller(request: Request, services: Services) -> AsyncIterator[Caller]:
        principal = await _authenticated(request, services)
        with ExitStack() as call_slot:
            if principal.tenant_id is not None:
                call_slot.callback(await services.slots.calls.acquire_slot(principal.tenant_id))
            if principal.scopes.isdisjoint(scopes):
                held = ", ".join(sorted(principal.scopes))
                raise PermissionDenied(f"this requires a key with the scope {' or '.join(scopes)}; this key has {held}")
            # The audit log attributes this call's changes to the principal.
            address = request.client.host if request.client is not None else None
            act_as(Actor(principal.key_id, address, request_id_of(request)))
            await idempotency.begin(request, services, principal.key_id)
            yield Caller(principal, call_slot.close)

    return caller


async def _authenticated(request: Request, services: AdminServices) -> Principal:
    known = request.scope.get(PRINCIPAL)
    if isinstance(known, Principal):
        return known
    kind, _, presented = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not presented.strip():
        raise Unauthenticated("send an administrator's key: Authorization: Bearer KEY", code="missing_api_key")
    principal = await services.call(services.accounts.api_keys.authenticate_bearer, presented.strip())
    if principal is None:
        raise Unauthenticated("the key is unknown, expired or revoked")
    return principal


def _caller(*scopes: str) -> Any:
    # Release the slot when the route returns, because the client may read the response slowly.
    return Depends(require(*scopes), scope="function")


PlatformAdmin = Annotated[Caller, _caller("platform:admin")]
Auditor = Annotated[Caller, _caller("platform:admin", "platform:read", "tenant:admin")]
PlatformReader = Annotated[Caller, _caller("platform:admin", "platform:read")]
Writer = Annotated[Caller, _caller("platform:admin", "tenant:admin")]
Developer = Annotated[Caller, _caller("platform:admin", "tenant:admin", "tenant:develop")]
"""A caller that may push versions. Only a `Writer` may decide which version a bare name selects."""
READER = _caller("platform:admin", "platform:read", "tenant:admin", "tenant:develop", "tenant:read")
Reader = Annotated[Caller, READER]


async def find_tenant(services: AdminServices, caller: Caller, id_or_slug: str) -> Tenant:
    """Find a tenant. Raises the same NotFound whether the tenant is hidden or missing."""
    tenant = await services.call(services.accounts.tenants.get, id_or_slug)
    if tenant is None or not caller.may_see(tenant.id):
        # Only a caller that sees every tenant gets a specific message, and only harmless text is repeated.
        is_named = caller.principal.tenant_id is None and SLUG.fullmatch(id_or_slug)
        missing = f"there is no tenant {id_or_slug!r}" if is_named else "there is no such tenant"
        raise NotFound(missing, param="tenant", code="tenant_not_found")
    return tenant


async def tenant_filter(services: AdminServices, caller: Caller, id_or_slug: str | None) -> str | None:
    """Return the tenant that a list is restricted to: the requested tenant, otherwise the caller's own, or None for all
    tenants.
    """
    if id_or_slug is None:
        return caller.principal.tenant_id
    return (await find_tenant(services, caller, id_or_slug)).id


async def known_names(services: AdminServices, caller: Caller, ids: Iterable[str | None]) -> Mapping[str, str]:
    """Return the names of the objects that the caller may know, by identifier: see `names_of`."""
    return await services.call(names_of, services.database, tuple(ids), caller.principal.tenant_id)
