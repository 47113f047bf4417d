"""Databases that tests use one after another: see `MigratedDatabases`."""

from __future__ import annotations

import psycopg
import pytest

from tests.postgres import MigratedDatabases

ADD = "INSERT INTO signals (name, value) VALUES ('left behind', 1)"
ALL = "SELECT name FROM signals"


def test_database_is_used_again_without_its_rows_and_under_another_name(migrated_databases: MigratedDatabases) -> None:
    with migrated_databases.lent() as url:
        left_open = psycopg.connect(url, autocommit=True)
        number = left_open.execute("SELECT oid FROM pg_database WHERE datname = current_database()").fetchone()
        left_open.execute(ADD)
    with pytest.raises(psycopg.OperationalError):
        left_open.execute(ALL)
    left_open.close()
    with migrated_databases.lent() as later, psycopg.connect(later, autocommit=True) as connection:
        again = connection.execute("SELECT oid FROM pg_database WHERE datname = current_database()").fetchone()
        assert (again, connection.execute(ALL).fetchall()) == (number, [])
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(url)


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE signals ADD COLUMN more text",
        "ALTER TABLE tenants DISABLE TRIGGER ALL",
        "CREATE FUNCTION more() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "UPDATE alembic_version SET version_num = '0000'",
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET work_mem = 64', current_database()); END $$",
    ],
    ids=["column", "triggers", "function", "version", "setting"],
)
def test_database_with_a_change_is_dropped(migrated_databases: MigratedDatabases, change: str) -> None:
    with migrated_databases.lent() as url, psycopg.connect(url, autocommit=True) as connection:
        connection.execute(change.encode())
        number = connection.execute("SELECT oid FROM pg_database WHERE datname = current_database()").fetchone()
    with migrated_databases.lent() as later, psycopg.connect(later, autocommit=True) as connection:
        found = connection.execute("SELECT count(*) FROM pg_database WHERE oid = %s", number).fetchone()
        assert found == (0,)
