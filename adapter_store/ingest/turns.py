"""Whose version a server validates next: tenants take turns, each with its oldest first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import case, func, not_, select

from loramux.adapter_store.ingest.upload_rows import is_free
from loramux.adapter_store.registry.records import UNFINISHED
from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_versions, adapters


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A tenant's oldest version that no server has, and how many of the tenant's versions servers have now."""

    version_id: str
    tenant_id: str
    num_claimed: int


class IngestTurns:
    """One server's order. Of all tenants with a waiting version, the one with the fewest under way is next.

    Of several, it is the one that this server served longest ago or never, then the one that has waited longest. A
    version thus waits for one validation under way and for one version of each other tenant, however many those have.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        # Of tenants that have waiting versions only.
        self._last_turns: dict[str, int] = {}
        self._num_turns = 0

    def next(self, but: Collection[str] = ()) -> str | None:
        """The version to process next, other than those in `but`; None where none waits. It counts as a turn."""
        candidates = self._candidates(but)
        never = 0
        self._last_turns = {one.tenant_id: self._last_turns.get(one.tenant_id, never) for one in candidates}
        if not candidates:
            return None
        chosen = min(candidates, key=lambda one: (one.num_claimed, self._last_turns[one.tenant_id], one.version_id))
        self._num_turns += 1
        self._last_turns[chosen.tenant_id] = self._num_turns
        return chosen.version_id

    def _candidates(self, but: Collection[str]) -> list[_Candidate]:
        """One of each tenant with a version that waits for a server, or whose server is silent."""
        columns = adapter_versions.c
        with self._database.read() as connection:
            now_us = self._database.now_us(connection)
            oldest = func.min(case((is_free(now_us) & columns.id.not_in(sorted(but)), columns.id)))
            # A version that was put off has no server, and yet is not free before its time.
            is_claimed = columns.claimed_by.is_not(None) & not_(is_free(now_us))
            query = (
                select(oldest, adapters.c.tenant_id, func.count(case((is_claimed, 1))))
                .join(adapters, adapters.c.id == columns.adapter_id)
                .where(columns.state.in_(UNFINISHED))
                .group_by(adapters.c.tenant_id)
                .having(oldest.is_not(None))
            )
            return [_Candidate(*row) for row in connection.execute(query)]
