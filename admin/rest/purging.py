"""Purges versions, adapters and tenants: takes them out of service, waits for running requests, and deletes all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Literal, TypeVar

import structlog
from typing_extensions import TypedDict

from loramux.adapter_store.errors import RequestsRunning, StoreError, VersionInUse
from loramux.adapter_store.ingest.purge_rows import Purge
from loramux.adapter_store.registry.records import Adapter, AdapterVersion
from loramux.adapter_store.tiers.disk_tier import purge_files
from loramux.admin.rest.bodies import PurgeRequest
from loramux.admin.rest.services import AdminServices
from loramux.engine.protocol.messages import ForgetPrefixes, Unload
from loramux.platform.accounts.tenants import Tenant, TenantRows, check_suspended
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.errors import InvalidRequest

T = TypeVar("T")

WAIT_S = 10.0
"""How long a purge waits for running requests, in seconds. After that, it is refused and can be repeated."""
POLL_S = 0.1
UNLOAD_TIMEOUT_S = 2.0
KEYS_PER_CALL = 1000
"""Maximum number of isolation keys whose prefixes the engine deletes at once."""
PAGE = 100

_log = structlog.get_logger(__name__)


class PurgeDocument(TypedDict):
    """The objects that the purge deleted or, with `dry_run`, would delete.

    `bytes` counts the stored weights and optional files, without the packed files, which can be rebuilt.
    `shared_weights` stay, because versions of other adapters have the same weights. `blocked_by` says why the purge
    would be refused now, or is null. `files_pending` is the number of weights and versions whose files could not be
    deleted yet, because the object store does not answer. A server deletes them later.
    """

    object: Literal["purge"]
    name: str
    dry_run: bool
    blocked_by: str | None
    adapters: int
    versions: int
    bytes: int
    shared_weights: int
    running_requests: int
    aliases: list[str]
    grants: int
    quotas: int
    open_uploads: int
    keys: int
    prices: int
    usage_events: int
    files_pending: int


async def purge_version(
    services: AdminServices, adapter: Adapter, version: AdapterVersion, body: PurgeRequest
) -> PurgeDocument:
    """Purge a version. Raises VersionInUse, RequestsRunning or InvalidRequest."""
    name, number = f"{_model(adapter)}@{version.number}", version.number

    async def look() -> Purge:
        return await services.call(services.adapters.ingest.purge_rows.look, adapter.id, number)

    found = await look()
    if body.dry_run:
        return _describe(name, (found,), blocked_by=_obstacle(found, f"version {number}"))
    _check_confirmed(body, name)
    if found.aliases:
        raise VersionInUse(f"the alias {found.aliases[0]!r} names version {number}: move it first")
    if version.state == "ready":
        # No request can begin on an archived version.
        await services.call(services.adapters.version_states.archive, adapter.id, number)
    await _wait_until_idle(look)
    found = await services.call(services.adapters.ingest.purge_rows.purge_version, adapter.id, number)
    return await _finish(services, name, (found,))


async def purge_adapter(services: AdminServices, adapter: Adapter, body: PurgeRequest) -> PurgeDocument:
    """Purge an adapter with all its versions. Raises RequestsRunning or InvalidRequest."""
    name = _model(adapter)
    found = await services.call(services.adapters.ingest.purge_rows.look, adapter.id)
    if body.dry_run:
        return _describe(name, (found,), num_adapters=1, blocked_by=_obstacle(found))
    _check_confirmed(body, name)
    return await _finish(services, name, (await _purge_adapter(services, adapter.id),), num_adapters=1)


async def purge_tenant(services: AdminServices, tenant: Tenant, body: PurgeRequest) -> PurgeDocument:
    """Purge a suspended tenant with its adapters and everything else it has. Running requests are cancelled.

    An interrupted purge can be repeated, and continues. Raises Conflict, RequestsRunning or InvalidRequest.
    """
    if body.dry_run:
        rows = await services.call(services.accounts.tenants.look, tenant.id)
        found = [
            await services.call(services.adapters.ingest.purge_rows.look, adapter.id)
            for adapter in await _adapters_of(services, tenant.id)
        ]
        blocked_by = None if tenant.state == "suspended" else "the tenant is not suspended"
        return _describe(tenant.slug, found, rows, len(found), blocked_by)
    _check_confirmed(body, tenant.slug)
    check_suspended(tenant)
    await _end_requests(services, tenant.id)
    adapters = await _adapters_of(services, tenant.id)
    purged = [await _purge_adapter(services, adapter.id) for adapter in adapters]
    share = await services.call(services.accounts.tenants.share, tenant.id)
    num_erased = await services.call(services.usage.erasure.erase, tenant.id)
    rows = await services.call(services.accounts.tenants.purge, tenant.id)
    services.accounts.api_keys.forget_recent()
    await forget_prefixes(services, (share.isolation_key,))
    document = await _finish(services, tenant.slug, purged, rows, len(adapters))
    return {**document, "usage_events": num_erased}


async def forget_copies(services: AdminServices, digests: Collection[str]) -> list[str]:
    """Delete this server's copies of purged weights: on disk, in host memory and in the page pool.

    Requests that still run on them finish first. Return the digests without copies: the others' are still in use, or
    the engine does not answer.
    """
    if services.engine.disk_tier is not None:
        await services.call(purge_files, services.engine.disk_tier, digests)
    forgotten = []
    for digest in digests:
        with suppress(EngineUnavailable, TimeoutError):
            state = await services.engine.client.call(Unload(digest=digest, is_purge=True), UNLOAD_TIMEOUT_S)
            if state.state == "absent":
                forgotten.append(digest)
    return forgotten


async def forget_prefixes(services: AdminServices, isolation_keys: Sequence[bytes]) -> Sequence[bytes]:
    """Delete the K and V of deleted tenants' prompts from this server's engines: from the page pool and from host
    memory.

    Return the keys for which this is done: the first ones, if the engine does not answer any more.
    """
    for start in range(0, len(isolation_keys), KEYS_PER_CALL):
        some = tuple(isolation_keys[start : start + KEYS_PER_CALL])
        try:
            await services.engine.client.call(ForgetPrefixes(isolation_keys=some), UNLOAD_TIMEOUT_S)
        except (EngineUnavailable, TimeoutError):
            return isolation_keys[:start]
    return isolation_keys


async def _purge_adapter(services: AdminServices, adapter_id: str) -> Purge:
    await services.call(services.adapters.version_states.set_disabled, adapter_id, True)
    await _wait_until_idle(lambda: services.call(services.adapters.ingest.purge_rows.look, adapter_id))
    return await services.call(services.adapters.ingest.purge_rows.purge_adapter, adapter_id)


async def _wait_until_idle(look: Callable[[], Awaitable[Purge]]) -> None:
    await _wait_for(look, lambda found: found.num_running)


async def _end_requests(services: AdminServices, tenant_id: str) -> None:
    """Cancel the tenant's running requests, and wait until they have been settled. Raises RequestsRunning."""

    async def cancel() -> int:
        page = await services.call(services.engine.requests.list, tenant_id, PAGE)
        for request in page.data:
            if request.cancel_requested_us is None:
                await services.call(services.engine.requests.cancel, request.id)
            services.engine.live.cancel(request.id)
        return len(page.data)

    await _wait_for(cancel, lambda num_running: num_running)


