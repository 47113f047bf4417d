"""Alembic's entry point: runs the migrations on the engine that `Database` passes in."""

from __future__ import annotations

from alembic import context
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, inspect

from loramux.migrations.cache_triggers import cache_triggers, install_cache_triggers
from loramux.migrations.schema import metadata
from loramux.migrations.storage_triggers import install_storage_triggers, storage_triggers

_FIRST_LOCKED = ("responses", "conversations", "chat_completions", "reservations", "usage_events")
"""The tables that a settlement or a response in the background locks first, in the order in which it locks them.

A reservation locks `reservations` last. By then it has locked rows that an upgrade locks later: counters, and any
policies and tenants that have just changed. If the two deadlock, either the reservation or the upgrade is aborted and
retried. See `Database.upgrade`.
"""


def _is_current(connection: Connection) -> bool:
    """Return whether the schema is current and has its triggers."""
    if MigrationContext.configure(connection).get_current_revision() != context.get_head_revision():
        return False
    dialect = connection.dialect.name
    if dialect == "postgresql":
        query = "SELECT tgrelid::regclass::text, tgname FROM pg_trigger WHERE NOT tgisinternal"
    else:
        query = "SELECT tbl_name, name FROM sqlite_master WHERE type = 'trigger'"
    found = {(table, name) for table, name in connection.exec_driver_sql(query)}
    return {*cache_triggers(dialect), *storage_triggers(dialect)} <= found


def _wait_for_writers(connection: Connection) -> None:
    """Let running settlements and writers of stored responses finish and block new ones, before the upgrade locks other
    tables that they need.

    Otherwise, an upgrade would deadlock again and again while gateways are running. Besides, nothing may be stored or
    deleted between a step that counts the stored bytes and the creation of the triggers that count changes.
    """
    tables = set(inspect(connection).get_table_names())
    locked = [table for table in _FIRST_LOCKED if table in tables]
    if locked:
        connection.exec_driver_sql(f"LOCK TABLE {', '.join(locked)} IN ACCESS EXCLUSIVE MODE")


def _remove_triggers(connection: Connection) -> None:
    """Drop the triggers before an upgrade, because PostgreSQL cannot alter a table with pending deferred triggers."""
    dialect, tables = connection.dialect.name, set(inspect(connection).get_table_names())
    for table, name in (*cache_triggers(dialect), *storage_triggers(dialect)):
        if table in tables:
            place = f" ON {table}" if dialect == "postgresql" else ""
            connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS {name}{place}")


def run() -> None:
    engine: Engine = context.config.attributes["engine"]
    with engine.begin() as connection:
        is_postgres = engine.dialect.name == "postgresql"
        if is_postgres:
            # If two servers start together, only one may migrate. The other waits and then has nothing to do. SQLite
            # needs no lock: its transaction begins with the write lock.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(5512041)")
        if _is_current(connection):
            return
        if is_postgres:
            _wait_for_writers(connection)
        context.configure(connection=connection, target_metadata=metadata, render_as_batch=not is_postgres)
        _remove_triggers(connection)
        context.run_migrations()
        install_cache_triggers(connection)
        install_storage_triggers(connection)


run()
