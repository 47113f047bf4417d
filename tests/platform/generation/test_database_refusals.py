from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, select, update
from sqlalchemy.exc import OperationalError

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.group_commit import GroupCommit
from loramux.platform.admission.records import Operation, Outcome, Reservation, ReservationRequest
from loramux.platform.generation import maintenance
from loramux.platform.quotas.policies import QuotaPolicies
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.migrated import migrate, migrated_sqlite
from tests.platform.faulty_postgres import faulty_postgres
from tests.platform.gateways import Gateway
from tests.platform.generation.refusing_postgres import refusing
from tests.platform.generation.troubled_gateway import (
    NUM_TOKENS,
    PATIENCE_S,
    ask,
    assert_all_is_settled,
    hold_streams,
    is_ready,
    is_refused,
    is_whole,
    maintained,
    until_ready,
    until_spool_is_empty,
    until_streaming,
)
from tests.platform.lock_waits import until_wait
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

EVERYTHING = tuple(table.name for table in schema.metadata.sorted_tables)
MAX_UNTIL_FULL = 200
"""Number of small requests, more than enough to fill the database's partly used pages."""


@pytest.fixture(autouse=True)
def _tended_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "TEND_INTERVAL_S", 0.1)


@contextmanager
def read_only(url: str) -> Iterator[None]:
    """Make PostgreSQL read-only, as hosting providers do when the disk is full and as a standby always is."""
    with psycopg.connect(url, autocommit=True) as connection:

        def set_to(value: str) -> None:
            connection.execute(f"ALTER SYSTEM {value}".encode())
            connection.execute("SELECT pg_reload_conf()")
            wanted = "on" if value.endswith("on") else "off"
            while connection.execute("SHOW default_transaction_read_only").fetchone() != (wanted,):
                time.sleep(0.01)

        try:
            set_to("SET default_transaction_read_only = on")
            yield
        finally:
            # The tests share the server.
            set_to("RESET default_transaction_read_only")


