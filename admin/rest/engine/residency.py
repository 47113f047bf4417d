"""`/residency`: the adapters in each tier (page pool, host memory, disk) and how full each tier is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from typing_extensions import TypedDict

from loramux.adapter_store.registry.digest_owners import DigestOwner, owners_of
from loramux.adapter_store.tiers.tier_contents import MAX_LISTED, KeptAdapter
from loramux.admin.rest.access import Caller, Reader, Services, tenant_filter
from loramux.admin.rest.engine.engine_state import engine_stats
from loramux.admin.rest.listing import ListDocument, TenantParam
from loramux.engine.protocol.messages import ResidentAdapter, Stats
from loramux.platform.events.residency_events import used_digests

router = APIRouter(prefix="/residency", tags=["residency"])

Tier = Literal["pool", "host", "disk"]


class VersionName(TypedDict):
    """A version that has the resident adapter's digest."""

    tenant_id: str
    tenant: str
    adapter_id: str
    name: str
    version: int
    model: str


class ResidentAdapterDocument(TypedDict):
    """One adapter in a tier. Outside the pool, `slot`, `num_pages` and `num_users` are null.

    For a tenant, `slot`, `num_users` and `last_used_at` are null, and `is_pinned` is true if it has pinned a version.
    """

    object: Literal["resident_adapter"]
    tier: Tier
    digest: str
    versions: list[VersionName]
    num_bytes: int
    slot: int | None
    num_pages: int | None
    num_users: int | None
    is_pinned: bool
    last_used_at: int | None


class PoolPages(TypedDict):
    """Numbers of pages in the pool, by use, and a page's size. `prefix` counts the `kv` pages in the prefix cache.

    `host_prefix` counts the evicted pages of the prefix cache that are kept in host memory, of at most `host_total`.
    `disk_prefix` counts those that are kept on disk, of at most `disk_total`.
    """

    total: int
    free: int
    kv: int
    adapters: int
    prefix: int
    pinned: int
    page_bytes: int
    host_prefix: int
    host_total: int
    disk_prefix: int
    disk_total: int


class TierFill(TypedDict):
    """A tier's current and maximum size, its number of adapters, and its evictions since the engine started."""

    tier: Tier
    used_bytes: int
    max_bytes: int
    num_adapters: int
    num_evictions: int


class ResidencyDocument(ListDocument[ResidentAdapterDocument]):
    """A snapshot of one tier. `pages` and `tiers` are null for a tenant."""

    pages: PoolPages | None
    tiers: list[TierFill] | None


