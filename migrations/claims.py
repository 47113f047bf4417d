"""SQL for rows of work that one server at a time claims, and that another server continues if the first one dies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, not_, or_, select, update

from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id

NO_CLAIM: Mapping[str, Any] = {"claimed_by": None, "claim_expires_us": None}
LEASE_US = 30_000_000
"""Duration of a claim that is not renewed, in microseconds. Its server is then presumed dead."""


class RowClaims:
    """One server's claims on the rows of a table. Blocking.

    The table has the columns `id`, `state`, `claimed_by`, `claim_expires_us` and, for `find`, `tenant_id`. Rows in one
    of the states `unfinished` can be claimed while no server holds a claim that has not expired.
    """

    def __init__(self, database: Database, table: Table, unfinished: Sequence[str], lease_us: int = LEASE_US) -> None:
        self._database = database
        self._table = table
        self._unfinished = unfinished
        self._lease_us = lease_us
        self.lease_s = lease_us / 1_000_000
        self.server_id = new_id("srv")
        """Unique to this process. After a restart, earlier claims count as another server's."""

    def find(
        self,
        but_tenants: Collection[str] = (),
        *conditions: ColumnElement[bool],
        order: ColumnElement[Any] | None = None,
    ) -> str | None:
        """Return the oldest row that can be claimed and meets the conditions, except those of `but_tenants`. With
        `order`, return the row with the least value, and the oldest of several.

        Claiming first looks, because servers look often, and a writing transaction would delay reservations on SQLite.
        """
        table = self._table.c
        with self._database.read() as connection:
            is_free = self.claimable(self._database.now_us(connection))
            query = select(table.id).where(is_free, table.tenant_id.not_in(but_tenants))
            orders = (table.id,) if order is None else (order, table.id)
            return connection.scalar(query.where(*conditions).order_by(*orders).limit(1))

    def claim(
        self, connection: Connection, row_id: str, values: Mapping[str, Any], *conditions: ColumnElement[bool]
    ) -> bool:
        """Claim a row and change it. Return False if another server has claimed or ended it, or if the row no longer
        meets the conditions.
        """
        now_us = self._database.now_us(connection)
        is_free = (self._table.c.id == row_id, self.claimable(now_us), *conditions)
        claimed = {**values, "claimed_by": self.server_id, "claim_expires_us": now_us + self._lease_us}
        return connection.execute(update(self._table).where(*is_free).values(claimed)).rowcount > 0

    def change(self, connection: Connection, row_id: str, values: Mapping[str, Any]) -> bool:
        """Change a row that this server holds, and renew the claim unless the change ends it.

        Return False if the row has ended or another server has taken it over.
        """
        table = self._table.c
        is_own = (table.id == row_id, table.state.in_(self._unfinished), table.claimed_by == self.server_id)
        renewed = {"claim_expires_us": self._database.now_us(connection) + self._lease_us, **values}
        return connection.execute(update(self._table).where(*is_own).values(renewed)).rowcount > 0

    def claimable(self, now_us: int) -> ColumnElement[bool]:
        """Match the rows that a server may claim."""
        table = self._table.c
        # Other servers' leases can be longer than this one's.
        longest_us = max(self._lease_us, LEASE_US)
        return table.state.in_(self._unfinished) & is_free(now_us, table.claim_expires_us, longest_us)


def is_free(now_us: int, expires_us: ColumnElement[Any], lease_us: int = LEASE_US) -> ColumnElement[bool]:
    """Match rows that a server may claim: neither postponed nor under an unexpired claim.

    A claim that expires more than two leases from now was made before the clock was set back, and does not count.
    """
    return or_(expires_us.is_(None), not_(expires_us.between(now_us + 1, now_us + 2 * lease_us)))


def end_claims(database: Database, tables: Collection[Table]) -> None:
    """End the claims on rows of these tables. The caller must be the only server on the database, so that the claims
    are those of an earlier process.
    """
    with database.write() as connection:
        for table in tables:
            connection.execute(update(table).where(table.c.claimed_by.is_not(None)).values(NO_CLAIM))
