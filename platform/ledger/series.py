"""The numbers by which rollups name their series."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import Connection

from loramux.migrations import schema
from loramux.migrations.schema import SERIES
from loramux.migrations.upserts import upsert

SeriesKey = tuple[str, ...]
"""A value for each column of SERIES."""
TENANT = SERIES.index("tenant_id")
"""Where a series' tenant is in its key."""

MAX_REMEMBERED = 20_000

_series = schema.usage_series


class SeriesNumbers:
    """Remembers the numbers of series that were added to lately. A series is never taken away or changed."""

    def __init__(self) -> None:
        self._known: dict[SeriesKey, int] = {}

    def find(self, connection: Connection, keys: Collection[SeriesKey]) -> dict[SeriesKey, int]:
        """The numbers of series, which are made where they are not yet there."""
        known = self._known
        found = {key: known[key] for key in keys if key in known}
        # In one order everywhere, so that two folds never wait for each other in a circle.
        missing = sorted(key for key in keys if key not in found)
        if missing:
            made = upsert(connection, _series)
            # What is there already is returned only if it is written; nothing of it changes.
            returning = made.on_conflict_do_update(
                index_elements=list(SERIES), set_={"tenant_id": made.excluded.tenant_id}
            ).returning(_series.c.id, *(_series.c[name] for name in SERIES))
            rows = connection.execute(returning, [dict(zip(SERIES, key, strict=True)) for key in missing])
            found |= {tuple(row[1:]): row[0] for row in rows}
        return found

    def remember(self, numbers: Mapping[SeriesKey, int]) -> None:
        """Keep what `find` said, once its transaction has committed."""
        if len(self._known) + len(numbers) > MAX_REMEMBERED:
            self._known.clear()
        if len(numbers) <= MAX_REMEMBERED:
            self._known.update(numbers)
