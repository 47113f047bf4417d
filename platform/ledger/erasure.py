"""Erases a tenant's individual requests from the ledger, and keeps their sums."""

from __future__ import annotations

import time

from sqlalchemy import String, cast, delete, exists, func, literal, select, update

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.errors import Unavailable
from loramux.platform.ledger.rollups import UsageRollups

AT_ONCE = 1000
"""Maximum number of requests erased in one transaction. On SQLite, a transaction blocks all other writers."""
FOLD_TIMEOUT_S = 10.0

_events, _adjustments, _batches = schema.usage_events, schema.usage_adjustments, schema.usage_batches
_series, _reservations = schema.usage_series, schema.reservations


class UsageErasure:
    """Deletes the ledger entries of a tenant whose requests have all been settled. Blocking.

    The rollups keep the sums, by key, adapter, model and status, for ranges that begin and end on whole hours (UTC).
    The names of end users are replaced by meaningless ones. If a call is interrupted, another call continues.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rollups = UsageRollups(database)

    def count(self, tenant_id: str) -> int:
        """Return the number of the tenant's requests in the ledger."""
        with self._database.read() as connection:
            query = select(func.count()).where(_events.c.tenant_id == tenant_id)
            return int(connection.execute(query).scalar_one())

    def erase(self, tenant_id: str) -> int:
        """Erase the tenant's entries and return their number.

        Raises Unavailable if entries are not yet in the rollups after FOLD_TIMEOUT_S.
        """
        with self._database.write() as connection:
            # A late settlement would otherwise correct an event that is no longer there.
            recovered = (_reservations.c.tenant_id == tenant_id) & (_reservations.c.state == "recovered")
            connection.execute(delete(_reservations).where(recovered))
        due_s, total = time.monotonic() + FOLD_TIMEOUT_S, 0
        while True:
            self._rollups.fold_all()
            while num_erased := self._erase_some(tenant_id):
                total += num_erased
            if self.count(tenant_id) == 0:
                break
            # Another gateway is adding the last entries to the rollups.
            if time.monotonic() > due_s:
                raise Unavailable("the ledger is still being summed up; try again", retry_after_s=5.0)
            time.sleep(0.05)
        with self._database.write() as connection:
            named = (_series.c.tenant_id == tenant_id) & (_series.c.end_user != "")
            nameless = literal("purged-") + cast(_series.c.id, String)
            connection.execute(update(_series).where(named).values(end_user=nameless))
        return total

    def _erase_some(self, tenant_id: str) -> int:
        waiting = select(_batches.c.id)
        # An adjustment is added to the sums of its event's series, so the event must be there until then.
        is_adjusted_later = exists().where(
            _adjustments.c.request_id == _events.c.request_id, _adjustments.c.batch_id.in_(waiting)
        )
        some = select(_events.c.request_id).where(
            _events.c.tenant_id == tenant_id, _events.c.batch_id.not_in(waiting), ~is_adjusted_later
        )
        with self._database.write() as connection:
            ids = connection.scalars(some.limit(AT_ONCE)).all()
            for table in (_adjustments, _events):
                connection.execute(delete(table).where(table.c.request_id.in_(ids)))
        return len(ids)
