"""Writes events for the adapters that this server's engine has loaded, evicted, or found to be broken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import select

from loramux.engine.protocol.messages import AdapterChange, StatsRequest
from loramux.migrations.database import Database
from loramux.migrations.events import EventType, note_event
from loramux.migrations.schema import adapter_versions, adapters

TYPES: dict[str, EventType] = {
    "loaded": "adapter.loaded",
    "evicted": "adapter.evicted",
    "struck": "adapter.struck",
}
MAX_VERSIONS = 20
"""Largest number of versions, of all tenants, for which one change is reported, if many have the same weights."""


class ResidencyEvents:
    """Reports the changes of one engine. `server` tells servers apart, without telling tenants an address."""

    def __init__(self, database: Database, server: str) -> None:
        self._database = database
        self._server = server
        self._seen = 0

    def question(self) -> StatsRequest:
        """Return the call whose answer has the changes that have not been reported."""
        return StatsRequest(changes_after=self._seen)

    def report(self, changes: Sequence[AdapterChange]) -> int:
        """Write the events of new changes, and return their number. Blocking."""
        new = [change for change in changes if change.number > self._seen and change.kind in TYPES]
        if not new:
            return 0
        columns = adapter_versions.c
        query = (
            select(columns.digest, columns.id, columns.number, columns.adapter_id, adapters.c.tenant_id)
            .join(adapters, adapters.c.id == columns.adapter_id)
            .where(columns.digest.in_({change.digest for change in new}), columns.state.in_(("ready", "quarantined")))
            .order_by(columns.id)
        )
        num_written = 0
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            versions = defaultdict(list)
            for row in connection.execute(query):
                versions[row.digest].append(row)
            for change in new:
                for row in versions[change.digest][:MAX_VERSIONS]:
                    data = {"version_id": row.id, "version": row.number, "digest": row.digest, "server": self._server}
                    kind = TYPES[change.kind]
                    note_event(connection, now_us, kind, data, tenant_id=row.tenant_id, adapter_id=row.adapter_id)
                    num_written += 1
        self._seen = new[-1].number
        return num_written
