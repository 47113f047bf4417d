from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, OperationalError

from loramux.migrations import database as database_module
from loramux.migrations.database import Database
from loramux.migrations.pipeline import pipeline

ADD = "INSERT INTO signals (name, value) VALUES (%(name)s, 1)"


@pytest.fixture
def postgres(migrated_postgres_url: str) -> Iterator[Database]:
    database = Database(migrated_postgres_url)
    yield database
    database.close()


def names(database: Database) -> set[str]:
    with database.read() as connection:
        return set(connection.execute(text("SELECT name FROM signals WHERE name LIKE 'test%'")).scalars())


def add_by_trips(database: Database, *trips: Sequence[str], between: Callable[[], None] = lambda: None) -> None:
    """Add names in one transaction, committed by the last round trip. Call `between` between round trips."""
    with database.write_in_pipelines() as connection:
        for number, trip in enumerate(trips, start=1):
            with pipeline(connection, is_last=number == len(trips)) as run:
                for name in trip:
                    run(ADD, {"name": name})
            if number < len(trips):
                between()


def end_connections(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )


def test_statements_of_several_round_trips_are_one_transaction(postgres: Database) -> None:
    with postgres.write_in_pipelines() as connection:
        with pipeline(connection) as run:
            run(ADD, {"name": "test 1"})
            found = run("SELECT name FROM signals WHERE name LIKE 'test%'")
        assert found.fetchall() == [("test 1",)]
        assert names(postgres) == set(), "other connections do not see it yet"
        connection.execute(text("INSERT INTO signals (name, value) VALUES ('test 2', 1)"))
        with pipeline(connection, is_last=True) as run:
            run(ADD, {"name": "test 3"})
        assert names(postgres) == {"test 1", "test 2", "test 3"}


def test_open_transaction_is_committed_at_the_end(postgres: Database) -> None:
    with postgres.write_in_pipelines() as connection, pipeline(connection) as run:
        run(ADD, {"name": "test"})
    assert names(postgres) == {"test"}


def test_failed_statement_rolls_back_the_transaction(postgres: Database) -> None:
    with pytest.raises(IntegrityError):
        add_by_trips(postgres, ["test 1"], ["test 2", "test 1", "test 3"])
    assert names(postgres) == set()
    assert postgres.num_connections == 0


def test_exception_between_round_trips_rolls_back_the_transaction(postgres: Database) -> None:
    def fail() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        add_by_trips(postgres, ["test"], ["test 2"], between=fail)
    assert names(postgres) == set()
    with postgres.write() as connection:
        connection.execute(text("INSERT INTO signals (name, value) VALUES ('test', 1)"))
    assert names(postgres) == {"test"}, "the connection still works"


def test_lost_connection_is_replaced(postgres: Database, migrated_postgres_url: str) -> None:
    with pytest.raises(OperationalError) as raised:
        add_by_trips(postgres, ["test"], ["test 2"], between=lambda: end_connections(migrated_postgres_url))
    assert raised.value.connection_invalidated
    assert names(postgres) == set()


def test_idle_connections_are_tested_before_use(
    postgres: Database, migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgres.read() as first, postgres.read() as second:
        first.execute(text("SELECT 1"))
        second.execute(text("SELECT 1"))
    end_connections(migrated_postgres_url)
    with pytest.raises(OperationalError):
        names(postgres)
    assert names(postgres) == set(), "a lost connection invalidates the older ones"
    end_connections(migrated_postgres_url)
    monkeypatch.setattr(database_module, "UNASKED_S", 0.0)
    assert names(postgres) == set(), "no caller notices"
