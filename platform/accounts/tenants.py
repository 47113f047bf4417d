"""Tenants: the accounts that own adapters and keys and are billed."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Row, Table, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from loramux.engine.protocol.service_tiers import DEFAULT_TIER
from loramux.migrations import schema
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_page
from loramux.platform.accounts.change_watch import MAX_STALE_US, ChangeWatch
from loramux.platform.errors import Conflict, InvalidRequest, Unauthenticated
from loramux.platform.periods import is_timezone
from loramux.platform.service_tiers import DEFAULT_RIGHTS, TierRights, check_tier

SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
MAX_DISPLAY_NAME = 200
MAX_WEIGHT = 10_000
MAX_FLOOR_BYTES = 1 << 50
MAX_RESPONSE_DAYS = 365
DELETED = "Incorrect API key provided: its tenant has been deleted"
"""The message to a caller whose key is still cached."""
MAX_SHARES = 10_000
FORGOTTEN_US = 2 * 86_400_000_000
"""How long a deleted tenant's isolation key is remembered, in microseconds, so that a server that was disconnected
still deletes the tenant's cached prefixes.
"""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One account. `weight` is its entitlement in fair scheduling, and `timezone` defines its days and months.

    Responses, chat completions and conversations are stored for `response_days` days. If it is 0, they are not stored.
    A request that names no service tier gets `default_service_tier`. None gets a better one than `max_service_tier`.
    """

    id: str
    slug: str
    display_name: str
    state: str
    weight: int
    timezone: str
    host_floor_bytes: int
    response_days: int
    max_service_tier: str
    default_service_tier: str
    created_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantChanges:
    display_name: str | None = None
    weight: int | None = None
    state: Literal["active", "suspended"] | None = None
    timezone: str | None = None
    host_floor_bytes: int | None = None
    response_days: int | None = None
    max_service_tier: str | None = None
    default_service_tier: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRows:
    """Numbers of a tenant's rows. `num_running` counts its open requests."""

    num_adapters: int
    num_running: int
    num_usage_events: int
    num_keys: int
    num_quotas: int
    num_prices: int
    num_grants: int
    """Grants that let the tenant call adapters of other tenants."""


@dataclass(frozen=True, slots=True)
class TenantShare:
    """A tenant as the engine sees it: its weight in fair scheduling and its prefix-cache namespace."""

    key: str
    weight: int
    isolation_key: bytes
    host_floor_bytes: int = 0
    """Bytes of the tenant's adapters in the host tier that other tenants' adapters cannot evict."""
    response_days: int = 0
    """Number of days for which the tenant's responses are stored."""
    tiers: TierRights = DEFAULT_RIGHTS
    """The service tiers of its requests."""


@dataclass(frozen=True, slots=True)
class _CachedShare:
    """A share as it was read at `read_us`, after `num_changes` changes had been noted."""

    share: TenantShare
    read_us: int
    num_changes: int


