"""Alembic's entry: runs the versions on the engine that `Database` hands over."""

from __future__ import annotations

from alembic import context
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, inspect

from loramux.migrations.cache_triggers import install_cache_triggers, remove_cache_triggers
from loramux.migrations.schema import metadata

_FIRST_LOCKED = ("reservations", "usage_events")
"""What a settlement locks before anything else, in its order.

Who only reserves comes to `reservations` last, and may hold what an upgrade locks later: counters always, policies and
tenants where they have just changed. Then one of the two gives way, and is tried again: see `Database.upgrade`.
"""


def _wait_for_settlements(connection: Connection) -> None:
    """Let those under way end, and the next ones wait, before a table is locked that they would wait for.

    Beside gateways that were not stopped for it, an upgrade would else meet one deadlock after another.
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
            # Two servers that start together must not both migrate: the second waits, then finds nothing to do.
            # SQLite needs none: its transaction begins with the write lock.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(5512041)")
            _wait_for_settlements(connection)
        context.configure(
            connection=connection, target_metadata=metadata, render_as_batch=engine.dialect.name == "sqlite"
        )
        remove_cache_triggers(connection)
        context.run_migrations()
        install_cache_triggers(connection)


run()
