"""Writes an event once a budget is nearly used up: once in each day or month that the budget counts."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, Row, cast, func, select, update

from loramux.migrations.database import Database
from loramux.migrations.events import note_event
from loramux.migrations.schema import quota_counters, quota_policies, tenants
from loramux.platform.periods import Period, window_at
from loramux.platform.quotas.metrics import METRICS, Kind
from loramux.platform.quotas.policies import ADAPTER, SHADOW

AT_ONCE = 100
_BUDGETS = sorted(name for name, metric in METRICS.items() if metric.kind is Kind.BUDGET)


class BudgetEvents:
    """Looks at the counters of budgets. Blocking. Several servers can look: the first to mark a counter announces it.

    Reservations and settlements know nothing of this, so it costs them nothing.
    """

    def __init__(self, database: Database, percent: int) -> None:
        self._database = database
        self._percent = percent

    def check(self) -> int:
        """Announce the budgets whose use has reached the threshold in the present window. Return their number."""
        counters, policies = quota_counters.c, quota_policies.c
        with self._database.read() as connection:
            now_us = self._database.now_us(connection)
            # The product of an integer limit, which can be 10^18, would not fit in 64 bits.
            is_reached = cast(counters.used, Float) * 100 >= cast(policies.limit_value, Float) * self._percent
            zones = {"UTC", *connection.scalars(select(tenants.c.timezone).distinct())}
            present = {window_at(period, zone, now_us).start_us for period in Period for zone in zones}
            query = (
                select(
                    *(counters.policy_id, counters.subject_id, counters.window_start_us, counters.used),
                    *(policies.scope, policies.tenant_id, policies.metric, policies.mode, policies.limit_value),
                    policies.subject_id.label("limited_id"),
                    tenants.c.timezone,
                )
                .join(quota_policies, policies.id == counters.policy_id)
                .outerjoin(tenants, tenants.c.id == func.coalesce(policies.tenant_id, counters.subject_id))
                .where(
                    policies.metric.in_(_BUDGETS),
                    policies.mode != SHADOW,
                    policies.limit_value > 0,
                    counters.window_start_us.in_(sorted(present)),
                    counters.announced_us.is_(None),
                    counters.used > 0,
                    is_reached,
                )
                .limit(AT_ONCE)
            )
            found: list[Row[Any]] = list(connection.execute(query))
        return sum(self._announce(row) for row in found)

    def _announce(self, row: Row[Any]) -> bool:
        counters = quota_counters.c
        period = METRICS[row.metric].period
        assert period is not None
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            window = window_at(period, row.timezone or "UTC", now_us)
            is_present = row.window_start_us == window.start_us
            # The mark is also set for a day that began with the present month, so that it is not read again.
            marked = connection.execute(
                update(quota_counters)
                .where(
                    counters.policy_id == row.policy_id,
                    counters.subject_id == row.subject_id,
                    counters.window_start_us == row.window_start_us,
                    counters.announced_us.is_(None),
                )
                .values(announced_us=now_us)
            )
            # Platform policies, and those of shared adapters, count the calling tenant.
            tenant_id = row.subject_id if row.subject_id.startswith("ten_") else row.tenant_id
            if marked.rowcount == 0 or not is_present or tenant_id is None:
                return False
            data = {
                # Another tenant's limit on its shared adapter keeps its identifier to itself.
                "quota_id": row.policy_id if row.tenant_id in (None, tenant_id) else None,
                "metric": row.metric,
                "scope": row.scope,
                "subject_id": row.limited_id,
                "mode": row.mode,
                "limit": row.limit_value,
                "used": row.used,
                "percent": row.used * 100 // row.limit_value,
                "window_start": window.start_us // 1_000_000,
                "window_end": window.end_us // 1_000_000,
            }
            adapter_id = row.limited_id if row.scope == ADAPTER else None
            note_event(connection, now_us, "budget.threshold", data, tenant_id=tenant_id, adapter_id=adapter_id)
            return True
