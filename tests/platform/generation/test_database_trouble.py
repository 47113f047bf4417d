from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.database_health import DatabaseHealth
from loramux.platform.admission.group_commit import GroupCommit
from loramux.platform.generation.settlement_spool import SettlementSpool
from loramux.platform.generation.settler import Settler
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.migrated import migrate
from tests.platform.faulty_postgres import FaultyPostgres, faulty_postgres
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.generation.troubled_gateway import (
    NUM_TOKENS,
    PATIENCE_S,
    ask,
    assert_all_is_settled,
    hold_streams,
    is_refused,
    is_whole,
    maintained,
    until_ready,
    until_spool_is_empty,
    until_streaming,
)
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

NUM_STREAMS = 4


@pytest.fixture(autouse=True)
def patience() -> None:
    """The gateway waits for the database as long as a server does."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[FaultyPostgres]:
    with faulty_postgres() as server:
        migrate(server.url)
        yield server


Fault = tuple[Callable[[], None], Callable[[], None]]
"""Functions that start and end the trouble."""


def away(postgres: FaultyPostgres) -> Fault:
    return postgres.kill, postgres.start


def silent(postgres: FaultyPostgres) -> Fault:
    return postgres.pause, postgres.resume


def overrun(postgres: FaultyPostgres) -> Fault:
    """Other clients take every connection, including the gateway's."""
    taken = ExitStack()

    def begin() -> None:
        first = taken.enter_context(psycopg.connect(postgres.url, autocommit=True))
        num_places = int(first.execute("SHOW max_connections").fetchone()[0])  # type: ignore[index]
        num_taken, ends_s = 1, time.monotonic() + PATIENCE_S
        # The test must hold all connections itself, because nothing else proves that the gateway has none.
        while num_taken < num_places:
            assert time.monotonic() < ends_s, f"strangers have {num_taken} of {num_places} connections"
            try:
                taken.enter_context(psycopg.connect(postgres.url))
                num_taken += 1
            except psycopg.OperationalError:
                # The remaining connections are the gateway's. End them and compete for the free slots.
                first.execute(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'gateway'"
                )

    return begin, taken.close


async def trouble_under_streams(gateway: Gateway, begin: Callable[[], None], end: Callable[[], None]) -> None:
    gateway.limit("tokens_per_minute", 1_000_000)
    gateway.engine.script = lambda add: Script(token_ids=(300,) * add.max_tokens, delay_s=0.01)
    assert is_whole(await ask(gateway))
    resume = hold_streams(gateway)
    streams = [asyncio.create_task(ask(gateway)) for _ in range(NUM_STREAMS)]
    await until_streaming(gateway, NUM_STREAMS)
    await asyncio.to_thread(begin)
    started = time.monotonic()
    resume.set()
    assert all(map(is_whole, await asyncio.gather(*streams)))
    # A settlement waits for two seconds before it is spooled. A busy machine takes longer.
    assert time.monotonic() - started < 12
    assert is_refused(await ask(gateway))
    await until_ready(gateway, False)
    assert gateway.services.run.spool is not None
    assert gateway.services.run.spool.num_bytes > 0
    await asyncio.to_thread(end)
    await until_ready(gateway, True)
    await until_spool_is_empty(gateway)
    async with asyncio.timeout(PATIENCE_S):
        while (later := await ask(gateway)).status_code == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert is_whole(later)
    events = [event for event in gateway.usage() if event.status == "completed"]
    assert [event.completion_tokens for event in events] == [NUM_TOKENS] * (NUM_STREAMS + 2)
    assert_all_is_settled(gateway)


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(away, id="killed"),
        pytest.param(silent, id="paused", marks=pytest.mark.campaign),
        pytest.param(overrun, id="out of connections", marks=pytest.mark.campaign),
    ],
)
async def test_streams_survive_postgres_trouble(
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


@pytest.mark.campaign
async def test_streams_survive_a_locked_sqlite(
    accounts: Database, tokenizer: ModelTokenizer, tmp_path: Path, anyio_backend: str
) -> None:
    lock = sqlite3.connect(accounts._url.database or "", isolation_level=None, check_same_thread=False)
    async with maintained(accounts, tokenizer, tmp_path / "spool") as gateway:
        begin, end = (lambda: lock.execute("BEGIN IMMEDIATE"), lambda: lock.execute("ROLLBACK"))
        await trouble_under_streams(gateway, begin, end)  # type: ignore[arg-type]
    lock.close()


async def test_spool_of_a_dead_gateway_is_settled_after_a_restart(
    accounts: Database, tokenizer: ModelTokenizer, tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = SettlementSpool(tmp_path / "spool", 1 << 20)
    with ThreadPoolExecutor(2) as threads:
        async with open_gateway(accounts, tokenizer, threads, spool=spool) as gateway:

            async def away(_: object) -> bool:
                return False

            monkeypatch.setattr(gateway.services.run.settler, "_settle_now", away)
            assert is_whole(await ask(gateway, 5))
            assert gateway.usage() == []
        # The same directory, opened by the next process.
        commit, spool = GroupCommit(Admission(accounts)), SettlementSpool(tmp_path / "spool", 1 << 20)
        life = Settler(commit, gateway.services.metrics.generation, DatabaseHealth(), spool)
        for _ in range(2):
            await life.replay()
        commit.close()
        life.close()
    assert [event.completion_tokens for event in gateway.usage()] == [5]


def _empty(database: Database) -> None:
    with database.write() as connection:
        for table in reversed(schema.metadata.sorted_tables):
            connection.execute(table.delete())
