from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import event, insert, select
from sqlalchemy.exc import IntegrityError

from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.version_files import read_further_files
from loramux.migrations.database import Database, DatabaseError
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import (
    adapter_alias_history,
    adapter_alias_targets,
    adapter_versions,
    adapters,
    api_keys,
    metadata,
    quota_counters,
    quota_policies,
    reservations,
    tenants,
    usage_rollups,
)
from tests.migrated import migrated_sqlite


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


def test_migrations_make_exactly_the_schema(database: Database) -> None:
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


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


def test_second_upgrade_changes_nothing(database: Database) -> None:
    add_tenant(database, "acme")
    database.upgrade()
    database.check_schema()
    with database.read() as connection:
        assert connection.execute(select(tenants.c.slug)).scalars().all() == ["acme"]


def test_servers_that_start_together_upgrade_once(database_url: str) -> None:
    program = "import sys; from loramux.migrations.database import Database; Database(sys.argv[1]).upgrade()"
    # Set PYTHONPATH, so that the servers import the same modules as this test.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    servers = [subprocess.Popen([sys.executable, "-c", program, database_url], env=environment) for _ in range(3)]
    assert [server.wait(timeout=60) for server in servers] == [0, 0, 0]
    database = Database(database_url)
    database.check_schema()
    database.close()


def test_empty_database_is_refused_with_the_fix(database_url: str) -> None:
    database = Database(database_url)
    with pytest.raises(DatabaseError, match="run 'loramux db upgrade'"):
        database.check_schema()
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


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("not a url", "malformed"),
        ("mysql://host/name", "not supported"),
    ],
    ids=["malformed", "another kind"],
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


def test_sqlite_is_crash_safe(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'pragma.db'}")
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    database.close()


def test_newer_schema_is_refused(database: Database) -> None:
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(DatabaseError, match="another version of loramux"):
        database.upgrade()
    with pytest.raises(DatabaseError, match="9999"):
        database.check_schema()


def test_existing_aliases_keep_their_targets(database_url: str) -> None:
    database = Database(database_url)
    database.upgrade("0001")
    add_tenant(database, "acme")
    with database.write() as connection:
        owner = connection.execute(select(tenants.c.id)).scalar_one()
        for statement in (
            f"INSERT INTO adapters (id, tenant_id, name, created_us) VALUES ('ada_1', '{owner}', 'support', 1)",
            "INSERT INTO adapter_versions (id, adapter_id, number, state, upload_id, report, created_us)"
            " VALUES ('adv_7', 'ada_1', 7, 'ready', 'upl_1', '{}', 1)",
            "INSERT INTO uploads (id, adapter_id, files, state, created_us, expires_us) VALUES ('upl_1', 'ada_1',"
            ' \'[{"name": "adapter_model.safetensors", "size": 1, "sha256": "bb"},'
            ' {"name": "adapter_config.json", "size": 1, "sha256": "aa"}]\', \'used\', 1, 2)',
            "INSERT INTO adapter_aliases (adapter_id, name, version_id, updated_us)"
            " VALUES ('ada_1', 'default', 'adv_7', 5), ('ada_1', 'stable', 'adv_7', 6)",
        ):
            connection.exec_driver_sql(statement)
    with pytest.raises(DatabaseError, match="0001"):
        database.check_schema()
    database.upgrade()
    database.check_schema()
    with database.read() as connection:
        targets = connection.execute(select(adapter_alias_targets).order_by(adapter_alias_targets.c.name)).all()
        history = connection.execute(select(adapter_alias_history).order_by(adapter_alias_history.c.name)).all()
        versions = connection.exec_driver_sql("SELECT number, state, files_sha256 FROM adapter_versions").all()
        assert [tuple(row) for row in versions] == [(7, "ready", hashlib.sha256(b"aabb").hexdigest())]
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    assert [tuple(row) for row in targets] == [("ada_1", "default", "adv_7", 100), ("ada_1", "stable", "adv_7", 100)]
    assert [(row.name, row.revision, row.targets[0]["number"], row.created_us) for row in history] == [
        ("default", 1, 7, 5),
        ("stable", 1, 7, 6),
    ]
    database.close()


