"""Triggers that count changes to the rows that gateways cache, including changes made by hand in SQL.

An upgrade installs them again only if it has a step to run or a trigger is missing, so a change to them needs a step.
"""

from __future__ import annotations

from sqlalchemy import Connection, inspect

CACHED_TABLES = ("api_keys", "tenants", "quota_policies")
"""An upgrade locks the tables in this order. A change of a quota also locks the tenant before its policies."""

CHANNEL = "loramux_caches"
"""PostgreSQL channel that is notified when a change to a cached row commits."""

# The trigger is deferred to the commit, so a transaction locks the row of `signals` last. Transactions therefore cannot
# deadlock on this row, even if they change keys and policies in different orders.
_POSTGRES_FUNCTION = """
CREATE OR REPLACE FUNCTION loramux_cached_row_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO signals (name, value) VALUES ('caches', 1)
        ON CONFLICT (name) DO UPDATE SET value = signals.value + 1;
    PERFORM pg_notify('loramux_caches', '');
    RETURN NULL;
END $$
"""

_SQLITE_COUNT = (
    "INSERT INTO signals (name, value) VALUES ('caches', 1) ON CONFLICT (name) DO UPDATE SET value = value + 1"
)


def cache_triggers(dialect: str) -> list[tuple[str, str]]:
    """Return the table and the name of each trigger, in the order of CACHED_TABLES."""
    if dialect == "postgresql":
        return [(table, "caches_changed") for table in CACHED_TABLES]
    return [(table, name) for table in CACHED_TABLES for name, _ in _sqlite_triggers(table)]


def install_cache_triggers(connection: Connection) -> None:
    """Create the triggers after an upgrade. Does nothing if the schema has no `signals` table yet."""
    tables = set(inspect(connection).get_table_names())
    if "signals" not in tables:
        return
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_POSTGRES_FUNCTION)
    for table in CACHED_TABLES:
        if connection.dialect.name == "postgresql":
            _install_on_postgres(connection, table)
        else:
            _install_on_sqlite(connection, table)


def _install_on_postgres(connection: Connection, table: str) -> None:
    connection.exec_driver_sql(
        f"CREATE CONSTRAINT TRIGGER caches_changed AFTER INSERT OR UPDATE OR DELETE ON {table} "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION loramux_cached_row_changed()"
    )


def _install_on_sqlite(connection: Connection, table: str) -> None:
    for name, change in _sqlite_triggers(table):
        connection.exec_driver_sql(f"CREATE TRIGGER {name} AFTER {change} ON {table} BEGIN {_SQLITE_COUNT}; END")


def _sqlite_triggers(table: str) -> list[tuple[str, str]]:
    return [(f"{table}_{change.lower()}_caches_changed", change) for change in ("INSERT", "UPDATE", "DELETE")]
