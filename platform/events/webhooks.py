"""The webhooks of tenants: where their events are delivered, and how far the deliveries have come."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from sqlalchemy import ColumnElement, Row, case, delete, func, insert, select

from loramux.migrations.audit import audit
from loramux.migrations.claims import NO_CLAIM, RowClaims
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_page
from loramux.migrations.schema import event_heads, tenants, webhooks
from loramux.platform.errors import Conflict, InvalidRequest, NotFound

MAX_WEBHOOKS = 10
"""Largest number of webhooks of a tenant."""
MAX_PAUSE_S = 10_800.0
"""Longest pause after a failed delivery, in seconds. A webhook that is due later was released or postponed before the
clock was set back, and is due now.
"""
MAX_URL = 2000
SECRET_PREFIX = "whsec_"  # noqa: S105 - the prefix that standardwebhooks.com prescribes

_ACTIVE = "active"
_PORTS = frozenset({None, *range(1, 1 << 16)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """`types` are the types of events that are delivered, or None for all. `sequence` is the tenant's number of the
    last event that was delivered or skipped. A `disabled` webhook gets nothing more.
    """

    id: str
    tenant_id: str
    url: str
    types: tuple[str, ...] | None
    state: str
    created_us: int
    sequence: int
    num_failures: int
    due_us: int
    last_error: str | None
    delivered_us: int | None


class Webhooks:
    """The webhooks in the database. Blocking.

    A webhook's secret is derived from its tenant's secret, so it is not stored.
    """

    def __init__(self, database: Database, allows_http: bool = False) -> None:
        self._database = database
        self._schemes = ("https", "http") if allows_http else ("https",)

    def create(self, tenant_id: str, url: str, types: Collection[str] | None) -> tuple[Webhook, str]:
        """Add a webhook, which gets the events from now on. Return it with its secret.

        Raises InvalidRequest or Conflict.
        """
        check_url(url, self._schemes)
        table = webhooks.c
        with self._database.write() as connection:
            # The lock lets creations take turns, so that the limit holds.
            secret = connection.scalar(
                select(tenants.c.isolation_secret).where(tenants.c.id == tenant_id).with_for_update(key_share=True)
            )
            if secret is None:
                raise NotFound("there is no such tenant", code="tenant_not_found")
            query = select(func.count()).select_from(webhooks).where(table.tenant_id == tenant_id)
            kinds = None if types is None else sorted(set(types))
            if (connection.scalar(query) or 0) >= MAX_WEBHOOKS:
                raise Conflict(f"a tenant can have {MAX_WEBHOOKS} webhooks: delete one first", code="webhook_limit")
            now_us = self._database.now_us(connection)
            head = select(event_heads.c.number).where(event_heads.c.tenant_id == tenant_id)
            webhook_id = new_id("whk")
            connection.execute(
                insert(webhooks).values(
                    id=webhook_id,
                    tenant_id=tenant_id,
                    url=url,
                    types=kinds,
                    state=_ACTIVE,
                    created_us=now_us,
                    sequence=connection.scalar(head) or 0,
                    num_failures=0,
                    due_us=now_us,
                )
            )
            after = {"target": _origin(url), "types": kinds}
            audit(connection, now_us, "webhook.create", webhook_id, tenant_id=tenant_id, after=after)
            webhook = _webhook(connection.execute(select(webhooks).where(table.id == webhook_id)).one())
        return webhook, _secret_text(secret, webhook_id)

    def get(self, webhook_id: str) -> Webhook | None:
        with self._database.read() as connection:
            row = connection.execute(select(webhooks).where(webhooks.c.id == webhook_id)).one_or_none()
        return None if row is None else _webhook(row)

    def list(
        self, tenant_id: str | None, limit: int, after: str | None = None, before: str | None = None
    ) -> Page[Webhook]:
        query = select(webhooks)
        if tenant_id is not None:
            query = query.where(webhooks.c.tenant_id == tenant_id)
        with self._database.read() as connection:
            return keyset_page(connection, query, webhooks.c.id, _webhook, limit, after, before)

    def delete(self, webhook_id: str) -> bool:
        """Delete a webhook. Return False if there is none."""
        with self._database.write() as connection:
            row = connection.execute(
                select(webhooks).where(webhooks.c.id == webhook_id).with_for_update()
            ).one_or_none()
            if row is None:
                return False
            connection.execute(delete(webhooks).where(webhooks.c.id == webhook_id))
            now_us = self._database.now_us(connection)
            audit(
                connection,
                now_us,
                "webhook.delete",
                webhook_id,
                tenant_id=row.tenant_id,
                before={"target": _origin(row.url)},
            )
        return True

    def secret(self, webhook: Webhook) -> str | None:
        """Return a webhook's secret, or None if its tenant has been deleted."""
        query = select(tenants.c.isolation_secret).where(tenants.c.id == webhook.tenant_id)
        with self._database.read() as connection:
            secret = connection.scalar(query)
        return None if secret is None else _secret_text(secret, webhook.id)


