from __future__ import annotations

import threading
import time
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import event, insert, select
from sqlalchemy.exc import IntegrityError

from loramux.migrations.database import CLOCK_FRESH_S, Database, DatabaseError, NoDatabase
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import tenants
from tests.migrated import migrated_sqlite


def test_sqlite_uses_the_tenant_index_with_statistics(tmp_path: Path) -> None:
    empty = ", ''" * 9
    names = "tenant_id, api_key_id, adapter_id, adapter_version_id, model, base, endpoint, end_user, status"
    fill = """
        INSERT INTO usage_rollups
        WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 9999)
        SELECT 1, 3600000000, i / 50 * 3600000000, 'ten_' || (i % 50), 1, 1, 1, 1, 1, 1 FROM n
    """
    asked = """
        EXPLAIN QUERY PLAN SELECT sum(requests) FROM usage_rollups WHERE grain = 1 AND span_us = 3600000000
        AND tenant_id = 'ten_7' AND (start_us < 36000000000 OR start_us > 360000000000)
    """
    database = Database(migrated_sqlite(tmp_path / "loramux.db"))
    with database.write() as connection:
        connection.exec_driver_sql(f"INSERT INTO usage_series (id, {names}) VALUES (1{empty})")
        connection.exec_driver_sql(fill)
        assert "PRIMARY KEY" in connection.exec_driver_sql(asked).one()[3]
    database.refresh_statistics()
    with database.read() as connection:
        plan = [row[3] for row in connection.exec_driver_sql(asked)]
    assert all("ix_usage_rollups_tenant_span_start" in step for step in plan if "usage_rollups" in step), plan
    database.close()


def test_a_failed_transaction_leaves_nothing(database: Database) -> None:
    def add_the_same_twice() -> None:
        with database.write() as connection:
            one = insert(tenants).values(id="a", slug="x", display_name="x", state="active", weight=1)
            for _ in range(2):
                connection.execute(one.values(isolation_secret=b"", created_us=0))

    with pytest.raises(IntegrityError):
        add_the_same_twice()
    with database.read() as connection:
        assert connection.execute(select(tenants.c.id)).all() == []


def test_the_clock_can_be_injected(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'clock.db'}", clock=lambda: 42)
    assert database.now_us() == 42
    database.close()


@pytest.mark.parametrize(("wrong_s", "boot_s"), [(3600, 0), (-3600, 10**6)], ids=["ahead", "behind"])
def test_servers_with_wrong_clocks_agree_on_the_time(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, wrong_s: int, boot_s: int
) -> None:
    right_s, since_boot_ns = time.time(), time.clock_gettime_ns
    monkeypatch.setattr(time, "time_ns", lambda: round((right_s + wrong_s) * 1e9))
    monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: since_boot_ns(clock) + boot_s * 10**9)
    with closing(Database(postgres_url)) as database:
        # The first answer comes from PostgreSQL, the others from the time that has passed since.
        assert abs(database.now_us() / 1e6 - right_s) < 60
        with database.read() as connection:
            asked_us = database.now_us(connection)
        assert 0 <= database.now_us() - asked_us < 60_000_000


def test_transactions_ask_for_the_time_once_a_second(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    boot_ns = 10**9
    monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: boot_ns)
    statements: list[str] = []
    with closing(Database(postgres_url)) as database, database.read() as connection:
        event.listen(connection.engine, "before_cursor_execute", lambda *told: statements.append(told[2]))
        asked_us = database.now_us(connection)
        boot_ns += round(CLOCK_FRESH_S * 1e9) - 1000
        assert database.now_us(connection) == asked_us + round(CLOCK_FRESH_S * 1e6) - 1
        assert len(statements) == 1
        boot_ns += 1000
        assert abs(database.now_us(connection) - asked_us) < 60_000_000
        assert len(statements) == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("not a url", "malformed"),
        ("mysql://host/name", "not supported"),
        ("postgresql://user:pass@word@host/name", "two @"),
    ],
    ids=["malformed", "another kind", "at in the password"],
)
def test_a_bad_url_is_refused_in_one_sentence(url: str, message: str) -> None:
    with pytest.raises(DatabaseError, match=message):
        Database(url)


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("postgresql://someone:hunter2@host:port/name", id="port is a word"),
        pytest.param("postgresql://someone:pa@ss:hunter2@host/name", id="at and colon in the password"),
        pytest.param("sqlite://hunter2", id="two slashes"),
        pytest.param("sqlite:///x.db?timeout=hunter2", id="parameter"),
    ],
)
def test_malformed_url_is_not_echoed(url: str) -> None:
    with pytest.raises(DatabaseError, match="malformed") as caught:
        Database(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_unreachable_database_error_hides_the_password() -> None:
    database = Database("postgresql://someone:hunter2@127.0.0.1:1/none")
    with pytest.raises(DatabaseError, match="cannot be used") as caught:
        database.check_schema()
    assert "hunter2" not in str(caught.value)
    database.close()


def test_identifiers_sort_by_time_and_do_not_repeat() -> None:
    made = [new_id("ten") for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(name.startswith("ten_") and len(name) == 36 for name in made)
    assert made[0][:16] <= made[-1][:16]


def test_identifiers_of_one_millisecond_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, a list would show objects that are made quickly in any order."""
    now_ns = 1_800_000_000_000_000_000
    monkeypatch.setattr(time, "time_ns", partial(next, count(now_ns, 250)))
    made = [new_id("ten") for _ in range(100)]
    assert made == sorted(made)


def test_sqlite_is_crash_safe(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'pragma.db'}")
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    database.close()


def test_writers_in_one_process_take_turns_without_sleeping(tmp_path: Path) -> None:
    """SQLite sleeps while it waits for its lock. Threads of one process must take turns without that sleep."""
    database = Database(migrated_sqlite(tmp_path / "loramux.db"))
    with database.read(), database.read():
        # Open two connections, so that the pool has one for each thread.
        pass
    begun: list[str] = []
    event.listen(database._engine, "engine_connect", lambda _: begun.append(threading.current_thread().name))
    second = threading.Thread(target=lambda: _write_once(database), name="second")
    with database.write():
        second.start()
        second.join(0.2)
        assert begun == [threading.current_thread().name], "the second thread waits outside SQLite"
    second.join(10)
    assert begun == [threading.current_thread().name, "second"]
    database.close()


def _write_once(database: Database) -> None:
    with database.write():
        return


def test_checking_the_schema_does_not_create_a_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'mistyped.db'}"
    with closing(Database(url)) as database, pytest.raises(NoDatabase, match=r"there is no database .*mistyped\.db"):
        database.check_schema()
    assert list(tmp_path.iterdir()) == []