class Tenants:
    def __init__(self, database: Database) -> None:
        self._database = database
        # Entries are replaced as a whole, so threads need no lock.
        self._shares: dict[str, _CachedShare] = {}
        self._watch = ChangeWatch()

    def create(self, slug: str, display_name: str | None = None, timezone: str = "UTC") -> Tenant:
        """Create an active tenant. Raises InvalidRequest, or Conflict if the slug is taken."""
        _check_timezone(timezone)
        if not SLUG.fullmatch(slug):
            raise InvalidRequest(
                "a slug has 1 to 63 characters, from a-z, 0-9, '.', '_' and '-', and starts with a letter or a digit",
                param="slug",
                code="invalid_slug",
            )
        shown = display_name if display_name is not None else slug
        _check_display_name(shown)
        try:
            with self._database.write() as connection:
                values = {
                    "id": new_id("ten"),
                    "slug": slug,
                    "display_name": shown,
                    "state": "active",
                    "weight": 1,
                    "timezone": timezone,
                    "host_floor_bytes": 0,
                    "response_days": 0,
                    "max_service_tier": DEFAULT_TIER,
                    "default_service_tier": DEFAULT_TIER,
                    "created_us": self._database.now_us(connection),
                }
                connection.execute(insert(schema.tenants).values(**values, isolation_secret=secrets.token_bytes(32)))
                tenant = Tenant(**values)  # type: ignore[arg-type]
                audit(
                    connection, tenant.created_us, "tenant.create", tenant.id, tenant_id=tenant.id, after=_shown(tenant)
                )
        except IntegrityError:
            raise Conflict(f"the tenant {slug!r} already exists", param="slug", code="tenant_exists") from None
        return tenant

    def update(self, tenant_id: str, changes: TenantChanges, check: Callable[[Tenant], None]) -> Tenant | None:
        """Change a tenant and return it, or return None if there is no such tenant.

        `check` receives the current tenant and can raise to prevent the change. Raises InvalidRequest.
        """
        table = schema.tenants
        if changes.display_name is not None:
            _check_display_name(changes.display_name)
        if changes.weight is not None and not 1 <= changes.weight <= MAX_WEIGHT:
            raise InvalidRequest(f"a weight must be from 1 to {MAX_WEIGHT}", param="weight")
        if changes.timezone is not None:
            _check_timezone(changes.timezone)
        if changes.host_floor_bytes is not None and not 0 <= changes.host_floor_bytes <= MAX_FLOOR_BYTES:
            raise InvalidRequest(f"host_floor_bytes must be from 0 to {MAX_FLOOR_BYTES}", param="host_floor_bytes")
        if changes.response_days is not None and not 0 <= changes.response_days <= MAX_RESPONSE_DAYS:
            raise InvalidRequest(f"response_days must be from 0 to {MAX_RESPONSE_DAYS}", param="response_days")
        check_tier(changes.max_service_tier, "max_service_tier")
        check_tier(changes.default_service_tier, "default_service_tier")
        with self._database.write() as connection:
            query = select(table).where(table.c.id == tenant_id)
            row = connection.execute(query.with_for_update(key_share=True)).one_or_none()
            if row is None:
                return None
            check(_tenant(row))
            wanted = {name: value for name, value in asdict(changes).items() if value is not None}
            if wanted:
                before = _shown(_tenant(row))
                connection.execute(update(table).where(table.c.id == tenant_id).values(**wanted))
                row = connection.execute(query).one()
                now_us, after = self._database.now_us(connection), _shown(_tenant(row))
                audit(connection, now_us, "tenant.change", tenant_id, tenant_id=tenant_id, before=before, after=after)
        self._shares.pop(tenant_id, None)
        return _tenant(row)

    def delete(self, tenant_id: str) -> bool:
        """Delete a tenant. Raises Conflict if it has adapters, unrevoked keys, prices or usage.

        Its revoked keys, quotas, grants and stored objects are deleted, too. Returns False if there is no such tenant.
        """
        problem = "the tenant has adapters, unrevoked keys, prices or usage: suspend it, and purge it to delete it"
        in_use = Conflict(problem, code="tenant_in_use")
        keys = schema.api_keys
        try:
            with self._database.write() as connection:
                row = connection.execute(
                    select(schema.tenants).where(schema.tenants.c.id == tenant_id).with_for_update()
                ).one_or_none()
                if row is None:
                    return False
                usable = select(keys.c.id).where(keys.c.tenant_id == tenant_id, keys.c.revoked_us.is_(None)).limit(1)
                # Check reservations first. A reservation settled between the two queries is then found in the ledger.
                held, spent = schema.reservations.c, schema.usage_events.c
                runs = select(held.id).where(held.tenant_id == tenant_id).limit(1)
                ran = select(spent.request_id).where(spent.tenant_id == tenant_id).limit(1)
                if any(connection.execute(query).first() for query in (usable, runs, ran)):
                    raise in_use
                now_us, before = self._database.now_us(connection), _shown(_tenant(row))
                _delete_rows(connection, tenant_id, now_us)
                audit(connection, now_us, "tenant.delete", tenant_id, tenant_id=tenant_id, before=before)
        except IntegrityError:
            # Another table still refers to the tenant.
            raise in_use from None
        self._shares.pop(tenant_id, None)
        return True

    def look(self, tenant_id: str) -> TenantRows:
        """Return the numbers of rows that `purge` would delete."""
        with self._database.read() as connection:
            return _count_rows(connection, tenant_id)

    def purge(self, tenant_id: str) -> TenantRows:
        """Delete a suspended tenant whose adapters and ledger entries have been purged, with everything else it has.

        Its slug can then be used again. The audit log and the sums in the rollups stay. Raises Conflict if
        the tenant is active, or still has adapters, running requests or ledger entries.
        """
        with self._database.write() as connection:
            query = select(schema.tenants).where(schema.tenants.c.id == tenant_id)
            # The lock keeps gateways that still accept a cached key from opening reservations.
            tenant = _tenant(connection.execute(query.with_for_update()).one())
            check_suspended(tenant)
            rows = _count_rows(connection, tenant_id)
            if rows.num_adapters or rows.num_running or rows.num_usage_events:
                problem = "the tenant still has adapters, running requests or usage; purge it again"
                raise Conflict(problem, code="tenant_in_use")
            own_keys = select(schema.api_keys.c.id).where(schema.api_keys.c.tenant_id == tenant_id)
            sessions, calls = schema.console_sessions, schema.idempotency_keys
            connection.execute(delete(sessions).where(sessions.c.key_id.in_(own_keys)))
            connection.execute(delete(calls).where(calls.c.principal.in_(own_keys)))
            for table in (schema.reservations, schema.prices):
                connection.execute(delete(table).where(table.c.tenant_id == tenant_id))
            now_us, before = self._database.now_us(connection), {"slug": tenant.slug}
            _delete_rows(connection, tenant_id, now_us)
            audit(connection, now_us, "tenant.purge", tenant_id, tenant_id=tenant_id, before=before)
        self._shares.pop(tenant_id, None)
        return rows

    def deleted_keys(self) -> frozenset[bytes]:
        """Return the isolation keys of tenants that were deleted within the last FORGOTTEN_US."""
        with self._database.read() as connection:
            return frozenset(connection.scalars(select(schema.prefix_purges.c.isolation_key)))

    def get(self, id_or_slug: str) -> Tenant | None:
        if not SLUG.fullmatch(id_or_slug):
            return None
        table = schema.tenants
        query = select(table).where((table.c.id == id_or_slug) | (table.c.slug == id_or_slug))
        with self._database.read() as connection:
            found = {row.id: _tenant(row) for row in connection.execute(query)}
        # A slug can look like another tenant's identifier. The identifier takes precedence.
        return found.get(id_or_slug) or next(iter(found.values()), None)

    def list(self, limit: int, after: str | None = None, before: str | None = None) -> Page[Tenant]:
        table = schema.tenants
        with self._database.read() as connection:
            return keyset_page(connection, select(table), table.c.id, _tenant, limit, after, before)

    def share(self, tenant_id: str) -> TenantShare:
        """Read the tenant's share. Its isolation key is derived from a secret that the engine never receives.

        Raises Unauthenticated if the tenant has been deleted.
        """
        table = schema.tenants
        c = table.c
        columns = (c.weight, c.isolation_secret, c.host_floor_bytes, c.response_days)
        tiers = (c.max_service_tier, c.default_service_tier)
        query = select(*columns, *tiers).where(c.id == tenant_id)
        num_changes, read_us = self._watch.num_changes, self._database.now_us()
        with self._database.read() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise Unauthenticated(DELETED)
        isolation_key = _isolation_key(row.isolation_secret)
        rights = TierRights(row.max_service_tier, row.default_service_tier)
        share = TenantShare(tenant_id, row.weight, isolation_key, row.host_floor_bytes, row.response_days, rights)
        if len(self._shares) >= MAX_SHARES:
            self._shares.clear()
        self._shares[tenant_id] = _CachedShare(share, read_us, num_changes)
        return share

    def recent_share(self, tenant_id: str, max_stale_us: int = MAX_STALE_US) -> TenantShare | None:
        """Return the tenant's share, or None if it is not known to have been right within the last five seconds, or
        `max_stale_us`. Does not block.
        """
        cached = self._shares.get(tenant_id)
        # A share that was read before a change may have been stored after `forget_recent`.
        if cached is None or cached.num_changes != self._watch.num_changes:
            return None
        return cached.share if self._watch.is_fresh(cached.read_us, self._database.now_us(), max_stale_us) else None

    def forget_recent(self) -> None:
        self._watch.note_change()
        self._shares.clear()

    def confirm_recent(self, now_us: int) -> None:
        """Keep the cached shares for five more seconds, because no tenant had changed at this time since the last
        `forget_recent`.
        """
        self._watch.confirm(now_us)