def test_existing_limits_become_hard_tenant_quotas(database_url: str) -> None:
    database = Database(database_url)
    database.upgrade("0003")
    with database.write() as connection:
        for statement in (
            "INSERT INTO tenants (id, slug, display_name, state, weight, isolation_secret, created_us)"
            " VALUES ('ten_1', 'acme', 'acme', 'active', 1, '', 1)",
            "INSERT INTO quota_policies (id, tenant_id, metric, limit_value, burst, created_us, updated_us)"
            " VALUES ('qta_1', 'ten_1', 'tokens_per_minute', 7, 9, 1, 2)",
            "INSERT INTO quota_counters (policy_id, window_start_us, level, reserved, refilled_us)"
            " VALUES ('qta_1', 0, -5, 3, 4)",
        ):
            connection.exec_driver_sql(statement)
    database.upgrade()
    with database.read() as connection:
        policy = connection.execute(select(quota_policies)).mappings().one()
        counter = connection.execute(select(quota_counters)).mappings().one()
        assert connection.execute(select(tenants.c.timezone)).scalar_one() == "UTC"
    assert {name: policy[name] for name in ("scope", "subject_id", "tenant_id", "mode", "limit_value", "burst")} == {
        "scope": "tenant",
        "subject_id": "ten_1",
        "tenant_id": "ten_1",
        "mode": "hard",
        "limit_value": 7,
        "burst": 9,
    }
    assert dict(counter) == {
        "policy_id": "qta_1",
        "subject_id": "ten_1",
        "window_start_us": 0,
        "level": -5,
        "reserved": 3,
        "used": 0,
        "exceeded": 0,
        "refilled_us": 4,
    }
    database.close()


def test_existing_usage_is_rolled_up(database_url: str) -> None:
    database = Database(database_url)
    database.upgrade("0003")
    add_tenant(database, "acme")
    hour, day = 3_600_000_000, 86_400_000_000
    with database.write() as connection:
        owner = connection.execute(select(tenants.c.id)).scalar_one()
        for name, finished, tokens in (
            ("req_1", day + 5, 10),
            ("req_2", day + hour - 1, 20),
            ("req_3", day + hour, 40),
        ):
            connection.exec_driver_sql(
                "INSERT INTO usage_events (request_id, tenant_id, api_key_id, model, endpoint, status, prompt_tokens,"
                " cached_tokens, completion_tokens, started_us, finished_us) VALUES"
                f" ('{name}', '{owner}', 'key_1', 'base', 'completions', 'completed', {tokens}, 1, 2, 0, {finished})"
            )
        connection.exec_driver_sql(
            "INSERT INTO usage_adjustments (id, request_id, tenant_id, prompt_tokens, cached_tokens, completion_tokens,"
            f" created_us) VALUES ('adj_1', 'req_1', '{owner}', -4, 0, 3, {day + 2 * hour})"
        )
    database.upgrade()
    rollups = usage_rollups.c
    with database.read() as connection:
        rows = connection.execute(
            select(rollups.grain, rollups.span_us, rollups.start_us - day, rollups.requests, rollups.prompt_tokens)
            .where(rollups.tenant_id == owner)
            .order_by(rollups.grain, rollups.span_us, rollups.start_us)
        ).all()
        everybody = connection.execute(
            select(rollups.requests, rollups.completion_tokens).where(rollups.tenant_id == "", rollups.span_us == day)
        ).one()
    hours = [(hour, 0, 2, 30), (hour, hour, 1, 40), (hour, 2 * hour, 0, -4)]
    # The first week began one day before the epoch, as did the first spans of 2, 4, 8 and 16 days.
    of_day, of_week = (day, 0, 3, 66), (7 * day, -day, 3, 66)
    by_grain = {
        1: [*hours, of_day, of_week],
        2: [*hours, of_day, of_week],
        3: [*hours, (6 * hour, 0, 3, 66), of_day, *((span * day, -day, 3, 66) for span in (2, 4, 8, 16))],
        4: [of_day],
        5: [*hours, of_day],
    }
    assert [tuple(row) for row in rows] == [(grain, *row) for grain, found in by_grain.items() for row in found]
    assert tuple(everybody) == (3, 9)
    database.close()


def test_settled_reservations_are_deleted_by_the_upgrade(database_url: str) -> None:
    database = Database(database_url)
    database.upgrade("0012")
    add_tenant(database, "acme")
    with database.write() as connection:
        owner = connection.execute(select(tenants.c.id)).scalar_one()
        key = {"id": "key_1", "tenant_id": owner, "public_id": "one", "secret_sha256": bytes(32)}
        connection.execute(insert(api_keys).values(**key, name="key", scopes=[], created_us=0))
        for state in ("open", "settled", "recovered"):
            connection.exec_driver_sql(
                "INSERT INTO reservations (id, tenant_id, api_key_id, model, endpoint, state, prompt_tokens,"
                " reserved_tokens, charges, checkpoint_tokens, created_us, lease_expires_us) VALUES"
                f" ('req_{state}', '{owner}', 'key_1', 'base', 'completions', '{state}', 1, 2, '[]', 0, 3, 4)"
            )
    database.upgrade()
    with database.read() as connection:
        left = connection.execute(select(reservations).order_by(reservations.c.id)).mappings().all()
    assert [row["state"] for row in left] == ["open", "recovered"]
    assert {(row["tenant_id"], row["reserved_tokens"], row["lease_expires_us"]) for row in left} == {(owner, 2, 4)}
    database.close()


