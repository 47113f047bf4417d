"""Statements for many rows. A statement for hundreds of rows takes no longer to prepare than one for a single row."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

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
    delete,
    func,
    insert,
    select,
    update,
)

from loramux.migrations.pipeline import pipeline

POSTGRESQL = "postgresql"
ROWS = "rows"
"""Name of the PostgreSQL parameter that contains the rows, as a JSON document."""


def rows_of(columns: Sequence[Column[Any]], name: str = ROWS) -> FromClause:
    """Return a PostgreSQL table of the rows in a JSON document, which is a single parameter for any number of rows."""
    wanted = (column(one.name, one.type) for one in columns)
    return (
        func.json_to_recordset(cast(bindparam(name, type_=String), JSON))
        .table_valued(*wanted)
        .render_derived(name=name, with_types=True)
    )


def document(rows: Sequence[Any]) -> str:
    """Encode records, whose fields are named like the columns, as the JSON document that `rows_of` reads."""
    return msgspec.json.encode(rows).decode()


class BulkStatement:
    """A statement for many rows, compiled once. Each row is a `record` with fields named like the columns.

    `postgresql` reads the rows from `rows_of(columns, name)`. `sqlite` runs once per row, because SQLite has no round
    trips to save.
    """

    def __init__(
        self,
        name: str,
        record: type[msgspec.Struct],
        columns: Sequence[Column[Any]],
        postgresql: ClauseElement,
        sqlite: ClauseElement,
    ) -> None:
        # PostgreSQL would read a missing field as null.
        assert {one.name for one in columns} <= set(record.__struct_fields__), (name, record)
        self.name = name
        self._documents = {one.name for one in columns if isinstance(one.type, JSON)}
        self._statements: Mapping[bool, ClauseElement] = {True: postgresql, False: sqlite}
        self._compiled: dict[bool, tuple[str, tuple[str, ...]]] = {}

    @classmethod
    def insert(cls, table: Table, record: type[msgspec.Struct]) -> BulkStatement:
        columns, name = list(table.c), f"new_{table.name}"
        names = [one.name for one in columns]
        many = insert(table).from_select(names, select(*rows_of(columns, name).c))
        return cls(name, record, columns, many, insert(table))

    @classmethod
    def update(
        cls, table: Table, record: type[msgspec.Struct], keys: Sequence[Column[Any]], changed: Sequence[Column[Any]]
    ) -> BulkStatement:
        """A statement that sets the `changed` columns of the rows identified by `keys`."""
        columns, name = [*keys, *changed], f"changed_{table.name}"
        rows = rows_of(columns, name)
        many = update(table).values({one.name: rows.c[one.name] for one in changed})
        single = update(table).values({one.name: bindparam(f"new_{one.name}", type_=one.type) for one in changed})
        for key in keys:
            many = many.where(key == rows.c[key.name])
            single = single.where(key == bindparam(f"new_{key.name}", type_=key.type))
        return cls(name, record, columns, many, single)

    @classmethod
    def delete(cls, table: Table, record: type[msgspec.Struct], keys: Sequence[Column[Any]]) -> BulkStatement:
        name = f"deleted_{table.name}"
        rows = rows_of(keys, name)
        many = single = delete(table)
        for key in keys:
            many = many.where(key == rows.c[key.name])
            single = single.where(key == bindparam(f"new_{key.name}", type_=key.type))
        return cls(name, record, keys, many, single)

    def compiled(self, dialect: Dialect) -> tuple[str, tuple[str, ...]]:
        is_postgresql = dialect.name == POSTGRESQL
        found = self._compiled.get(is_postgresql)
        if found is None:
            compiled = self._statements[is_postgresql].compile(dialect=dialect)
            order = getattr(compiled, "positiontup", None) or ()
            found = str(compiled), tuple(name.removeprefix("new_") for name in order)
            self._compiled[is_postgresql] = found
        return found

    def values_of(self, row: msgspec.Struct, order: Sequence[str]) -> tuple[Any, ...]:
        values = [getattr(row, name) for name in order]
        for name in self._documents:
            values[order.index(name)] = document(getattr(row, name))
        return tuple(values)


Write: TypeAlias = tuple[BulkStatement, Sequence[msgspec.Struct]]
"""A statement and the rows to run it with."""


def write_together(connection: Connection, writes: Sequence[Write], is_last: bool = False) -> None:
    """Run the statements in the given order. PostgreSQL runs them in a single round trip.

    With `is_last`, PostgreSQL also commits a `write_in_pipelines` transaction in the same round trip.
    """
    wanted = [(statement, rows) for statement, rows in writes if rows]
    if connection.dialect.name != POSTGRESQL:
        for statement, rows in wanted:
            text, order = statement.compiled(connection.dialect)
            connection.exec_driver_sql(text, [statement.values_of(row, order) for row in rows])
    elif wanted:
        with pipeline(connection, is_last) as run:
            for statement, rows in wanted:
                run(statement.compiled(connection.dialect)[0], {statement.name: document(rows)})


@functools.lru_cache(maxsize=64)
def text_of(statement: ClauseElement, dialect: Dialect) -> str:
    """Return a statement's text. Passing it to the driver avoids SQLAlchemy's overhead for each value that is read."""
    return str(statement.compile(dialect=dialect))
