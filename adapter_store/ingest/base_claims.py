"""SQL for validating ready versions for another base. One server at a time can claim a version for its base."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, delete, func, not_, or_, select, update

from loramux.adapter_store.errors import ClaimLost, printable
from loramux.adapter_store.ingest.turns import Candidate, TenantTurns
from loramux.adapter_store.registry.bases import note_validated
from loramux.adapter_store.registry.records import AdapterVersion
from loramux.adapter_store.registry.registry import select_versions, version_of
from loramux.migrations.claims import NO_CLAIM, is_free
from loramux.migrations.database import LONGEST_READ_S, Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import adapter_versions, adapters, version_bases
from loramux.migrations.upserts import upsert

_MAX_MESSAGE_CHARS = 1000
_COLUMNS = version_bases.c


class BaseClaims:
    """One server's claims on versions for its base: unclaimed -> validating -> ready or rejected.

    A claim that is not renewed expires, and any server of the base can then claim the version. Nothing here changes a
    version's state or its verdicts for other bases.
    """

    def __init__(self, database: Database, base_id: str, lease_s: float) -> None:
        self._database = database
        self._base_id = base_id
        self._lease_us = round(lease_s * 1_000_000)
        self.lease_s = lease_s
        self.server_id = new_id("srv")

    def claim_version(self, version_id: str) -> AdapterVersion | None:
        """Claim a version, or return None if it has a verdict for the base, is already claimed, or is not ready."""
        with self._database.write() as connection:
            query = select_versions().where(adapter_versions.c.id == version_id, adapter_versions.c.state == "ready")
            row = connection.execute(query).first()
            if row is None:
                return None
            now_us = self._database.now_us(connection)
            claim = {"claimed_by": self.server_id, "claim_expires_us": now_us + self._lease_us}
            statement = upsert(connection, version_bases).values(
                version_id=version_id, base_id=self._base_id, state="validating", **claim
            )
            claimed = connection.execute(
                statement.on_conflict_do_update(
                    index_elements=["version_id", "base_id"],
                    set_=claim,
                    where=(_COLUMNS.state == "validating") & is_free(now_us, _COLUMNS.claim_expires_us),
                ).returning(_COLUMNS.version_id)
            )
            return None if claimed.first() is None else version_of(row)

    def renew(self, version_id: str) -> None:
        """Extend the claim to one lease from now. Raises ClaimLost."""
        with self._database.write() as connection:
            expires_us = self._database.now_us(connection) + self._lease_us
            renewed = update(version_bases).where(self._is_own(version_id)).values(claim_expires_us=expires_us)
            _check_claim(connection.execute(renewed).rowcount)

    def give_back(self, version_id: str) -> None:
        """Give up the claim without a verdict. Raises ClaimLost."""
        with self._database.write() as connection:
            _check_claim(connection.execute(delete(version_bases).where(self._is_own(version_id))).rowcount)

    def accept(self, version_id: str) -> None:
        """Record that the version is valid for the base. Raises ClaimLost."""
        with self._database.write() as connection:
            held = select(_COLUMNS.version_id).where(self._is_own(version_id)).with_for_update()
            _check_claim(len(connection.execute(held).all()))
            note_validated(connection, version_id, self._base_id, self._database.now_us(connection))

    def reject(self, version_id: str, code: str, message: str) -> None:
        """Record that the version is not valid for the base, and why. Raises ClaimLost."""
        with self._database.write() as connection:
            verdict = {
                "state": "rejected",
                **NO_CLAIM,
                "code": code,
                "message": printable(message, _MAX_MESSAGE_CHARS),
                "checked_us": self._database.now_us(connection),
            }
            rejected = update(version_bases).where(self._is_own(version_id)).values(verdict)
            _check_claim(connection.execute(rejected).rowcount)

    def _is_own(self, version_id: str) -> ColumnElement[bool]:
        return and_(
            _COLUMNS.version_id == version_id,
            _COLUMNS.base_id == self._base_id,
            _COLUMNS.state == "validating",
            _COLUMNS.claimed_by == self.server_id,
        )


class BaseTurns(TenantTurns):
    """The order in which ready versions without a verdict for a base are validated."""

    def __init__(self, database: Database, base_id: str) -> None:
        super().__init__()
        self._database = database
        self._base_id = base_id

    def _candidates(self, but: Collection[str]) -> list[Candidate]:
        with self._database.read(LONGEST_READ_S) as connection:
            now_us = self._database.now_us(connection)
            query = _candidates(self._base_id, now_us, sorted(but))
            return [Candidate(*row) for row in connection.execute(query)]


def _candidates(base_id: str, now_us: int, but: list[str]) -> Select[*tuple[Any, ...]]:
    columns = adapter_versions.c
    is_unclaimed = or_(_COLUMNS.state.is_(None), is_free(now_us, _COLUMNS.claim_expires_us))
    oldest = func.min(case((is_unclaimed & columns.id.not_in(but), columns.id)))
    return (
        select(oldest, adapters.c.tenant_id, func.count(case((not_(is_unclaimed), 1))))
        .join_from(adapter_versions, adapters)
        .outerjoin(version_bases, (_COLUMNS.version_id == columns.id) & (_COLUMNS.base_id == base_id))
        .where(columns.state == "ready", or_(_COLUMNS.state.is_(None), _COLUMNS.state == "validating"))
        .group_by(adapters.c.tenant_id)
        .having(oldest.is_not(None))
    )


def _check_claim(num_held: int) -> None:
    if num_held == 0:
        raise ClaimLost("another server has taken over the version")
