"""A database's schema as lines of text: every property that the database itself knows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sqlalchemy import Connection, text

_POSTGRES = {
    "column": """
        SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
               pg_get_expr(d.adbin, d.adrelid)
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
             LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped
        ORDER BY c.relname COLLATE "C", a.attnum
    """,
    # Since version 18, PostgreSQL lists NOT NULL (n) here too. The columns above include it.
    "constraint": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid), convalidated FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace AND contype <> 'n'
    """,
    "index": "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    "sequence": """
        SELECT sequencename, data_type, start_value, increment_by, pg_get_serial_sequence('usage_series', 'id')
        FROM pg_sequences WHERE schemaname = 'public'
    """,
    "trigger": """
        SELECT tgrelid::regclass::text, pg_get_triggerdef(oid), tgenabled FROM pg_trigger WHERE NOT tgisinternal
    """,
    "function": """
        SELECT proname, pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
    """,
}


def schema_lines(connection: Connection) -> list[str]:
    """Return a line for each column, constraint, index, sequence, trigger and function.

    A table's columns keep their order. Everything else is sorted.
    """
    lines = _of_sqlite(connection) if connection.dialect.name == "sqlite" else _of_postgres(connection)
    return [line for line in lines if "alembic_version" not in line]


def _of_postgres(connection: Connection) -> Iterator[str]:
    for kind, query in _POSTGRES.items():
        lines = [" | ".join([kind, *(str(value) for value in row)]) for row in connection.execute(text(query))]
        yield from lines if kind == "column" else sorted(lines)


def _of_sqlite(connection: Connection) -> Iterator[str]:
    query = "SELECT type, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type, tbl_name, name"
    for kind, table, written in connection.exec_driver_sql(query).all():
        sql = re.sub(r"\s+", " ", written.replace('"', "")).strip()
        if kind != "table":
            yield f"{kind} | {table} | {sql}"
            continue
        opened, closed = sql.index("("), sql.rindex(")")
        yield f"table | {table} | {sql[closed + 1 :].strip()}"
        # A column that was added later stands after the constraints.
        parts = list(_split(sql[opened + 1 : closed]))
        constraints = [part for part in parts if part.startswith("CONSTRAINT ")]
        yield from (f"column | {table} | {part}" for part in parts if part not in constraints)
        yield from (f"constraint | {table} | {part}" for part in sorted(constraints))


def _split(body: str) -> Iterator[str]:
    """Split at the commas that are outside parentheses."""
    depth, start = 0, 0
    for position, character in enumerate(body):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            yield body[start:position].strip()
            start = position + 1
    yield body[start:].strip()
