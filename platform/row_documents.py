"""Many rows in one statement, in a form whose preparation costs the same for one row and for hundreds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import (
    JSON,
    ClauseElement,
    Column,
    Connection,
    Dialect,
    FromClause,
    String,
    Table,
    bindparam,
    cast,
    column,
    func,
    insert,
    select,
    update,
)

POSTGRESQL = "postgresql"
ROWS = "rows"
"""The parameter of a statement on PostgreSQL that is a document of rows."""


def rows_of(columns: Sequence[Column[Any]], name: str = ROWS) -> FromClause:
    """On PostgreSQL, the rows of a JSON document as a table: one parameter, however many rows and columns."""
    wanted = (column(one.name, one.type) for one in columns)
    return (
        func.json_to_recordset(cast(bindparam(name, type_=String), JSON))
        .table_valued(*wanted)
        .render_derived(name=name, with_types=True)
    )


def document(rows: Sequence[Any]) -> str:
    """What `rows_of` reads: dicts by the columns' names."""
    return msgspec.json.encode(rows).decode()


class ManyRows:
    """A statement that is run with many rows, each a dict by the columns' names.

    `postgresql` takes them from `rows_of(columns)`; `sqlite`, which has no way to a server, is run once a row.
    Neither is compiled more than once.
    """

    def __init__(self, columns: Sequence[Column[Any]], postgresql: ClauseElement, sqlite: ClauseElement) -> None:
        self._columns = columns
        self._statements: Mapping[bool, ClauseElement] = {True: postgresql, False: sqlite}
        self._compiled: dict[bool, tuple[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]]] = {}

    @classmethod
    def insert(cls, table: Table) -> ManyRows:
        """Insert rows of all columns."""
        columns = list(table.c)
        rows = rows_of(columns)
        names = [one.name for one in columns]
        return cls(columns, insert(table).from_select(names, select(*rows.c)), insert(table))

    @classmethod
    def update(cls, table: Table, keys: Sequence[Column[Any]], changed: Sequence[Column[Any]]) -> ManyRows:
        """Set the `changed` columns of the rows that `keys` name."""
        columns = [*keys, *changed]
        rows = rows_of(columns)
        many = update(table).values({one.name: rows.c[one.name] for one in changed})
        single = update(table).values({one.name: bindparam(f"new_{one.name}", type_=one.type) for one in changed})
        for key in keys:
            many = many.where(key == rows.c[key.name])
            single = single.where(key == bindparam(f"new_{key.name}", type_=key.type))
        return cls(columns, many, single)

    def run(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run it with these; nothing where there are none."""
        if not rows:
            return
        dialect = connection.dialect
        is_postgresql = dialect.name == POSTGRESQL
        if is_postgresql not in self._compiled:
            self._compiled[is_postgresql] = self._compile(dialect)
        text, values_of = self._compiled[is_postgresql]
        if is_postgresql:
            connection.exec_driver_sql(text, {ROWS: document(rows)})
        else:
            connection.exec_driver_sql(text, [values_of(row) for row in rows])

    def _compile(self, dialect: Dialect) -> tuple[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]]:
        compiled = self._statements[dialect.name == POSTGRESQL].compile(dialect=dialect)
        order = [name.removeprefix("new_") for name in getattr(compiled, "positiontup", None) or ()]
        encoded = {one.name for one in self._columns if isinstance(one.type, JSON)}

        def values_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
            return tuple(document(row[name]) if name in encoded else row[name] for name in order)

        return str(compiled), values_of


@functools.cache
def text_of(statement: ClauseElement, dialect: Dialect) -> str:
    """A statement as the driver takes it. Reading through the driver spares what SQLAlchemy does for each value."""
    return str(statement.compile(dialect=dialect))
