"""`/api_keys`: make, list and revoke; a secret is answered once, when its key is made."""

from __future__ import annotations

from fastapi import APIRouter, Request

from loramux.admin.rest.access import PlatformAdmin, Reader, Services, find_tenant, tenant_filter
from loramux.admin.rest.bodies import NewKey, read_json
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
from loramux.platform.api_keys import ApiKey
from loramux.platform.errors import NotFound

router = APIRouter(prefix="/api_keys")


@router.post("", status_code=201)
async def create_key(request: Request, services: Services, caller: PlatformAdmin) -> Document:
    """Make a key of a tenant, or of the platform where `tenant` is null."""
    body = await read_json(request, NewKey)
    tenant = None if body.tenant is None else await find_tenant(services, caller, body.tenant)
    expires_us = None
    if body.expires_in_s is not None:
        expires_us = services.database.now_us() + body.expires_in_s * 1_000_000
    created = await services.call(
        services.api_keys.create, tenant.id if tenant else None, body.name, body.scopes, expires_us
    )
    return {**describe_key(created.key), "secret": created.secret}


@router.get("")
async def list_keys(
    services: Services,
    caller: Reader,
    tenant: TenantParam = None,
    limit: Limit = 20,
    after: After = None,
    before: Before = None,
) -> ListDocument[Document]:
    """List a tenant's keys, or the platform's own where no tenant is named."""
    tenant_id = await tenant_filter(services, caller, tenant)
    page = await services.call(services.api_keys.list, tenant_id, limit, after, before)
    return list_document(page, describe_key)


@router.get("/{key_id}")
async def get_key(key_id: str, services: Services, caller: Reader) -> Document:
    """One key, without its secret."""
    key = await services.call(services.api_keys.get, check_identifier(key_id, "api_key"))
    if key is None or not caller.may_see(key.tenant_id):
        raise NotFound("there is no such api_key", code="api_key_not_found")
    return describe_key(key)


@router.delete("/{key_id}")
async def revoke_key(key_id: str, services: Services, caller: PlatformAdmin) -> Document:
    """End a key for good; doing it again changes nothing."""
    key = await services.call(services.api_keys.revoke, check_identifier(key_id, "api_key"))
    if key is None:
        raise NotFound("there is no such api_key", code="api_key_not_found")
    return describe_key(key)


def describe_key(key: ApiKey) -> Document:
    return {
        "id": key.id,
        "object": "api_key",
        "tenant_id": key.tenant_id,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "created_at": seconds(key.created_us),
        "expires_at": seconds(key.expires_us),
        "revoked_at": seconds(key.revoked_us),
    }
