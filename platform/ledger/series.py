"""The numbers that identify series in the rollups."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import Connection

from loramux.migrations import schema
from loramux.migrations.schema import SERIES
from loramux.migrations.upserts import upsert

SeriesKey = tuple[str, ...]
"""A value for each column of SERIES."""
TENANT = SERIES.index("tenant_id")

MAX_REMEMBERED = 20_000

_series = schema.usage_series


class SeriesNumbers:
    """Caches the numbers of recently used series. A series is never deleted or changed."""

    def __init__(self) -> None:
        self._known: dict[SeriesKey, int] = {}

    def find(self, connection: Connection, keys: Collection[SeriesKey]) -> dict[SeriesKey, int]:
        """Return the numbers of series, creating the series that do not exist yet."""
        known = self._known
        found = {key: known[key] for key in keys if key in known}
        # Write rows in a fixed order, so that two folds never deadlock.
        missing = sorted(key for key in keys if key not in found)
        if missing:
            made = upsert(connection, _series)
            # RETURNING includes an existing row only if the statement updates it, so make an update that changes no
            # value.
            returning = made.on_conflict_do_update(
                index_elements=list(SERIES), set_={"tenant_id": made.excluded.tenant_id}
            ).returning(_series.c.id, *(_series.c[name] for name in SERIES))
            rows = connection.execute(returning, [dict(zip(SERIES, key, strict=True)) for key in missing])
            found |= {tuple(row[1:]): row[0] for row in rows}
        return found

    def remember(self, numbers: Mapping[SeriesKey, int]) -> None:
        """Cache the result of `find`. Call this only after the transaction has committed."""
        if len(self._known) + len(numbers) > MAX_REMEMBERED:
            self._known.clear()
        if len(numbers) <= MAX_REMEMBERED:
            self._known.update(numbers)
