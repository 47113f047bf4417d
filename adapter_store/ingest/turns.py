"""Chooses which version a server validates next. Tenants take turns, and each tenant's oldest version comes first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import case, func, not_, select

from loramux.adapter_store.ingest.upload_rows import is_for_base
from loramux.adapter_store.registry.records import UNFINISHED
from loramux.migrations.claims import is_free
from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_versions, adapters


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tenant's oldest unclaimed version, and the number of the tenant's versions that are claimed now."""

    version_id: str
    tenant_id: str
    num_claimed: int


class TenantTurns(ABC):
    """One server's order: among tenants with waiting versions, the one with the fewest validations in progress is next.

    Ties go to a tenant that this server has never served, then to the one that it served longest ago, then to the
    tenant that has waited longest. A tenant's oldest version therefore waits for at most one validation in progress and
    one version of each other tenant, no matter how many versions the other tenants have.
    """

    def __init__(self) -> None:
        # The number of each tenant's last turn, for tenants with waiting versions only.
        self._last_turns: dict[str, int] = {}
        self._num_turns = 0

    def next(self, but: Collection[str] = ()) -> str | None:
        """Return the next version to process that is not in `but`, or None if there is none.

        The call counts as a turn of that version's tenant.
        """
        candidates = self._candidates(but)
        never = 0
        self._last_turns = {one.tenant_id: self._last_turns.get(one.tenant_id, never) for one in candidates}
        if not candidates:
            return None
        chosen = min(candidates, key=lambda one: (one.num_claimed, self._last_turns[one.tenant_id], one.version_id))
        self._num_turns += 1
        self._last_turns[chosen.tenant_id] = self._num_turns
        return chosen.version_id

    @abstractmethod
    def _candidates(self, but: Collection[str]) -> list[Candidate]:
        """Return one candidate for each tenant with a version that is unclaimed or has an expired claim."""


class IngestTurns(TenantTurns):
    """The order of uploaded versions. `base_id` is the base that this server serves."""

    def __init__(self, database: Database, base_id: str | None = None) -> None:
        super().__init__()
        self._database = database
        self._base_id = base_id

    def _candidates(self, but: Collection[str]) -> list[Candidate]:
        columns = adapter_versions.c
        with self._database.read() as connection:
            now_us = self._database.now_us(connection)
            is_waiting = is_free(now_us, columns.claim_expires_us) & is_for_base(self._base_id, now_us)
            oldest = func.min(case((is_waiting & columns.id.not_in(sorted(but)), columns.id)))
            # A postponed version is unclaimed, but cannot be claimed until its retry is due.
            is_claimed = columns.claimed_by.is_not(None) & not_(is_free(now_us, columns.claim_expires_us))
            query = (
                select(oldest, adapters.c.tenant_id, func.count(case((is_claimed, 1))))
                .join(adapters, adapters.c.id == columns.adapter_id)
                .where(columns.state.in_(UNFINISHED))
                .group_by(adapters.c.tenant_id)
                .having(oldest.is_not(None))
            )
            return [Candidate(*row) for row in connection.execute(query)]
