from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert, select

from loramux.migrations.database import LAST_WITH_OLDER_STEPS, Database, DatabaseError, WrongSchema
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import tenants
from tests.migrations.later_schema import LATER, LaterDatabase
from tests.migrations.schema_lines import schema_lines

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
UPGRADE = """
import os, sys
from tests.migrations.later_schema import {0}

servers = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        {0}(sys.argv[1]).upgrade()
        os._exit(0)
    servers.append(pid)
sys.exit(any(os.waitpid(pid, 0)[1] for pid in servers))
"""
"""Upgrades a database in three processes at once."""


@pytest.fixture
def later(migrated_url: str) -> Iterator[LaterDatabase]:
    database = LaterDatabase(migrated_url)
    yield database
    database.close()


def add_tenant(database: Database, slug: str) -> None:
    with database.write() as connection:
        connection.execute(
            insert(tenants).values(
                id=new_id("ten"),
                slug=slug,
                display_name=slug,
                state="active",
                weight=1,
                isolation_secret=bytes(32),
                created_us=database.now_us(connection),
            )
        )


def slugs(database: Database) -> list[str]:
    with database.read() as connection:
        return list(connection.execute(select(tenants.c.slug)).scalars())


def lines(database: Database) -> list[str]:
    with database.read() as connection:
        return schema_lines(connection)


def versions(database: Database) -> list[str]:
    with database.read() as connection:
        return list(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalars())


def set_version(database: Database, version: str) -> None:
    with database.write() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{version}'")


def test_second_upgrade_changes_nothing(database: Database) -> None:
    add_tenant(database, "acme")
    before = lines(database)
    database.upgrade()
    database.check_schema()
    assert slugs(database) == ["acme"]
    assert lines(database) == before


def test_second_upgrade_leaves_the_triggers_alone(database: Database) -> None:
    # The numbers change if something is created again.
    query = "PRAGMA schema_version" if database.is_sqlite else "SELECT oid FROM pg_trigger ORDER BY oid"

    def numbers() -> list[int]:
        with database.read() as connection:
            return list(connection.exec_driver_sql(query).scalars())

    before = numbers()
    database.upgrade()
    assert numbers() == before


@pytest.mark.parametrize("table", ["responses", "tenants"])
def test_missing_trigger_is_created_again(database: Database, table: str) -> None:
    before = lines(database)
    postgres = {"responses": "stored_bytes_changed", "tenants": "caches_changed"}
    sqlite = {"responses": "responses_delete_stored_bytes", "tenants": "tenants_insert_caches_changed"}
    name = sqlite[table] if database.is_sqlite else f"{postgres[table]} ON {table}"
    with database.write() as connection:
        connection.exec_driver_sql(f"DROP TRIGGER {name}")
    assert lines(database) != before
    database.upgrade()
    assert lines(database) == before


@pytest.mark.parametrize("kind", ["Database", "LaterDatabase"])
def test_servers_that_start_together_upgrade_once(database_url: str, kind: str) -> None:
    # Set PYTHONPATH, so that the servers import the same modules as this test.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", UPGRADE.format(kind), database_url]
    subprocess.run(command, env=environment, check=True, timeout=60)
    database = LaterDatabase(database_url) if kind == "LaterDatabase" else Database(database_url)
    database.check_schema()
    assert len(versions(database)) == 1
    database.close()


def test_later_step_upgrades_a_database_with_rows(later: LaterDatabase) -> None:
    add_tenant(later, "acme")
    before = lines(later)
    with pytest.raises(WrongSchema, match=f"needs {LATER}: run 'loramux db upgrade'"):
        later.check_schema()
    later.upgrade()
    later.check_schema()
    assert slugs(later) == ["acme"]
    added = [line for line in lines(later) if line not in before]
    assert len(added) == 1
    assert "later" in added[0]
    assert sum("trigger" in line for line in lines(later)) == sum("trigger" in line for line in before) > 0


def test_database_of_a_later_release_is_refused(later: LaterDatabase, migrated_url: str) -> None:
    later.upgrade()
    database = Database(migrated_url)
    for start in (database.check_schema, database.upgrade):
        with pytest.raises(WrongSchema, match=f"is at {LATER}, which belongs to another version of loramux: install"):
            start()
    later.check_schema()
    database.close()


@pytest.mark.parametrize("version", ["0001", "0012", "0020"])
def test_database_from_before_the_first_step_is_refused(database: Database, version: str) -> None:
    set_version(database, version)
    before = lines(database)
    for start in (database.check_schema, database.upgrade):
        with pytest.raises(WrongSchema) as caught:
            start()
        assert str(caught.value) == (
            f"the database schema is at {version}, which this version of loramux cannot upgrade: "
            "use commit db435589 to upgrade it to 0021, as docs/operations.md describes"
        )
    assert LAST_WITH_OLDER_STEPS in OPERATIONS.read_text()
    assert versions(database) == [version]
    assert lines(database) == before


@pytest.mark.parametrize("version", ["9999", "0099", "-1", "00201", "main", "²", "later"])
def test_unknown_schema_is_refused(database: Database, version: str) -> None:
    set_version(database, version)
    for start in (database.check_schema, database.upgrade):
        with pytest.raises(WrongSchema, match=f"is at {version}, which belongs to another version of loramux: install"):
            start()
    assert versions(database) == [version]


def test_database_with_two_versions_is_refused(database: Database) -> None:
    with database.write() as connection:
        connection.exec_driver_sql("INSERT INTO alembic_version (version_num) VALUES ('0020')")
    for start in (database.check_schema, database.upgrade):
        with pytest.raises(DatabaseError, match="another version of loramux"):
            start()


def test_empty_database_is_refused_with_the_fix(database_url: str) -> None:
    database = Database(database_url)
    # The file of an empty SQLite database. Without it, there is no database.
    with database.read():
        pass
    with pytest.raises(WrongSchema, match=r"is at no version, .* run 'loramux db upgrade'"):
        database.check_schema()
    database.close()
