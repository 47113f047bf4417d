"""Triggers that count the bytes stored for each tenant, however rows are added, changed or deleted.

An upgrade installs them again only if it has a step to run or a trigger is missing, so a change to them needs a step.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, inspect

SIZES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "responses": ("{length}({row}.content)", ("content",)),
    "chat_completions": ("{length}({row}.completion) + {length}({row}.messages)", ("completion", "messages")),
    "conversations": ("{row}.num_bytes", ("num_bytes",)),
}
"""By table, the number of bytes that a row counts, and the columns that it depends on."""

# The trigger is deferred to the commit, so a transaction locks the tenant's row of `stored_bytes` after all other rows.
# Transactions therefore cannot deadlock on it, unless they change rows of several tenants.
_POSTGRES_FUNCTION = """
CREATE OR REPLACE FUNCTION loramux_count_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO stored_bytes (tenant_id, num_bytes) VALUES (NEW.tenant_id, {new})
            ON CONFLICT (tenant_id) DO UPDATE SET num_bytes = stored_bytes.num_bytes + excluded.num_bytes;
    ELSIF TG_OP = 'UPDATE' THEN
        UPDATE stored_bytes SET num_bytes = num_bytes + ({new}) - ({old}) WHERE tenant_id = NEW.tenant_id;
    ELSE
        UPDATE stored_bytes SET num_bytes = num_bytes - ({old}) WHERE tenant_id = OLD.tenant_id;
    END IF;
    RETURN NULL;
END $$
"""

_SQLITE = {
    "insert": "INSERT INTO stored_bytes (tenant_id, num_bytes) VALUES (NEW.tenant_id, {new}) "
    "ON CONFLICT (tenant_id) DO UPDATE SET num_bytes = num_bytes + excluded.num_bytes",
    "update": "UPDATE stored_bytes SET num_bytes = num_bytes + ({new}) - ({old}) WHERE tenant_id = NEW.tenant_id",
    "delete": "UPDATE stored_bytes SET num_bytes = num_bytes - ({old}) WHERE tenant_id = OLD.tenant_id",
}


def storage_triggers(dialect: str) -> list[tuple[str, str]]:
    """Return the table and the name of each trigger, in the order of SIZES."""
    if dialect == "postgresql":
        return [(table, "stored_bytes_changed") for table in SIZES]
    return [(table, _sqlite_trigger(table, change)) for table in SIZES for change in _SQLITE]


def install_storage_triggers(connection: Connection) -> None:
    """Create the triggers after an upgrade. Does nothing if the schema has no `stored_bytes` table yet."""
    if "stored_bytes" not in inspect(connection).get_table_names():
        return
    for table in SIZES:
        if connection.dialect.name == "postgresql":
            _install_on_postgres(connection, table)
        else:
            _install_on_sqlite(connection, table)


def _size(table: str, row: str, dialect: str) -> str:
    # SQLite's `octet_length` is newer than the oldest supported version. Its `length` counts a blob's bytes.
    return SIZES[table][0].format(length="octet_length" if dialect == "postgresql" else "length", row=row)


def _install_on_postgres(connection: Connection, table: str) -> None:
    new, old = (_size(table, row, "postgresql") for row in ("NEW", "OLD"))
    connection.exec_driver_sql(_POSTGRES_FUNCTION.format(table=table, new=new, old=old))
    columns = ", ".join(SIZES[table][1])
    connection.exec_driver_sql(
        f"CREATE CONSTRAINT TRIGGER stored_bytes_changed AFTER INSERT OR UPDATE OF {columns} OR DELETE ON {table} "
        f"DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION loramux_count_{table}()"
    )


def _install_on_sqlite(connection: Connection, table: str) -> None:
    new, old = (_size(table, row, "sqlite") for row in ("NEW", "OLD"))
    for change, statement in _SQLITE.items():
        columns = f" OF {', '.join(SIZES[table][1])}" if change == "update" else ""
        connection.exec_driver_sql(
            f"CREATE TRIGGER {_sqlite_trigger(table, change)} AFTER {change.upper()}{columns} ON {table} "
            f"BEGIN {statement.format(new=new, old=old)}; END"
        )


def _sqlite_trigger(table: str, change: str) -> str:
    return f"{table}_{change}_stored_bytes"
