"""Writes events for the adapters that this server's engine has loaded, evicted, or found to be broken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import CompoundSelect, Connection, Row, Select, select, union

from loramux.engine.adapters.adapter_changes import unseen
from loramux.engine.protocol.messages import AdapterChange, StatsRequest
from loramux.migrations.database import Database
from loramux.migrations.events import EventType, NewEvent, note_events
from loramux.migrations.schema import (
    adapter_versions,
    adapters,
    reservations,
    usage_events,
    usage_rollups,
    usage_series,
)
from loramux.platform.ledger.grains import DAY_US, HOUR_US, MINUTE_US, VERSION_GRAIN

TYPES: dict[str, EventType] = {
    "loaded": "adapter.loaded",
    "evicted": "adapter.evicted",
    "struck": "adapter.struck",
}
MAX_VERSIONS = 20
"""Largest number of versions, of all tenants, for which one change is reported, if many have the same weights."""

_LATELY_US = 10 * MINUTE_US
"""Age of the requests that are read one by one, in microseconds. The rollups include older ones."""


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
        """Write the events of new changes, and return their number. Blocking.

        If an adapter has been loaded and evicted several times since the last report, only the last change counts.
        """
        new = [change for change in unseen(changes, self._seen) if change.kind in TYPES]
        if not new:
            return 0
        last = {change.digest: change.number for change in new if change.kind != "struck"}
        kept = [change for change in new if change.kind == "struck" or last[change.digest] == change.number]
        with self._database.read() as connection:
            versions = _versions(connection, {change.digest for change in kept}, self._database.now_us(connection))
        noted = [
            NewEvent(
                kind=TYPES[change.kind],
                data={"version_id": row.id, "version": row.number, "digest": row.digest, "server": self._server},
                tenant_id=row.tenant_id,
                adapter_id=row.adapter_id,
            )
            for change in kept
            for row in versions.get(change.digest, ())[:MAX_VERSIONS]
        ]
        if noted:
            with self._database.write() as connection:
                note_events(connection, self._database.now_us(connection), noted)
        self._seen = new[-1].number
        return len(noted)


def _versions(connection: Connection, digests: Collection[str], now_us: int) -> Mapping[str, Sequence[Row[Any]]]:
    """Return the serving versions with these weights whose tenants may know what happens to them: see `_known`."""
    rows = connection.execute(_with_weights(digests)).all()
    known = _known(connection, rows, {row.tenant_id for row in rows}, now_us)
    versions: dict[str, list[Row[Any]]] = defaultdict(list)
    for row in rows:
        if row.state in ("ready", "quarantined") and (row.digest, row.tenant_id) in known:
            versions[row.digest].append(row)
    return versions


def used_digests(database: Database, digests: Collection[str], tenant_id: str) -> set[str]:
    """Return the digests of the weights whose state the tenant may know: see `_known`. Blocking."""
    with database.read() as connection:
        rows = connection.execute(_with_weights(digests)).all()
        known = _known(connection, rows, {tenant_id}, database.now_us(connection))
    return {digest for digest, _ in known}


def _with_weights(digests: Collection[str]) -> Select[Any]:
    columns = adapter_versions.c
    return (
        select(
            columns.digest,
            columns.id,
            columns.number,
            columns.state,
            columns.adapter_id,
            columns.pinned_us,
            columns.created_us,
            adapters.c.tenant_id,
        )
        .join(adapters, adapters.c.id == columns.adapter_id)
        .where(columns.digest.in_(digests))
        .order_by(columns.id)
    )


def _known(
    connection: Connection, versions: Sequence[Row[Any]], tenant_ids: Collection[str], now_us: int
) -> set[tuple[str, str]]:
    """Return the digests of these versions with those of these tenants that may know the state of the weights: those
    that have pinned them, or have created or used a version of them in the last day.

    If several tenants have the same weights, the engine has them once. A tenant must not learn that another one uses
    them, so the answer does not depend on other tenants' versions and requests.
    """
    digest_of = {row.id: row.digest for row in versions}
    requested = connection.execute(_requested(set(digest_of.values()), tenant_ids, now_us))
    # A version can have been created, and requested, since the versions were read.
    known = {
        (digest_of[row.adapter_version_id], row.tenant_id) for row in requested if row.adapter_version_id in digest_of
    }
    return known | {
        (row.digest, row.tenant_id)
        for row in versions
        if row.tenant_id in tenant_ids and (row.pinned_us is not None or row.created_us > now_us - DAY_US)
    }


def _requested(digests: Collection[str], tenant_ids: Collection[str], now_us: int) -> CompoundSelect[Any]:
    """Select which of these tenants have sent a request to which version with these weights in the last day. Each
    branch reads an index.
    """
    # There can be more versions than a statement has room for.
    version_ids = select(adapter_versions.c.id).where(adapter_versions.c.digest.in_(digests))
    running, series = reservations.c, usage_series.c
    done, sums = usage_events.c, usage_rollups.c
    return union(
        select(running.tenant_id, running.adapter_version_id).where(
            running.state == "open", running.adapter_version_id.in_(version_ids), running.tenant_id.in_(tenant_ids)
        ),
        select(done.tenant_id, done.adapter_version_id).where(
            done.tenant_id.in_(tenant_ids),
            done.finished_us > now_us - _LATELY_US,
            done.adapter_version_id.in_(version_ids),
        ),
        select(sums.tenant_id, series.adapter_version_id)
        .join(usage_series, series.id == sums.series_id)
        .where(
            sums.tenant_id.in_(tenant_ids),
            sums.grain == VERSION_GRAIN,
            sums.span_us == HOUR_US,
            sums.start_us > now_us - DAY_US,
            series.adapter_version_id.in_(version_ids),
        ),
    )
