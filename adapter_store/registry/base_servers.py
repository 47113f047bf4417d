"""The servers of each base, which report to the database while they run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, delete, insert, literal, select, text, update

from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import adapter_versions, base_servers, bases, version_bases
from loramux.migrations.upserts import upsert

SILENT_S = 60.0
"""A server that has not reported for this many seconds is `silent`, and no longer counts as serving its base."""
GONE_S = 600.0
"""A server that has not reported for this many seconds is no longer listed.

Its row is deleted when another server first reports.
"""

_MAX_ADDRESS_CHARS = 300
_TAKEN_OVER = ("ready", "archived", "quarantined")
"""States of versions that the first base has been serving or can serve again."""

ServerState = Literal["serving", "draining", "silent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseServer:
    """A server of a base. A server that stops normally is removed, so a `silent` server has crashed or cannot reach the
    database.
    """

    id: str
    address: str
    state: ServerState
    seen_us: int


class OwnServer:
    """This server's row. Blocking."""

    def __init__(
        self, database: Database, base_id: str, served_name: str, address: str, prompt_sha256: str | None = None
    ) -> None:
        self._database = database
        self._base_id = base_id
        self._served_name = served_name
        self._prompt_sha256 = prompt_sha256
        self.id = new_id("srv")
        self._address = address[:_MAX_ADDRESS_CHARS]

    def report(self, is_draining: bool) -> None:
        """Record that the server is running. Registers the base again if it was forgotten in the meantime."""
        columns = base_servers.c
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            values = {"state": "draining" if is_draining else "serving", "seen_us": now_us}
            is_known = connection.execute(update(base_servers).where(columns.id == self.id).values(values)).rowcount
            if is_known:
                return
            # This locks the bases first, so that deleting the other servers' rows cannot deadlock.
            register_base(self._database, connection, self._base_id, self._served_name, self._prompt_sha256)
            values |= {"id": self.id, "base_id": self._base_id, "address": self._address}
            connection.execute(insert(base_servers).values(values))
            connection.execute(delete(base_servers).where(columns.seen_us < _gone_us(now_us)))

    def leave(self) -> None:
        """Delete the row, because the server is stopping."""
        with self._database.write() as connection:
            connection.execute(delete(base_servers).where(base_servers.c.id == self.id))


def lock_bases(database: Database, connection: Connection) -> None:
    """Let one transaction at a time add or delete bases, so that only one base can be the first."""
    if not database.is_sqlite:
        connection.execute(text("LOCK TABLE bases IN SHARE ROW EXCLUSIVE MODE"))


def register_base(
    database: Database, connection: Connection, base_id: str, served_name: str, prompt_sha256: str | None
) -> None:
    """Add a base, or update its served name and the hash of its tokenizer and chat templates.

    Versions of earlier releases count as validated for the first base that registers, because they were accepted when
    each database had one base. Their rows do not name the base whose server received them.
    """
    lock_bases(database, connection)
    now_us = database.now_us(connection)
    is_first = connection.execute(select(bases.c.id).limit(1)).first() is None
    changes = {"served_name": served_name, "prompt_sha256": prompt_sha256}
    statement = upsert(connection, bases).values({"id": base_id, "created_us": now_us, **changes})
    connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=changes))
    if is_first:
        columns = adapter_versions.c
        taken_over = select(columns.id, literal(base_id), literal("ready"), literal(now_us)).where(
            columns.state.in_(_TAKEN_OVER), columns.base_id.is_(None)
        )
        names = ["version_id", "base_id", "state", "checked_us"]
        connection.execute(insert(version_bases).from_select(names, taken_over))


def servers_by_base(connection: Connection, now_us: int) -> Mapping[str, Sequence[BaseServer]]:
    """Return the servers of each base, sorted by address."""
    columns = base_servers.c
    query = select(base_servers).where(columns.seen_us >= _gone_us(now_us)).order_by(columns.address, columns.id)
    found: dict[str, list[BaseServer]] = defaultdict(list)
    silent_us = now_us - round(SILENT_S * 1_000_000)
    for row in connection.execute(query):
        state: ServerState = "silent" if row.seen_us < silent_us else row.state
        found[row.base_id].append(BaseServer(id=row.id, address=row.address, state=state, seen_us=row.seen_us))
    return found


def _gone_us(now_us: int) -> int:
    return now_us - round(GONE_S * 1_000_000)