def test_existing_versions_keep_their_digests_after_the_upgrade(database_url: str) -> None:
    database = Database(database_url)
    database.upgrade("0014")
    add_tenant(database, "acme")
    with database.write() as connection:
        owner = connection.execute(select(tenants.c.id)).scalar_one()
        for statement in (
            f"INSERT INTO adapters (id, tenant_id, name, created_us) VALUES ('ada_1', '{owner}', 'support', 1)",
            "INSERT INTO adapter_versions (id, adapter_id, number, state, digest, max_rank, upload_id, report,"
            f" created_us) VALUES ('adv_1', 'ada_1', 1, 'ready', '{'a' * 64}', 8, 'upl_1', '{{}}', 1)",
        ):
            connection.exec_driver_sql(statement)
    database.upgrade()
    database.check_schema()
    ref = AdapterRegistry(database).resolve("acme", "support", digest_prefix="a" * 12)
    assert ref is not None
    assert (ref.digest, ref.version_digest) == ("a" * 64, "a" * 64)
    assert read_further_files(database, "adv_1") == {}
    database.close()


def test_versions_survive_a_downgrade_without_their_optional_files(database: Database) -> None:
    add_tenant(database, "acme")
    with database.write() as connection:
        owner = connection.execute(select(tenants.c.id)).scalar_one()
        for statement in (
            f"INSERT INTO adapters (id, tenant_id, name, created_us) VALUES ('ada_1', '{owner}', 'support', 1)",
            "INSERT INTO adapter_versions (id, adapter_id, number, state, digest, version_digest, max_rank, upload_id,"
            f" report, created_us) VALUES ('adv_1', 'ada_1', 1, 'ready', '{'a' * 64}', 'b', 8, 'upl_1', '{{}}', 1)",
            "INSERT INTO adapter_aliases (adapter_id, name, revision, updated_us) VALUES ('ada_1', 'default', 1, 1)",
            "INSERT INTO adapter_alias_targets (adapter_id, name, version_id, weight)"
            " VALUES ('ada_1', 'default', 'adv_1', 100)",
            "INSERT INTO adapter_version_files (version_id, name, size, sha256, content)"
            " VALUES ('adv_1', 'chat_template.jinja', 1, 'c', 'x')",
        ):
            connection.exec_driver_sql(statement)
    command.downgrade(database._alembic_config(), "0014")
    database.upgrade()
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    ref = AdapterRegistry(database).resolve("acme", "support")
    assert ref is not None
    assert ref.version_digest == ref.digest == "a" * 64


def test_activated_versions_are_out_of_service_after_a_downgrade(database: Database) -> None:
    """An older server would apply such versions to the whole prompt. They keep their tokens for the next upgrade."""
    add_tenant(database, "acme")
    with database.write() as connection:
        owner = connection.execute(select(tenants.c.id)).scalar_one()
        adapter = {"id": "ada_1", "tenant_id": owner, "name": "support", "created_us": 1}
        connection.execute(insert(adapters).values(adapter))
        for number, tokens in enumerate((None, [5, 6]), 1):
            version = {"id": f"adv_{number}", "adapter_id": "ada_1", "number": number, "state": "ready"}
            facts = {"digest": "a" * 64, "upload_id": "upl_1", "created_us": 1, "invocation_tokens": tokens}
            report = (
                {"recorded": {"revision": '"invocation_tokens"'}} if tokens is None else {"invocation_tokens": tokens}
            )
            connection.execute(insert(adapter_versions).values({**version, **facts, "report": report}))
    command.downgrade(database._alembic_config(), "0015")
    database.upgrade()
    columns = adapter_versions.c
    with database.read() as connection:
        query = select(columns.state, columns.invocation_tokens).order_by(columns.number)
        assert [tuple(row) for row in connection.execute(query)] == [("ready", None), ("archived", [5, 6])]
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        activated = columns.invocation_tokens.is_not(None)
        assert connection.execute(select(columns.number).where(activated)).scalars().all() == [2]


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
