from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from loramux.migrations.database import Database
from loramux.platform.admission import database_health
from loramux.platform.generation import maintenance, running_requests, settler
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway
from tests.platform.generation.troubled_gateway import (
    NUM_TOKENS,
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

RESERVE_WAIT_S, STALLED_S = 2.0, 0.4
MARGIN_S = 30.0
"""Slack for a busy machine, in seconds. Without the deadline, requests would wait until the lock is released."""


@contextmanager
def stalled(url: str) -> Iterator[None]:
    with psycopg.connect(url) as connection:
        connection.execute("LOCK TABLE reservations")
        yield


async def test_requests_waiting_for_cold_adapters_respect_the_deadline(
    migrated_postgres_url: str,
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    anyio_backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "TEND_INTERVAL_S", 0.1)
    database = Database(migrated_postgres_url)
    async with maintained(database, tokenizer, tmp_path / "spool") as gateway:
        for name in ("held", "one", "two"):
            gateway.add_adapter("acme", name)
        gateway.engine.resident[hashlib.sha256(b"acme/held@1").hexdigest()] = 1
        gateway.limit("cold_loads_per_minute", 2)
        gateway.engine.script = lambda add: Script(token_ids=(300,) * add.max_tokens, delay_s=0.01)
        resume = hold_streams(gateway)
        stream = asyncio.create_task(ask(gateway, model="held"))
        await until_streaming(gateway, 1)
        with monkeypatch.context() as impatient:
            impatient.setattr(running_requests, "RESERVE_WAIT_S", RESERVE_WAIT_S)
            impatient.setattr(settler, "SETTLE_WAIT_S", 0.3)
            impatient.setattr(database_health, "STALLED_S", STALLED_S)
            with stalled(migrated_postgres_url):
                resume.set()
                waiting = [timed(gateway, model) for model in ("one", "one", "two", "one", "two", "held", "base")]
                answers = await asyncio.gather(*waiting)
                assert is_whole(await stream), "running streams finish"
                assert all(is_refused(answer) for answer, _ in answers)
                assert max(took_s for _, took_s in answers) < RESERVE_WAIT_S + MARGIN_S
                # If these waited for the deadline, they would take minutes.
                impatient.setattr(running_requests, "RESERVE_WAIT_S", 60.0)
                later = [await timed(gateway, model) for model in ("one", "held", "base")]
                assert all(is_refused(answer) for answer, _ in later)
                assert max(took_s for _, took_s in later) < MARGIN_S, "the trouble is already known"
                await until_ready(gateway, False)
            await until_ready(gateway, True)
        await until_spool_is_empty(gateway)
        # Every cold load was refunded, so two are available again.
        for model in ("one", "two", "held", "base"):
            assert is_whole(await ask(gateway, model=model))
        events = [event for event in gateway.usage() if event.status == "completed"]
        assert [event.completion_tokens for event in events] == [NUM_TOKENS] * 5
        assert_all_is_settled(gateway)
    database.close()


async def timed(gateway: Gateway, model: str) -> tuple[Any, float]:
    started_s = time.monotonic()
    return await ask(gateway, model=model), time.monotonic() - started_s