def check_suspended(tenant: Tenant) -> None:
    """Raise Conflict for an active tenant, which cannot be purged."""
    if tenant.state != "suspended":
        raise Conflict(f"suspend the tenant first: 'loramux tenants suspend {tenant.slug}'", code="tenant_active")


def _check_display_name(text: str) -> None:
    if not 1 <= len(text) <= MAX_DISPLAY_NAME or not text.isprintable():
        raise InvalidRequest(
            f"a display name must have 1 to {MAX_DISPLAY_NAME} printable characters", param="display_name"
        )


def _check_timezone(timezone: str) -> None:
    if not is_timezone(timezone):
        raise InvalidRequest("a timezone must be an IANA name such as Europe/Berlin or UTC", param="timezone")


def _shown(tenant: Tenant) -> dict[str, object]:
    return {
        "slug": tenant.slug,
        "display_name": tenant.display_name,
        "state": tenant.state,
        "weight": tenant.weight,
        "timezone": tenant.timezone,
        "host_floor_bytes": tenant.host_floor_bytes,
        "response_days": tenant.response_days,
        "max_service_tier": tenant.max_service_tier,
        "default_service_tier": tenant.default_service_tier,
    }


def _tenant(row: Row[Any]) -> Tenant:
    return Tenant(*(row._mapping[field.name] for field in fields(Tenant)))


