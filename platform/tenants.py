"""Tenants: the accounts that own adapters and keys and that pay."""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from loramux.migrations import schema
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_rows
from loramux.platform.errors import Conflict, InvalidRequest, NotFound
from loramux.platform.quota_windows import is_timezone

SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
MAX_DISPLAY_NAME = 200
MAX_SHARES = 10_000
MAX_STALE_US = 5_000_000


class TenantExists(Conflict):
    """A tenant with this slug exists."""

    code = "tenant_exists"


class InvalidSlug(InvalidRequest):
    """Not a slug: `[a-z0-9][a-z0-9._-]{0,62}`."""

    code = "invalid_slug"


@dataclass(frozen=True, slots=True)
class Tenant:
    """One account. `weight` is its entitlement in fair scheduling; in `timezone` its days and months begin."""

    id: str
    slug: str
    display_name: str
    state: str
    weight: int
    timezone: str
    created_us: int


@dataclass(frozen=True, slots=True)
class Share:
    """What the engine is told of a tenant: its place in fair scheduling and its prefix-cache namespace."""

    key: str
    weight: int
    isolation_key: bytes
    host_floor_bytes: int = 0
    """What its adapters keep of the host tier."""


class Tenants:
    """The tenants in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # By tenant, with the time of reading; one entry is replaced as a whole, so that threads need no lock.
        self._shares: dict[str, tuple[int, Share]] = {}

    def create(self, slug: str, display_name: str | None = None, timezone: str = "UTC") -> Tenant:
        """Make an active tenant; raises InvalidSlug, InvalidRequest and TenantExists."""
        _check_timezone(timezone)
        if not SLUG.fullmatch(slug):
            raise InvalidSlug(
                "a slug is 1 to 63 characters of a-z, 0-9, '.', '_' and '-', the first a letter or a digit",
                param="slug",
            )
        shown = display_name if display_name is not None else slug
        if not 1 <= len(shown) <= MAX_DISPLAY_NAME or not shown.isprintable():
            raise InvalidRequest(
                f"a display name is 1 to {MAX_DISPLAY_NAME} printable characters", param="display_name"
            )
        try:
            with self._database.write() as connection:
                values = {
                    "id": new_id("ten"),
                    "slug": slug,
                    "display_name": shown,
                    "state": "active",
                    "weight": 1,
                    "timezone": timezone,
                    "created_us": self._database.now_us(connection),
                }
                connection.execute(insert(schema.tenants).values(**values, isolation_secret=secrets.token_bytes(32)))
                tenant = Tenant(**values)  # type: ignore[arg-type]
                audit(
                    connection, tenant.created_us, "tenant.create", tenant.id, tenant_id=tenant.id, after=_shown(tenant)
                )
        except IntegrityError:
            raise TenantExists(f"the tenant {slug!r} exists", param="slug") from None
        return tenant

    def get(self, id_or_slug: str) -> Tenant | None:
        # A slug has no more than 63 characters, so nothing but an identifier or a slug reaches the database.
        if not SLUG.fullmatch(id_or_slug):
            return None
        table = schema.tenants
        query = select(table).where((table.c.id == id_or_slug) | (table.c.slug == id_or_slug))
        with self._database.read() as connection:
            found = {row.id: _tenant(row) for row in connection.execute(query)}
        # A slug may look like another tenant's identifier; the identifier wins.
        return found.get(id_or_slug) or next(iter(found.values()), None)

    def list(self, limit: int, after: str | None = None, before: str | None = None) -> Page[Tenant]:
        table = schema.tenants
        with self._database.read() as connection:
            rows, has_more = keyset_rows(connection, select(table), table.c.id, limit, after, before)
        return Page(tuple(_tenant(row) for row in rows), has_more)

    def set_timezone(self, tenant_id: str, timezone: str) -> Tenant:
        """Have the tenant's days and months begin elsewhere; budgets start on new windows at once.

        Raises InvalidRequest for an unknown timezone, NotFound for an unknown tenant.
        """
        _check_timezone(timezone)
        of_tenant = schema.tenants.c.id == tenant_id
        with self._database.write() as connection:
            row = connection.execute(
                select(schema.tenants).where(of_tenant).with_for_update(key_share=True)
            ).one_or_none()
            if row is None:
                raise NotFound("there is no such tenant", param="tenant", code="tenant_not_found")
            connection.execute(update(schema.tenants).where(of_tenant).values(timezone=timezone))
            before = _tenant(row)
            after = replace(before, timezone=timezone)
            changed = {"before": _shown(before), "after": _shown(after)}
            audit(
                connection,
                self._database.now_us(connection),
                "tenant.change",
                tenant_id,
                tenant_id=tenant_id,
                **changed,
            )
        return after

    def share(self, tenant_id: str) -> Share:
        """The tenant's share; its isolation key is derived, so that the secret itself never leaves the database."""
        table = schema.tenants
        query = select(table.c.weight, table.c.isolation_secret, table.c.host_floor_bytes).where(
            table.c.id == tenant_id
        )
        with self._database.read() as connection:
            row = connection.execute(query).one()
        isolation_key = hmac.digest(row.isolation_secret, b"loramux prefix cache", "sha256")
        share = Share(tenant_id, row.weight, isolation_key, row.host_floor_bytes)
        if len(self._shares) >= MAX_SHARES:
            self._shares.clear()
        self._shares[tenant_id] = (self._database.now_us(), share)
        return share

    def recent_share(self, tenant_id: str) -> Share | None:
        """The tenant's share, where it was read within the last five seconds. Does not block."""
        read_us, share = self._shares.get(tenant_id, (0, None))
        # A clock that went back must not make an entry live longer.
        return share if 0 <= self._database.now_us() - read_us < MAX_STALE_US else None

    def forget_recent(self) -> None:
        """Read every share anew: a tenant may have changed."""
        self._shares.clear()


def _check_timezone(timezone: str) -> None:
    if not is_timezone(timezone):
        raise InvalidRequest("a timezone is an IANA name such as Europe/Berlin or UTC", param="timezone")


def _shown(tenant: Tenant) -> dict[str, object]:
    """For the audit log."""
    return {
        "slug": tenant.slug,
        "display_name": tenant.display_name,
        "state": tenant.state,
        "weight": tenant.weight,
        "timezone": tenant.timezone,
    }


def _tenant(row: Row[Any]) -> Tenant:
    return Tenant(
        id=row.id,
        slug=row.slug,
        display_name=row.display_name,
        state=row.state,
        weight=row.weight,
        timezone=row.timezone,
        created_us=row.created_us,
    )
