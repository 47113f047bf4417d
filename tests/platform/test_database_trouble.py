"""A database that is away, silent, full, locked or overrun: streams finish, nothing is lost, and the health tells."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, select, update
from sqlalchemy.exc import OperationalError

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform import running
from loramux.platform.admission import Admission
from loramux.platform.api_keys import ApiKeys
from loramux.platform.group_commit import GroupCommit
from loramux.platform.model_tokenizer import ModelTokenizer
from loramux.platform.quotas import QuotaPolicies
from loramux.platform.reservations import Operation, Outcome, Reservation, ReservationRequest
from loramux.platform.scripted_engine import Script
from loramux.platform.settlement_spool import SettlementSpool
from loramux.platform.tenants import Tenants
from tests.migrated import migrate
from tests.platform.conftest import Gateway, open_gateway
from tests.platform.faulty_postgres import FaultyPostgres, faulty_postgres

pytestmark = pytest.mark.anyio

NUM_STREAMS, NUM_TOKENS = 4, 20
PATIENCE_S = 40


@pytest.fixture(scope="module")
def postgres() -> Iterator[FaultyPostgres]:
    with faulty_postgres() as server:
        migrate(server.url)
        yield server


Fault = tuple[Callable[[], None], Callable[[], None]]
"""What brings the trouble, and what ends it."""


def away(postgres: FaultyPostgres) -> Fault:
    return postgres.kill, postgres.start


def silent(postgres: FaultyPostgres) -> Fault:
    return postgres.pause, postgres.resume


def overrun(postgres: FaultyPostgres) -> Fault:
    """Strangers take every connection, and the gateway loses its own."""
    taken = ExitStack()
    ended = threading.Event()

    def storm() -> None:
        while not ended.is_set():
            try:
                taken.push(psycopg.connect(postgres.url))
            except psycopg.OperationalError:
                ended.wait(0.005)

    stormer = threading.Thread(target=storm)

    def begin() -> None:
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            stormer.start()
            deadline = time.monotonic() + 10
            count = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
            while connection.execute(count).fetchone()[0] < 97 and time.monotonic() < deadline:  # type: ignore[index]
                time.sleep(0.02)
            # Whoever is quicker has the place of one that is ended: until the strangers have them all.
            gateways = "FROM pg_stat_activity WHERE application_name = 'gateway'"
            num_quiet = 0
            while num_quiet < 5 and time.monotonic() < deadline:
                num_ended = connection.execute(f"SELECT pg_terminate_backend(pid) {gateways}").rowcount
                num_quiet = 0 if num_ended else num_quiet + 1
                time.sleep(0.1)

    def end() -> None:
        ended.set()
        stormer.join()
        taken.close()

    return begin, end


@asynccontextmanager
async def maintained(database: Database, tokenizer: ModelTokenizer, spool: Path) -> AsyncIterator[Gateway]:
    with ThreadPoolExecutor(8) as threads:
        async with open_gateway(database, tokenizer, threads, spool=SettlementSpool(spool, 1 << 20)) as gateway:
            maintaining = asyncio.create_task(gateway.services.running.maintain())
            yield gateway
            maintaining.cancel()
            await asyncio.wait({maintaining})


async def ask(gateway: Gateway, max_tokens: int = NUM_TOKENS) -> Any:
    body = {"model": "base", "prompt": "a", "max_tokens": max_tokens, "stream": True}
    return await gateway.http.post("/v1/completions", json=body, timeout=PATIENCE_S)


async def is_ready(gateway: Gateway) -> bool:
    return bool((await gateway.http.get("/health/ready")).status_code == 200)


async def until_ready(gateway: Gateway, wanted: bool) -> float:
    started = time.monotonic()
    while await is_ready(gateway) is not wanted:
        assert time.monotonic() - started < PATIENCE_S
        await asyncio.sleep(0.05)
    return time.monotonic() - started


async def trouble_under_streams(gateway: Gateway, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Streams run when the trouble begins and finish in it; then it ends, and all of them are in the ledger."""
    gateway.limit("tokens_per_minute", 1_000_000)
    gateway.engine.script = lambda add: Script(token_ids=(300,) * add.max_tokens, delay_s=0.05)
    assert (await ask(gateway)).status_code == 200
    streams = [asyncio.create_task(ask(gateway)) for _ in range(NUM_STREAMS)]
    async with asyncio.timeout(PATIENCE_S):
        while sum(map(bool, gateway.services.running.progress().values())) < NUM_STREAMS:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await asyncio.to_thread(begin)
    started = time.monotonic()
    for answer in await asyncio.gather(*streams):
        assert answer.status_code == 200
        assert answer.text.rstrip().endswith("data: [DONE]")
    # 20 tokens take a second; the rest is what a settlement may wait before it goes to the disk.
    assert time.monotonic() - started < 10
    refused = await ask(gateway)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "quota_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    await until_ready(gateway, False)
    assert gateway.services.spool is not None
    assert gateway.services.spool.num_bytes > 0
    await asyncio.to_thread(end)
    await until_ready(gateway, True)
    async with asyncio.timeout(PATIENCE_S):
        while gateway.services.spool.num_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        while (later := await ask(gateway)).status_code == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert later.status_code == 200
    events = [event for event in gateway.usage() if event.status == "completed"]
    assert [event.completion_tokens for event in events] == [NUM_TOKENS] * (NUM_STREAMS + 2)
    with gateway.database.read() as connection:
        states = connection.execute(select(schema.reservations.c.state)).scalars().all()
        held = connection.execute(select(schema.quota_counters.c.reserved)).scalars().all()
    assert set(states) == {"settled"}, "what was refused holds nothing either"
    assert set(held) == {0}


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(away, id="killed"),
        pytest.param(silent, id="paused", marks=pytest.mark.campaign),
        pytest.param(overrun, id="out of connections", marks=pytest.mark.campaign),
    ],
)
async def test_postgres_in_trouble_under_streams(
    postgres: FaultyPostgres,
    trouble: Callable[[FaultyPostgres], Fault],
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    anyio_backend: str,
) -> None:
    database = Database(f"{postgres.url}&application_name=gateway")
    _empty(database)
    async with maintained(database, tokenizer, tmp_path / "spool") as gateway:
        begin, end = trouble(postgres)
        try:
            await trouble_under_streams(gateway, begin, end)
        except BaseException:
            end()
            raise
    database.close()


