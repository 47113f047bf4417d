"""`/api_keys`: create, list, change, rotate and revoke keys; a secret is returned only when it is created."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from loramux.admin.rest.access import Caller, Reader, Services, Writer, find_tenant, known_names, tenant_filter
from loramux.admin.rest.bodies import KeyPatch, NewKey, Rotation, read_json, read_optional_json
from loramux.admin.rest.etags import IfMatch, tagged
from loramux.admin.rest.listing import (
    ListDocument,
    Paging,
    TenantParam,
    check_identifier,
    list_document,
    paged,
    seconds,
)
from loramux.admin.rest.services import AdminServices
from loramux.platform.accounts.keys import ApiKey, CreatedKey, KeyChanges
from loramux.platform.errors import InvalidRequest, NotFound, PermissionDenied
from loramux.platform.requests.openapi import errors, takes

router = APIRouter(prefix="/api_keys", tags=["api_keys"])


class KeyDocument(TypedDict):
    """One key without its secret.

    `adapters` lists the adapters that the key is restricted to, and `adapter_names` their names. Both are null for all
    adapters that its tenant may call. `tenant` is null for a platform key.
    A service tier is null if the key has that of its tenant.
    Until `previous_secret_expires_at`, the secret that the last rotation replaced is also valid.
    """

    id: str
    object: Literal["api_key"]
    tenant_id: str | None
    tenant: str | None
    name: str
    scopes: list[str]
    adapters: list[str] | None
    adapter_names: list[str] | None
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    previous_secret_expires_at: int | None
    max_service_tier: str | None
    default_service_tier: str | None


class KeyWithSecret(KeyDocument):
    """A key with its new secret, which is null in the response to a repeated call with the same Idempotency-Key."""

    secret: str | None


@router.post("", status_code=201, openapi_extra=takes(NewKey))
async def create_key(request: Request, response: Response, services: Services, caller: Writer) -> KeyWithSecret:
    """Create a tenant's key, or a platform key if `tenant` is null. Its secret appears only in this response.

    A tenant's administrator can create keys for that tenant.
    """
    body = await read_json(request, NewKey)
    if body.tenant is None and caller.principal.tenant_id is not None:
        raise PermissionDenied("only a platform administrator may create a platform key", param="tenant")
    tenant = None if body.tenant is None else await find_tenant(services, caller, body.tenant)
    created = await services.call(
        services.accounts.api_keys.create,
        tenant.id if tenant else None,
        body.name,
        body.scopes,
        _expiry(services, body.expires_in_s),
        body.adapters,
        body.max_service_tier,
        body.default_service_tier,
    )
    return _with_secret(response, created, await _names(services, caller, [created.key]))


@router.get("")
@paged
async def list_keys(
    services: Services, caller: Reader, paging: Paging, tenant: TenantParam = None
) -> ListDocument[KeyDocument]:
    """List a tenant's keys, or the platform's own keys if no tenant is given. Revoked keys are included.

    A key that is restricted to adapters sees only its own entry.
    """
    tenant_id = await tenant_filter(services, caller, tenant)
    page = await services.call(services.accounts.api_keys.list, tenant_id, *paging, caller.key_ids)
    names = await _names(services, caller, page.data)
    return list_document(page, lambda key: describe_key(key, names))


@router.get("/{key_id}")
async def get_key(key_id: str, response: Response, services: Services, caller: Reader) -> KeyDocument:
    """Get one key, without its secret."""
    key = await _find(services, caller, key_id)
    return tagged(response, describe_key(key, await _names(services, caller, [key])))


@router.patch("/{key_id}", openapi_extra=takes(KeyPatch), responses=errors(409))
async def change_key(
    key_id: str, request: Request, response: Response, services: Services, caller: Writer, if_match: IfMatch
) -> KeyDocument:
    """Change a key's name, scopes, expiry, allowed adapters or service tiers.

    Refused for a revoked key, or if the change would leave the platform without an administrator key.
    """
    key = await _find(services, caller, key_id)
    body = await read_json(request, KeyPatch)
    changes = KeyChanges(
        name=body.name,
        scopes=None if body.scopes is None else tuple(body.scopes),
        adapters=None if body.adapters is None else tuple(body.adapters),
        expires_us=_expiry(services, body.expires_in_s),
        max_service_tier=body.max_service_tier,
        default_service_tier=body.default_service_tier,
    )
    # Names never change, so the names of the adapters before the change complete the document that the caller read.
    names = await _names(services, caller, [key])

    def check(current: ApiKey) -> None:
        if_match.check(describe_key(current, names))

    changed = _found(await services.call(services.accounts.api_keys.update, key.id, changes, check))
    return tagged(response, describe_key(changed, await _names(services, caller, [changed])))


@router.post("/{key_id}/rotate", openapi_extra=takes(Rotation))
async def rotate_key(
    key_id: str, request: Request, response: Response, services: Services, caller: Writer
) -> KeyWithSecret:
    """Give a key a new secret, which appears only in this response. The old secret stays valid for `grace_s` seconds.

    Any older secret still in its grace period becomes invalid immediately. No body is needed. If the answer to a
    rotation was lost, rotate again with `keep_previous` and without `grace_s`: this replaces the lost secret, and the
    secret before it keeps its grace period. Refused with `no_previous_secret` if there is none, or if the key was not
    rotated within the last hour: the call was then lost, not its answer, and the current secret is in use.
    """
    key = await _find(services, caller, key_id)
    body = await read_optional_json(request, Rotation)
    if body.keep_previous and "grace_s" in body.model_fields_set:
        raise InvalidRequest("keep_previous keeps the old secret's grace period: leave out grace_s", param="grace_s")
    rotate = services.accounts.api_keys.rotate
    rotated = await services.call(rotate, key.id, body.grace_s * 1_000_000, body.keep_previous)
    if rotated is None:
        raise _unknown()
    return _with_secret(response, rotated, await _names(services, caller, [rotated.key]))


@router.delete("/{key_id}", responses=errors(409))
async def revoke_key(key_id: str, services: Services, caller: Writer) -> KeyDocument:
    """Revoke a key permanently. A repeated call changes nothing. The platform's last administrator key cannot be
    revoked.
    """
    key = await _find(services, caller, key_id)
    revoked = _found(await services.call(services.accounts.api_keys.revoke, key.id))
    return describe_key(revoked, await _names(services, caller, [revoked]))


async def _find(services: AdminServices, caller: Caller, key_id: str) -> ApiKey:
    key = _found(await services.call(services.accounts.api_keys.get, check_identifier(key_id, "api_key")))
    if not caller.may_see_key(key.tenant_id, key.id):
        raise _unknown()
    return key


def _found(key: ApiKey | None) -> ApiKey:
    if key is None:
        raise _unknown()
    return key


def _unknown() -> NotFound:
    return NotFound("there is no such API key", code="api_key_not_found")


def _expiry(services: AdminServices, expires_in_s: int | None) -> int | None:
    return None if expires_in_s is None else services.database.now_us() + expires_in_s * 1_000_000


def _with_secret(response: Response, created: CreatedKey, names: Mapping[str, str]) -> KeyWithSecret:
    return {**tagged(response, describe_key(created.key, names)), "secret": created.secret}


async def _names(services: AdminServices, caller: Caller, keys: Iterable[ApiKey]) -> Mapping[str, str]:
    ids = [one for key in keys for one in (key.tenant_id, *(key.adapter_ids or ()))]
    return await known_names(services, caller, ids)


def describe_key(key: ApiKey, names: Mapping[str, str]) -> KeyDocument:
    return {
        "id": key.id,
        "object": "api_key",
        "tenant_id": key.tenant_id,
        "tenant": None if key.tenant_id is None else names.get(key.tenant_id, key.tenant_id),
        "name": key.name,
        "scopes": sorted(key.scopes),
        "adapters": None if key.adapter_ids is None else sorted(key.adapter_ids),
        "adapter_names": None if key.adapter_ids is None else [names.get(one, one) for one in sorted(key.adapter_ids)],
        "created_at": seconds(key.created_us),
        "expires_at": seconds(key.expires_us),
        "revoked_at": seconds(key.revoked_us),
        "previous_secret_expires_at": seconds(key.previous_until_us),
        "max_service_tier": key.max_service_tier,
        "default_service_tier": key.default_service_tier,
    }