@contextmanager
def no_more_pages(database: Database) -> Iterator[None]:
    """Limit the database to its current number of pages, so that SQLite itself returns SQLITE_FULL."""
    with database.read() as connection:
        num_pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()

    @event.listens_for(database._engine, "checkout")
    def _limit(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {num_pages}")

    @event.listens_for(database._engine, "checkin")
    def _lift(connection: Any, *_: object) -> None:
        if connection is not None:
            connection.execute("PRAGMA max_page_count = 1073741823")

    yield
    # `_lift` stays, because connections that are in use now come back with the limit.
    event.remove(database._engine, "checkout", _limit)


CASES = [
    pytest.param(EVERYTHING, "53100", id="disk full"),
    pytest.param(("usage_events",), "53100", id="disk full for settlements alone"),
    pytest.param(("reservations",), "53100", id="disk full for reservations alone", marks=pytest.mark.campaign),
    pytest.param(EVERYTHING, "53200", id="out of memory", marks=pytest.mark.campaign),
    pytest.param(EVERYTHING, "40P01", id="always a deadlock", marks=pytest.mark.campaign),
    pytest.param(EVERYTHING, "55P03", id="lock timeout", marks=pytest.mark.campaign),
    pytest.param(EVERYTHING, "57014", id="statement timeout"),
    pytest.param(EVERYTHING, "57P03", id="cannot connect now", marks=pytest.mark.campaign),
    pytest.param((), "25006", id="read-only"),
]


@pytest.mark.parametrize(("tables", "code"), CASES)
async def test_postgres_that_refuses_writes(
    migrated_postgres_url: str,
    tables: Sequence[str],
    code: str,
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    anyio_backend: str,
) -> None:
    database = Database(migrated_postgres_url)
    fault = refusing(migrated_postgres_url, tables, code) if tables else read_only(migrated_postgres_url)
    async with maintained(database, tokenizer, tmp_path / "spool") as gateway:
        gateway.limit("tokens_per_minute", 1_000_000)
        gateway.engine.script = lambda add: Script(token_ids=(300,) * add.max_tokens, delay_s=0.01)
        assert is_whole(await ask(gateway))
        resume = hold_streams(gateway)
        stream = asyncio.create_task(ask(gateway))
        await until_streaming(gateway, 1)
        with fault:
            resume.set()
            assert is_whole(await stream)
            spool = gateway.services.run.spool
            assert spool is not None
            if "reservations" not in tables or tables == EVERYTHING:
                assert spool.num_bytes > 0, "its settlement is spooled"
            if tables != ("usage_events",):
                refused = await ask(gateway)
                assert is_refused(refused), refused.text
                assert "secret" not in refused.text
            if tables in ((), EVERYTHING):
                assert not await is_ready(gateway)
        await until_ready(gateway, True)
        await until_spool_is_empty(gateway)
        assert is_whole(await ask(gateway))
        events = [one for one in gateway.usage() if one.status == "completed"]
        assert [one.completion_tokens for one in events] == [NUM_TOKENS] * 3
        assert_all_is_settled(gateway)
    database.close()


async def full_and_free_again(gateway: Gateway, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Send requests until the disk is full. Each must get a 503, or its whole stream and a ledger entry."""
    gateway.limit("tokens_per_minute", 1_000_000)
    gateway.engine.script = lambda add: Script(token_ids=(300,) * add.max_tokens, delay_s=0.01)
    assert is_whole(await ask(gateway))
    resume = hold_streams(gateway)
    streams = [asyncio.create_task(ask(gateway)) for _ in range(4)]
    await until_streaming(gateway, 4)
    await asyncio.to_thread(begin)
    resume.set()
    answers = await asyncio.gather(*streams)
    while not is_refused(answers[-1]):
        assert len(answers) < MAX_UNTIL_FULL
        assert is_whole(answers[-1]), answers[-1].text
        answers.append(await ask(gateway, 1))
    assert not is_refused(answers[0])
    await asyncio.to_thread(end)
    await until_ready(gateway, True)
    await until_spool_is_empty(gateway)
    async with asyncio.timeout(PATIENCE_S):
        while is_refused(later := await ask(gateway)):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert is_whole(later)
    num_short = len(answers) - 5
    with gateway.database.read() as connection:
        table = schema.usage_events.c
        billed = connection.execute(select(table.completion_tokens).where(table.status == "completed")).scalars().all()
    assert sorted(billed) == [1] * num_short + [NUM_TOKENS] * 6
    assert_all_is_settled(gateway)


async def test_sqlite_on_a_full_disk(tokenizer: ModelTokenizer, tmp_path: Path, anyio_backend: str) -> None:
    # Use a new file, because other tests' deletions leave free pages in the shared file.
    database = Database(migrated_sqlite(tmp_path / "loramux.db"))
    fault = no_more_pages(database)
    async with maintained(database, tokenizer, tmp_path / "spool") as gateway:
        await full_and_free_again(gateway, fault.__enter__, lambda: fault.__exit__(None, None, None) and None)
    database.close()


@pytest.mark.campaign
async def test_postgres_on_a_full_disk(tokenizer: ModelTokenizer, tmp_path: Path, anyio_backend: str) -> None:
    with faulty_postgres(disk_mb=160) as server:
        migrate(server.url)
        database = Database(server.url)
        async with maintained(database, tokenizer, tmp_path / "spool") as gateway:
            await full_and_free_again(gateway, server.fill_disk, server.free_disk)
        database.close()


class CountedAdmission(Admission):
    num_refused = 0

    def commit(self, operations: Sequence[Operation]) -> list[Outcome]:
        try:
            return super().commit(operations)
        except OperationalError:
            self.num_refused += 1
            raise


async def test_deadlock_is_retried_transparently(migrated_postgres_url: str, anyio_backend: str) -> None:
    database = Database(migrated_postgres_url + "&options=-c%20deadlock_timeout%3D50ms")
    tenant = Tenants(database).create("acme")
    key = ApiKeys(database).create(tenant.id, "test").key.id
    for metric in ("tokens_per_minute", "requests_per_minute"):
        QuotaPolicies(database).set(tenant.id, metric, 1000)
    admission = CountedAdmission(database)
    committer = GroupCommit(admission)

    def request() -> ReservationRequest:
        return ReservationRequest(
            request_id=new_id("req"),
            tenant_id=tenant.id,
            api_key_id=key,
            model="base",
            adapter_version_id=None,
            endpoint="completions",
            prompt_tokens=1,
            reserved_tokens=5,
        )

    # The first request creates the counters that the second locks.
    await committer.submit(request())
    counters = schema.quota_counters
    with database.read() as connection:
        first, last = sorted(connection.execute(select(counters.c.policy_id)).scalars())

    def touch(connection: Any, policy_id: str) -> None:
        connection.execute(update(counters).where(counters.c.policy_id == policy_id).values(exceeded=0))

    def in_the_wrong_order(has_last: threading.Event) -> None:
        with (
            psycopg.connect(migrated_postgres_url) as third,
            ThreadPoolExecutor(1) as threads,
            database.write() as connection,
        ):
            # A session looks for a deadlock once, and gives up if it finds one. This one must not be first.
            connection.exec_driver_sql("SET LOCAL deadlock_timeout = '60s'")
            touch(connection, last)
            third.execute("SELECT FROM quota_counters WHERE policy_id = %s FOR UPDATE", (first,))
            has_last.set()
            until_wait(migrated_postgres_url, 1)

            def give_first() -> None:
                until_wait(migrated_postgres_url, 2)
                third.rollback()

            # The committer waits for the first counter, and then this session. Once the committer gets the counter, it
            # waits for the last one, and so completes the cycle.
            giving = threads.submit(give_first)
            touch(connection, first)
            giving.result()

    has_last = threading.Event()
    wrong = asyncio.create_task(asyncio.to_thread(in_the_wrong_order, has_last))
    assert await asyncio.to_thread(has_last.wait, PATIENCE_S)
    assert isinstance(await committer.submit(request()), Reservation)
    await wrong
    committer.close()
    assert admission.num_refused == 1, "exactly one deadlock occurred"
    database.close()
