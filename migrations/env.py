"""Alembic's entry point: runs the migrations on the engine that `Database` passes in."""

from __future__ import annotations

from alembic import context
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, inspect

from loramux.migrations.cache_triggers import install_cache_triggers, remove_cache_triggers
from loramux.migrations.schema import metadata
from loramux.migrations.storage_triggers import install_storage_triggers, remove_storage_triggers

_FIRST_LOCKED = ("reservations", "usage_events")
"""The tables that a settlement locks first, in the order in which it locks them.

A reservation locks `reservations` last. By then it has locked rows that an upgrade locks later: counters, and any
policies and tenants that have just changed. If the two deadlock, either the reservation or the upgrade is aborted and
retried. See `Database.upgrade`.
"""


def _wait_for_settlements(connection: Connection) -> None:
    """Let running settlements finish and block new ones, before the upgrade locks other tables that they need.

    Otherwise, an upgrade would deadlock again and again while gateways are running.
    """
    if MigrationContext.configure(connection).get_current_revision() == context.get_head_revision():
        return
    tables = set(inspect(connection).get_table_names())
    locked = [table for table in _FIRST_LOCKED if table in tables]
    if locked:
        connection.exec_driver_sql(f"LOCK TABLE {', '.join(locked)} IN ACCESS EXCLUSIVE MODE")


def run() -> None:
    engine: Engine = context.config.attributes["engine"]
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            # If two servers start together, only one may migrate. The other waits and then has nothing to do. SQLite
            # needs no lock: its transaction begins with the write lock.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(5512041)")
            _wait_for_settlements(connection)
        context.configure(
            connection=connection, target_metadata=metadata, render_as_batch=engine.dialect.name == "sqlite"
        )
        remove_cache_triggers(connection)
        remove_storage_triggers(connection)
        context.run_migrations()
        install_cache_triggers(connection)
        install_storage_triggers(connection)


run()
