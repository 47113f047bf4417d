"""Quota policies: what a tenant may use, one policy a metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from loramux.migrations import schema
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_rows
from loramux.platform.buckets import MAX_LIMIT, UNITS, Bucket
from loramux.platform.errors import InvalidRequest, NotFound

REQUESTS_PER_MINUTE = "requests_per_minute"
TOKENS_PER_MINUTE = "tokens_per_minute"
CONCURRENT_REQUESTS = "concurrent_requests"
METRICS = (REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE, CONCURRENT_REQUESTS)


@dataclass(frozen=True, slots=True)
class QuotaPolicy:
    """One limit of one tenant. `burst` is the size of a rate's bucket; concurrency has none and repeats its limit."""

    id: str
    tenant_id: str
    metric: str
    limit: int
    burst: int
    created_us: int
    updated_us: int


class QuotaPolicies:
    """The policies in the database. A metric without a policy is unlimited."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def set(self, tenant_id: str, metric: str, limit: int, burst: int | None = None) -> QuotaPolicy:
        """Make or change the tenant's policy for `metric`; `burst` defaults to the limit.

        Raises InvalidRequest that names the field, NotFound for an unknown tenant.
        """
        _check(metric, limit, burst)
        size = limit if burst is None else burst
        with self._database.write() as connection:
            # Not the stronger FOR UPDATE: a reservation's foreign key locks the tenant while it holds the policies.
            tenant = select(schema.tenants.c.id).where(schema.tenants.c.id == tenant_id)
            tenant = tenant.with_for_update(key_share=True)
            if connection.execute(tenant).one_or_none() is None:
                raise NotFound(f"there is no tenant {tenant_id!r}", param="tenant_id")
            found = connection.execute(_of(tenant_id).where(schema.quota_policies.c.metric == metric)).one_or_none()
            now_us = self._database.now_us(connection)
            if found is None:
                policy = self._insert(connection, tenant_id, metric, limit, size, now_us)
            else:
                policy = self._change(connection, policy_of(found), limit, size, now_us)
            before = None if found is None else _shown(policy_of(found))
            audit(connection, now_us, "quota.set", policy.id, tenant_id=tenant_id, before=before, after=_shown(policy))
        return policy

    def list(
        self, tenant_id: str | None, limit: int, after: str | None = None, before: str | None = None
    ) -> Page[QuotaPolicy]:
        """Policies of one tenant, or of all when `tenant_id` is None."""
        table = schema.quota_policies
        query = select(table)
        if tenant_id is not None:
            query = query.where(table.c.tenant_id == tenant_id)
        with self._database.read() as connection:
            rows, has_more = keyset_rows(connection, query, table.c.id, limit, after, before)
        return Page(tuple(policy_of(row) for row in rows), has_more)

    def get(self, policy_id: str) -> QuotaPolicy | None:
        table = schema.quota_policies
        with self._database.read() as connection:
            row = connection.execute(select(table).where(table.c.id == policy_id)).one_or_none()
        return policy_of(row) if row is not None else None

    def delete(self, policy_id: str) -> bool:
        """Lift a limit; requests that run keep their reservations, which no longer bind. False: no such policy."""
        policies, counters = schema.quota_policies, schema.quota_counters
        with self._database.write() as connection:
            locked = select(policies).where(policies.c.id == policy_id).with_for_update()
            row = connection.execute(locked).one_or_none()
            if row is None:
                return False
            now_us, before = self._database.now_us(connection), _shown(policy_of(row))
            audit(connection, now_us, "quota.delete", policy_id, tenant_id=row.tenant_id, before=before)
            connection.execute(delete(counters).where(counters.c.policy_id == policy_id))
            connection.execute(delete(policies).where(policies.c.id == policy_id))
        return True

    def _insert(
        self, connection: Connection, tenant_id: str, metric: str, limit: int, burst: int, now_us: int
    ) -> QuotaPolicy:
        policy_id = new_id("qta")
        connection.execute(
            insert(schema.quota_policies).values(
                id=policy_id,
                tenant_id=tenant_id,
                metric=metric,
                limit_value=limit,
                burst=burst,
                created_us=now_us,
                updated_us=now_us,
            )
        )
        connection.execute(
            insert(schema.quota_counters).values(
                policy_id=policy_id, window_start_us=0, level=burst * UNITS, reserved=0, refilled_us=now_us
            )
        )
        return QuotaPolicy(policy_id, tenant_id, metric, limit, burst, now_us, now_us)

    def _change(self, connection: Connection, policy: QuotaPolicy, limit: int, burst: int, now_us: int) -> QuotaPolicy:
        policies, counters = schema.quota_policies, schema.quota_counters
        # What was earned until now was earned at the old rate.
        row = connection.execute(select(counters).where(counters.c.policy_id == policy.id).with_for_update()).one()
        bucket = Bucket(row.level, row.reserved, row.refilled_us).refilled(policy.limit, policy.burst, now_us)
        connection.execute(
            update(counters)
            .where(counters.c.policy_id == policy.id)
            .values(level=min(bucket.level, burst * UNITS), refilled_us=bucket.refilled_us)
        )
        connection.execute(
            update(policies).where(policies.c.id == policy.id).values(limit_value=limit, burst=burst, updated_us=now_us)
        )
        return QuotaPolicy(policy.id, policy.tenant_id, policy.metric, limit, burst, policy.created_us, now_us)


def _shown(policy: QuotaPolicy) -> dict[str, object]:
    """For the audit log."""
    return {"metric": policy.metric, "limit": policy.limit, "burst": policy.burst}


def policy_of(row: Row[Any]) -> QuotaPolicy:
    return QuotaPolicy(
        id=row.id,
        tenant_id=row.tenant_id,
        metric=row.metric,
        limit=row.limit_value,
        burst=row.burst,
        created_us=row.created_us,
        updated_us=row.updated_us,
    )


def _of(tenant_id: str) -> Any:
    table = schema.quota_policies
    return select(table).where(table.c.tenant_id == tenant_id).order_by(table.c.id).with_for_update()


def _check(metric: str, limit: int, burst: int | None) -> None:
    if metric not in METRICS:
        raise InvalidRequest(f"metrics are {', '.join(METRICS)}", param="metric")
    if not 0 <= limit <= MAX_LIMIT:
        raise InvalidRequest(f"a limit lies in 0 to {MAX_LIMIT}", param="limit")
    if burst is None:
        return
    if metric == CONCURRENT_REQUESTS:
        raise InvalidRequest("concurrent_requests has no burst", param="burst")
    if not 0 <= burst <= MAX_LIMIT:
        raise InvalidRequest(f"a burst lies in 0 to {MAX_LIMIT}", param="burst")
    if burst < 1 <= limit:
        raise InvalidRequest("a burst of 0 would admit nothing: use a limit of 0", param="burst")