async def _wait_for(look: Callable[[], Awaitable[T]], count: Callable[[T], int]) -> None:
    due_s = time.monotonic() + WAIT_S
    while num_running := count(await look()):
        if time.monotonic() > due_s:
            raise RequestsRunning(num_running)
        await asyncio.sleep(POLL_S)


async def _adapters_of(services: AdminServices, tenant_id: str) -> list[Adapter]:
    adapters: list[Adapter] = []
    after = None
    while True:
        page = await services.call(services.adapters.registry.list_adapters, tenant_id, PAGE, after)
        adapters += page.data
        if not page.has_more:
            return adapters
        after = page.data[-1].id


async def _finish(
    services: AdminServices,
    name: str,
    purged: Sequence[Purge],
    rows: TenantRows | None = None,
    num_adapters: int = 0,
) -> PurgeDocument:
    """Delete this server's copies and the blobs. If that fails, a server does it later."""
    await forget_copies(services, {digest for one in purged for digest in one.digests})
    try:
        await services.call(services.adapters.ingest.remove_abandoned)
    except StoreError as error:
        _log.warning("purged blobs are deleted later", error=str(error))
    document = _describe(name, purged, rows, num_adapters, is_dry_run=False)
    return {**document, "files_pending": await services.call(services.adapters.ingest.purged_blobs.num_deleting)}


def _check_confirmed(body: PurgeRequest, name: str) -> None:
    if body.confirm != name:
        raise InvalidRequest(
            f"a purge cannot be undone: set confirm to {name!r}", param="confirm", code="not_confirmed"
        )


def _obstacle(found: Purge, what: str | None = None) -> str | None:
    if what is not None and found.aliases:
        return f"the alias {found.aliases[0]!r} names {what}"
    return str(RequestsRunning(found.num_running)) if found.num_running else None


def _model(adapter: Adapter) -> str:
    return f"{adapter.tenant_slug}/{adapter.name}"


def _describe(
    name: str,
    purged: Iterable[Purge],
    rows: TenantRows | None = None,
    num_adapters: int = 0,
    blocked_by: str | None = None,
    is_dry_run: bool = True,
) -> PurgeDocument:
    found = list(purged)
    return {
        "object": "purge",
        "name": name,
        "dry_run": is_dry_run,
        "blocked_by": blocked_by,
        "adapters": num_adapters,
        "versions": sum(one.num_versions for one in found),
        "bytes": sum(one.num_bytes for one in found),
        "shared_weights": sum(one.num_shared for one in found),
        "running_requests": sum(one.num_running for one in found) if rows is None else rows.num_running,
        "aliases": sorted({alias for one in found for alias in one.aliases}),
        "grants": sum(one.num_grants for one in found) + (0 if rows is None else rows.num_grants),
        "quotas": sum(one.num_quotas for one in found) if rows is None else rows.num_quotas,
        "open_uploads": sum(one.num_uploads for one in found),
        "keys": 0 if rows is None else rows.num_keys,
        "prices": 0 if rows is None else rows.num_prices,
        "usage_events": 0 if rows is None else rows.num_usage_events,
        "files_pending": 0,
    }