@pytest.mark.parametrize("trouble", [pytest.param("locked", marks=pytest.mark.campaign), "full"])
async def test_sqlite_in_trouble_under_streams(
    trouble: str, accounts: Database, tokenizer: ModelTokenizer, tmp_path: Path, anyio_backend: str
) -> None:
    is_full = threading.Event()
    lock = sqlite3.connect(accounts._url.database or "", isolation_level=None, check_same_thread=False)

    @event.listens_for(accounts._engine, "do_execute")
    @event.listens_for(accounts._engine, "do_executemany")
    def _write(_cursor: Any, statement: str, _parameters: Any, _context: Any) -> None:
        if is_full.is_set() and statement.startswith(("INSERT", "UPDATE")):
            raise sqlite3.OperationalError("database or disk is full")

    async with maintained(accounts, tokenizer, tmp_path / "spool") as gateway:
        if trouble == "full":
            await trouble_under_streams(gateway, is_full.set, is_full.clear)
        else:
            begin, end = (lambda: lock.execute("BEGIN IMMEDIATE"), lambda: lock.execute("ROLLBACK"))
            await trouble_under_streams(gateway, begin, end)  # type: ignore[arg-type]
    lock.close()
    event.remove(accounts._engine, "do_execute", _write)
    event.remove(accounts._engine, "do_executemany", _write)


async def test_what_a_dead_gateway_spooled_is_settled_by_its_next_life(
    accounts: Database, tokenizer: ModelTokenizer, tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = SettlementSpool(tmp_path / "spool", 1 << 20)
    with ThreadPoolExecutor(2) as threads:
        async with open_gateway(accounts, tokenizer, threads, spool=spool) as gateway:

            async def away(_: object) -> bool:
                return False

            monkeypatch.setattr(gateway.services.running, "_settle_now", away)
            assert (await ask(gateway, 5)).text.rstrip().endswith("[DONE]")
            assert gateway.usage() == []
        # The same directory, another process's life.
        life = running.RunningRequests(
            *(Admission(accounts), GroupCommit(Admission(accounts)), gateway.engine, tokenizer),
            *(gateway.services.metrics, gateway.services.call, accounts.now_us),
            spool=SettlementSpool(tmp_path / "spool", 1 << 20),
        )
        for _ in range(2):
            await life.replay()
        life._commit.close()
        life.close()
    assert [event.completion_tokens for event in gateway.usage()] == [5]


class CountedAdmission(Admission):
    """Counts the transactions that the database undid."""

    num_refused = 0

    def commit(self, operations: Sequence[Operation]) -> list[Outcome]:
        try:
            return super().commit(operations)
        except OperationalError:
            self.num_refused += 1
            raise


async def test_a_deadlock_is_tried_again_and_nobody_notices(postgres: FaultyPostgres, anyio_backend: str) -> None:
    database = Database(postgres.url)
    _empty(database)
    tenant = Tenants(database).create("acme")
    key = ApiKeys(database).create(tenant.id, "test").key.id
    for metric in ("tokens_per_minute", "requests_per_minute"):
        QuotaPolicies(database).set(tenant.id, metric, 1000)
    with database.read() as connection:
        first, last = sorted(connection.execute(select(schema.quota_policies.c.id)).scalars())
    admission = CountedAdmission(database)
    committer = GroupCommit(admission)

    def touch(connection: Any, policy_id: str) -> None:
        policies = schema.quota_policies
        connection.execute(update(policies).where(policies.c.id == policy_id).values(updated_us=1))

    def in_the_wrong_order(has_last: threading.Event) -> None:
        with database.write() as connection:
            touch(connection, last)
            has_last.set()
            # By then the committer has the first and waits for the last; whoever waits longer is the victim.
            time.sleep(0.4)
            touch(connection, first)

    has_last = threading.Event()
    wrong = asyncio.create_task(asyncio.to_thread(in_the_wrong_order, has_last))
    await asyncio.to_thread(has_last.wait, 10)
    request = ReservationRequest(
        request_id=new_id("req"),
        tenant_id=tenant.id,
        api_key_id=key,
        model="base",
        adapter_version_id=None,
        endpoint="completions",
        prompt_tokens=1,
        reserved_tokens=5,
    )
    assert isinstance(await committer.submit(request), Reservation)
    await wrong
    committer.close()
    with database.read() as connection:
        deadlocks = (
            "SELECT pg_stat_clear_snapshot(), deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
        assert connection.exec_driver_sql(deadlocks).one()[1] >= 0
    database.close()


def _empty(database: Database) -> None:
    with database.write() as connection:
        for table in reversed(schema.metadata.sorted_tables):
            connection.execute(table.delete())