class WebhookQueue:
    """The webhooks that are due. One server at a time delivers to a webhook. Blocking."""

    def __init__(self, database: Database, lease_us: int) -> None:
        self._database = database
        self._claims = RowClaims(database, webhooks, (_ACTIVE,), lease_us)

    def claim_due(self, limit: int, but_tenants: Collection[str] = ()) -> Sequence[Webhook]:
        """Claim webhooks whose tenants have new events, those that have waited longest first."""
        table = webhooks.c
        with self._database.read() as connection:
            now_us = self._database.now_us(connection)
            query = (
                select(table.id)
                .join(event_heads, event_heads.c.tenant_id == table.tenant_id)
                .where(
                    table.state == _ACTIVE,
                    _is_due(now_us),
                    table.sequence < event_heads.c.number,
                    self._claims.claimable(now_us),
                    table.tenant_id.not_in(but_tenants),
                )
                .order_by(table.due_us)
                .limit(limit)
            )
            due = connection.scalars(query).all()
        claimed = []
        for webhook_id in due:
            with self._database.write() as connection:
                # Another server can have delivered to the webhook, and postponed it, since this one has looked.
                is_due = _is_due(self._database.now_us(connection))
                if self._claims.claim(connection, webhook_id, {}, is_due):
                    row = connection.execute(select(webhooks).where(table.id == webhook_id)).one()
                    claimed.append(_webhook(row))
        return claimed

    def pass_on(self, webhook_id: str, sequence: int, *, is_delivered: bool) -> bool:
        """Record that all events up to a number are delivered or skipped. Return False if the claim is lost."""
        reached = webhooks.c.sequence
        with self._database.write() as connection:
            values: dict[str, Any] = {"sequence": case((reached < sequence, sequence), else_=reached)}
            if is_delivered:
                values |= {"num_failures": 0, "last_error": None, "delivered_us": self._database.now_us(connection)}
            return self._claims.change(connection, webhook_id, values)

    def release(self, webhook_id: str) -> None:
        """Give the webhook back. It is due now, so those that have waited longer come first."""
        with self._database.write() as connection:
            due_us = self._database.now_us(connection)
            self._claims.change(connection, webhook_id, {"due_us": due_us, **NO_CLAIM})

    def postpone(self, webhook: Webhook, num_failures: int, pause_s: float, error: str) -> None:
        """Give the webhook back, and try again after a pause."""
        with self._database.write() as connection:
            due_us = self._database.now_us(connection) + round(min(pause_s, MAX_PAUSE_S) * 1_000_000)
            failed = {"num_failures": num_failures, "due_us": due_us, "last_error": error}
            self._claims.change(connection, webhook.id, {**failed, **NO_CLAIM})

    def disable(self, webhook: Webhook, error: str) -> None:
        """Deliver nothing more to a webhook whose target says that it is gone."""
        with self._database.write() as connection:
            values = {"state": "disabled", "last_error": error, **NO_CLAIM}
            if self._claims.change(connection, webhook.id, values):
                states = {"before": {"state": _ACTIVE}, "after": {"state": "disabled"}}
                now_us = self._database.now_us(connection)
                audit(connection, now_us, "webhook.disable", webhook.id, tenant_id=webhook.tenant_id, **states)


def _is_due(now_us: int) -> ColumnElement[bool]:
    return ~webhooks.c.due_us.between(now_us + 1, now_us + round(MAX_PAUSE_S * 1_000_000))


def check_url(url: str, schemes: Collection[str]) -> None:
    """Raise InvalidRequest unless this is an absolute URL with one of the schemes, no password and no fragment."""
    try:
        parts = httpx.URL(url)
        is_usable = parts.scheme in schemes and bool(parts.host) and parts.port in _PORTS
    except (httpx.InvalidURL, ValueError):
        # A host such as `xn--a` is no InvalidURL, but it stands for no name.
        is_usable = False
    if not is_usable or len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidRequest("use an https URL without spaces", param="url", code="invalid_url")
    if parts.userinfo or parts.fragment:
        raise InvalidRequest("the URL must have no password and no fragment", param="url", code="invalid_url")


def _origin(url: str) -> str:
    """The scheme and host of a URL. Its path can be a secret."""
    parts = httpx.URL(url)
    return f"{parts.scheme}://{parts.netloc.decode()}"


def _secret_text(tenant_secret: bytes, webhook_id: str) -> str:
    key = hmac.digest(tenant_secret, b"loramux webhook " + webhook_id.encode(), "sha256")
    return SECRET_PREFIX + base64.b64encode(key).decode()


def _webhook(row: Row[Any]) -> Webhook:
    names = Webhook.__dataclass_fields__.keys()
    fields = {name: getattr(row, name) for name in names}
    return Webhook(**{**fields, "types": None if row.types is None else tuple(row.types)})