def _isolation_key(secret: bytes) -> bytes:
    return hmac.digest(secret, b"loramux prefix cache", "sha256")


def _delete_rows(connection: Connection, tenant_id: str, now_us: int) -> None:
    # The sweep of files deletes the blobs.
    connection.execute(insert(schema.file_purges).values(tenant_id=tenant_id, purged_us=now_us))
    # Every server deletes what its engines have cached of the tenant's prompts. A tenant without usage can have some,
    # too: a purge that was interrupted has erased its ledger entries.
    secret = connection.scalars(select(schema.tenants.c.isolation_secret).where(schema.tenants.c.id == tenant_id)).one()
    cached = {"isolation_key": _isolation_key(secret), "expires_us": now_us + FORGOTTEN_US}
    connection.execute(insert(schema.prefix_purges).values(**cached))
    # Requests that change something stored lock its row before the counters of quotas. Requests that store something
    # new lock the tenant's row before the counters.
    for table in (schema.responses, schema.chat_completions, schema.conversations):
        connection.execute(delete(table).where(table.c.tenant_id == tenant_id))
    policies, counters = schema.quota_policies, schema.quota_counters
    own_policies = select(policies.c.id).where(policies.c.tenant_id == tenant_id)
    # Under the platform's policies, the tenant has counters of its own.
    is_own = counters.c.policy_id.in_(own_policies) | (counters.c.subject_id == tenant_id)
    connection.execute(delete(counters).where(is_own))
    batches, lines = schema.batches, schema.batch_lines
    connection.execute(
        delete(lines).where(lines.c.batch_id.in_(select(batches.c.id).where(batches.c.tenant_id == tenant_id)))
    )
    told = (schema.webhooks, schema.events, schema.event_heads)
    owned = (batches, *told, schema.files, policies, schema.api_keys, schema.adapter_grants, schema.stored_bytes)
    for table in owned:
        connection.execute(delete(table).where(table.c.tenant_id == tenant_id))
    connection.execute(delete(schema.tenants).where(schema.tenants.c.id == tenant_id))


def _count_rows(connection: Connection, tenant_id: str) -> TenantRows:
    def count(table: Table, *conditions: ColumnElement[bool]) -> int:
        query = select(func.count()).select_from(table).where(table.c.tenant_id == tenant_id, *conditions)
        return int(connection.execute(query).scalar_one())

    return TenantRows(
        num_adapters=count(schema.adapters),
        num_running=count(schema.reservations, schema.reservations.c.state == "open"),
        num_usage_events=count(schema.usage_events),
        num_keys=count(schema.api_keys),
        num_quotas=count(schema.quota_policies),
        num_prices=count(schema.prices),
        num_grants=count(schema.adapter_grants),
    )
