"""Reads and writes the tables `replicas` and `adapter_residency`. Blocking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Row, delete, func, insert, select, update

from loramux.adapter_store.registry.base_shares import BaseShare, read_shares
from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_residency, replicas
from loramux.migrations.upserts import upsert
from loramux.platform.replicas.records import MAX_CERTIFICATES_CHARS, ReplicaRow
from loramux.platform.replicas.residency import MAX_SUMMARY_BYTES

MAX_REPLICAS = 128
"""Maximum number of rows to read, newest servers first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The adapters that a server holds. `version` changes whenever `prefixes` does."""

    version: int
    prefixes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReading:
    """The servers' rows, the summaries whose versions differ from the reader's versions, and the bases' shares of
    requests.
    """

    rows: Sequence[Mapping[str, Any]]
    summaries: Mapping[str, Summary]
    shares: Sequence[BaseShare] = ()


class ReplicaTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    def publish(self, row: ReplicaRow, summary: Summary, has_changed: bool) -> None:
        """Write this server's row. Also write its summary if the summary has changed or the row had been deleted."""
        values = msgspec.structs.asdict(row)
        with self._database.write() as connection:
            is_known = connection.execute(update(replicas).where(replicas.c.id == row.id).values(values)).rowcount
            if not is_known:
                connection.execute(insert(replicas).values(values))
            if has_changed or not is_known:
                content = {"replica_id": row.id, "version": summary.version, "summary": summary.prefixes}
                statement = upsert(connection, adapter_residency).values(content)
                connection.execute(statement.on_conflict_do_update(index_elements=["replica_id"], set_=content))

    def remove_predecessors(self, row: ReplicaRow) -> None:
        """Delete the rows of earlier servers at this server's address. They are gone, because only one server can
        listen there. Otherwise, servers that crash again and again would leave more than MAX_REPLICAS rows.
        """
        is_earlier = (replicas.c.address == row.address, replicas.c.id != row.id)
        with self._database.write() as connection:
            earlier = connection.scalars(select(replicas.c.id).where(*is_earlier).with_for_update()).all()
            if earlier:
                connection.execute(delete(adapter_residency).where(adapter_residency.c.replica_id.in_(earlier)))
                connection.execute(delete(replicas).where(replicas.c.id.in_(earlier)))

    def read(self, known: Mapping[str, int]) -> TableReading:
        """Read the rows of up to MAX_REPLICAS servers. `known` contains the versions of the summaries that the reader
        already has.

        Rows and summaries with oversized values are left out, because only an attacker can have written them.
        """
        residency = adapter_residency.c
        is_sane = func.length(replicas.c.certificates) <= MAX_CERTIFICATES_CHARS
        held = replicas.outerjoin(adapter_residency)
        every = select(replicas, residency.version.label("held_version")).select_from(held).where(is_sane)
        with self._database.read() as connection:
            rows = connection.execute(every.order_by(replicas.c.id.desc()).limit(MAX_REPLICAS)).all()
            changed = [row.id for row in rows if row.held_version not in (None, known.get(row.id))]
            summaries: dict[str, Summary] = {}
            if changed:
                is_wanted = residency.replica_id.in_(changed) & (func.length(residency.summary) <= MAX_SUMMARY_BYTES)
                for found in connection.execute(select(adapter_residency).where(is_wanted)):
                    summaries[found.replica_id] = Summary(version=found.version, prefixes=found.summary)
            shares = read_shares(connection)
        return TableReading(rows=[_columns(row) for row in rows], summaries=summaries, shares=shares)

    def remove(self, replica_id: str, beat: int | None = None) -> None:
        """Delete a server's rows. If `beat` is given, delete them only if the row still has this beat."""
        with self._database.write() as connection:
            found = select(replicas.c.id).where(replicas.c.id == replica_id)
            if beat is not None:
                found = found.where(replicas.c.beat == beat)
            if connection.execute(found.with_for_update()).first() is None:
                return
            connection.execute(delete(adapter_residency).where(adapter_residency.c.replica_id == replica_id))
            connection.execute(delete(replicas).where(replicas.c.id == replica_id))


def _columns(row: Row[Any]) -> Mapping[str, Any]:
    # SQLAlchemy's column names belong to a subclass of str, which msgspec does not accept.
    return {str(name): value for name, value in row._mapping.items() if name != "held_version"}