@router.get("")
async def get_residency(
    services: Services,
    caller: Reader,
    tier: Annotated[Tier, Query(description="The tier to list.")] = "pool",
    tenant: TenantParam = None,
    replica: Annotated[
        str | None,
        Query(
            max_length=40,
            description="The server or engine to query, by its identifier in `/replicas`. The default is this server.",
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Maximum number of adapters to list.")] = 200,
) -> ResidencyDocument:
    """List the adapters of one tier, most recently used first, and report how full each tier is.

    The list is a snapshot, because a tier changes too fast for paging. `has_more` means that the tier contains more
    than `limit` adapters. Each adapter lists all versions with its digest. A tenant sees only its own versions, ordered
    by name, and only those that are pinned or that it has created, loaded or sent a request to in the last day. A key
    that is restricted to adapters sees only versions of those adapters.
    """
    tenant_id = await tenant_filter(services, caller, tenant)
    stats = await engine_stats(services, with_tiers=True, replica=replica)
    held = _held(stats, tier)
    # For a tenant, the limit applies only after other tenants' adapters have been left out.
    if tenant_id is None:
        held = held[:limit]
    digests = [one.digest for one in held]
    owners = await services.call(owners_of, services.database, digests, tenant_id, caller.adapter_ids)
    own_tenant_id = caller.principal.tenant_id
    if own_tenant_id is not None:
        used = await services.call(used_digests, services.database, owners, own_tenant_id)
        used |= services.engine.loads.loaded_by(own_tenant_id)
        owners = {digest: found for digest, found in owners.items() if digest in used}
        # By name, because the last use can be another tenant's.
        held = sorted((one for one in held if one.digest in owners), key=lambda one: _by_name(owners[one.digest]))
    now_s = services.database.now_us() / 1e6
    data = [
        _describe(one, owners.get(one.digest, ()), tier, stats.page_bytes, now_s, caller)
        for one in held
        if tenant_id is None or one.digest in owners
    ][:limit]
    is_whole = own_tenant_id is None
    num_adapters = {fill["tier"]: fill["num_adapters"] for fill in _fills(stats)}
    num_here = num_adapters.get(tier, 0) if tenant_id is None else len(owners)
    return {
        "object": "list",
        "data": data,
        "first_id": None,
        "last_id": None,
        "has_more": len(data) < num_here,
        "pages": _pages(stats) if is_whole else None,
        "tiers": _fills(stats) if is_whole else None,
    }


def _held(stats: Stats, tier: Tier) -> Sequence[ResidentAdapter | KeptAdapter]:
    """Return the adapters of a tier, most recently used first."""
    if tier == "pool":
        return sorted(stats.adapters, key=lambda one: one.idle_s)
    return [one for contents in stats.tiers if contents.tier == tier for one in contents.adapters]


def _by_name(owners: Sequence[DigestOwner]) -> tuple[str, int]:
    return owners[0].adapter_name, owners[0].version


def _describe(
    one: ResidentAdapter | KeptAdapter,
    owners: Sequence[DigestOwner],
    tier: Tier,
    page_bytes: int,
    now_s: float,
    caller: Caller,
) -> ResidentAdapterDocument:
    # Several tenants may have uploaded the same bytes. No tenant may see how the other tenants use them.
    is_operator = caller.principal.tenant_id is None
    pooled = one if isinstance(one, ResidentAdapter) else None
    return {
        "object": "resident_adapter",
        "tier": tier,
        "digest": one.digest,
        "versions": [
            {
                "tenant_id": owner.tenant_id,
                "tenant": owner.tenant_slug,
                "adapter_id": owner.adapter_id,
                "name": owner.adapter_name,
                "version": owner.version,
                "model": f"{owner.tenant_slug}/{owner.adapter_name}@{owner.version}",
            }
            for owner in owners
        ],
        "num_bytes": one.num_pages * page_bytes if isinstance(one, ResidentAdapter) else one.num_bytes,
        "slot": pooled.slot if pooled is not None and is_operator else None,
        "num_pages": None if pooled is None else pooled.num_pages,
        "num_users": pooled.num_users if pooled is not None and is_operator else None,
        "is_pinned": pooled is not None
        and (pooled.is_pinned if is_operator else any(owner.is_pinned for owner in owners)),
        "last_used_at": int(now_s - one.idle_s) if is_operator else None,
    }


def _pages(stats: Stats) -> PoolPages:
    return {
        "total": stats.num_pages,
        "free": stats.num_free_pages,
        "kv": stats.num_kv_pages,
        "adapters": stats.num_adapter_pages,
        "prefix": stats.num_prefix_pages,
        "pinned": stats.num_pinned_pages,
        "page_bytes": stats.page_bytes,
        "host_prefix": stats.host_pages.num_pages,
        "host_total": stats.host_pages.num_slots,
        "disk_prefix": stats.disk_pages.num_pages,
        "disk_total": stats.disk_pages.num_slots,
    }


def _fills(stats: Stats) -> list[TierFill]:
    pool: TierFill = {
        "tier": "pool",
        "used_bytes": stats.num_adapter_pages * stats.page_bytes,
        "max_bytes": stats.num_pages * stats.page_bytes,
        "num_adapters": len(stats.adapters),
        "num_evictions": stats.num_adapter_evictions,
    }
    others: list[TierFill] = [
        {
            "tier": "host" if contents.tier == "host" else "disk",
            "used_bytes": contents.used_bytes,
            "max_bytes": contents.max_bytes,
            "num_adapters": contents.num_adapters,
            "num_evictions": contents.num_evictions,
        }
        for contents in stats.tiers
    ]
    return [pool, *others]
