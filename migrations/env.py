"""Alembic's entry: runs the versions on the engine that `Database` hands over."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Engine

from loramux.migrations.cache_triggers import install_cache_triggers, remove_cache_triggers
from loramux.migrations.schema import metadata


def run() -> None:
    engine: Engine = context.config.attributes["engine"]
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            # Two servers that start together must not both migrate: the second waits, then finds nothing to do.
            # SQLite needs none: its transaction begins with the write lock.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(5512041)")
        context.configure(
            connection=connection, target_metadata=metadata, render_as_batch=engine.dialect.name == "sqlite"
        )
        remove_cache_triggers(connection)
        context.run_migrations()
        install_cache_triggers(connection)


run()
