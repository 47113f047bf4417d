from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext

from loramux.migrations.database import UPGRADE_ATTEMPTS, DatabaseError
from tests.migrations.later_schema import LaterDatabase

NUM_WAITING = "SELECT count(*) FROM pg_locks WHERE relation = %s::regclass AND NOT granted"


class Upgraded(LaterDatabase):
    """Records the SQLSTATE of every error from PostgreSQL."""

    def __init__(self, url: str) -> None:
        super().__init__(f"{url}&options=-c%20deadlock_timeout%3D100ms")
        self.refusals: list[str] = []
        event.listen(self._engine, "handle_error", self._note)

    def _note(self, context: ExceptionContext) -> None:
        self.refusals.append(str(getattr(context.original_exception, "sqlstate", None)))


@pytest.fixture
def of_before(migrated_postgres_url: str) -> Iterator[Upgraded]:
    database = Upgraded(migrated_postgres_url)
    yield database
    database.close()


def until_waiting(url: str, num_waiting: int, table: str = "reservations") -> None:
    ends_s = time.monotonic() + 20
    with psycopg.connect(url, autocommit=True) as connection:
        while connection.execute(NUM_WAITING, (table,)).fetchone() != (num_waiting,):
            assert time.monotonic() < ends_s
            time.sleep(0.01)


def test_deadlocked_upgrade_is_retried(of_before: Upgraded, migrated_postgres_url: str) -> None:
    with (
        ThreadPoolExecutor(2) as threads,
        psycopg.connect(migrated_postgres_url) as reserving,
        psycopg.connect(migrated_postgres_url) as settling,
    ):
        settling.execute("SELECT id FROM reservations WHERE id = '' FOR UPDATE")
        # Keep PostgreSQL from choosing this session as the deadlock victim.
        reserving.execute("SET LOCAL deadlock_timeout = '1min'")
        reserving.execute("SELECT * FROM quota_counters FOR UPDATE")
        reserving.execute("SELECT * FROM quota_policies")
        upgrading = threads.submit(of_before.upgrade)
        until_waiting(migrated_postgres_url, 1)
        # This statement waits behind the upgrade for the reservations. The upgrade has not locked the policies yet.
        reserved = threads.submit(reserving.execute, "UPDATE reservations SET state = state WHERE id = ''")
        until_waiting(migrated_postgres_url, 2)
        settling.commit()
        reserved.result(30)
        assert not upgrading.done(), "the upgrade waits for the reservation"
        reserving.execute("INSERT INTO signals (name, value) VALUES ('reserved', 1)")
        reserving.commit()
        upgrading.result(60)
    assert of_before.refusals == ["40P01"], "exactly one deadlock occurred"
    of_before.check_schema()
    with of_before.read() as connection:
        assert connection.exec_driver_sql("SELECT value FROM signals WHERE name = 'reserved'").scalar() == 1


def test_upgrade_waits_for_a_response_in_the_background(of_before: Upgraded, migrated_postgres_url: str) -> None:
    with ThreadPoolExecutor(1) as threads, psycopg.connect(migrated_postgres_url) as progressing:
        # Keep PostgreSQL from choosing this session as the deadlock victim.
        progressing.execute("SET LOCAL deadlock_timeout = '1min'")
        progressing.execute("UPDATE responses SET background_state = 'in_progress' WHERE id = ''")
        upgrading = threads.submit(of_before.upgrade)
        until_waiting(migrated_postgres_url, 1, "responses")
        progressing.execute("UPDATE reservations SET checkpoint_tokens = 1 WHERE id = ''")
        progressing.commit()
        upgrading.result(60)
    assert of_before.refusals == []
    of_before.check_schema()


def test_upgrade_waits_for_a_change_of_a_quota(of_before: Upgraded, migrated_postgres_url: str) -> None:
    with ThreadPoolExecutor(1) as threads, psycopg.connect(migrated_postgres_url) as changing:
        # Keep PostgreSQL from choosing this session as the deadlock victim.
        changing.execute("SET LOCAL deadlock_timeout = '1min'")
        changing.execute("SELECT id FROM tenants WHERE id = '' FOR UPDATE")
        upgrading = threads.submit(of_before.upgrade)
        until_waiting(migrated_postgres_url, 1, "tenants")
        changing.execute("SELECT id FROM quota_policies WHERE id = '' FOR UPDATE")
        changing.commit()
        upgrading.result(60)
    assert of_before.refusals == []
    of_before.check_schema()


@pytest.mark.parametrize(
    ("code", "num_attempts"),
    [pytest.param("40P01", UPGRADE_ATTEMPTS, id="always a deadlock"), pytest.param("53100", 1, id="disk full")],
)
def test_abandoned_upgrade_changes_nothing(
    of_before: Upgraded, migrated_postgres_url: str, code: str, num_attempts: int
) -> None:
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS"
            f" $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$".encode()
        )
        connection.execute("CREATE EVENT TRIGGER refused ON ddl_command_start EXECUTE FUNCTION refuse()")
        with pytest.raises(DatabaseError, match="cannot be used: no"):
            of_before.upgrade()
        assert of_before.refusals == [code] * num_attempts
        with pytest.raises(DatabaseError, match="run 'loramux db upgrade'"):
            of_before.check_schema()
        connection.execute("DROP EVENT TRIGGER refused")
    of_before.upgrade()
    of_before.check_schema()
