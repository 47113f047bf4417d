from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import select

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.generation.settlement_spool import SettlementSpool
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, open_gateway

NUM_TOKENS = 20
PATIENCE_S = 40


@asynccontextmanager
async def maintained(
    database: Database, tokenizer: ModelTokenizer, spool: Path, spool_bytes: int = 1 << 20
) -> AsyncIterator[Gateway]:
    with ThreadPoolExecutor(8) as threads:
        async with open_gateway(database, tokenizer, threads, spool=SettlementSpool(spool, spool_bytes)) as gateway:
            maintaining = asyncio.create_task(gateway.services.run.maintenance.run())
            yield gateway
            assert await gateway.services.run.requests.drain(PATIENCE_S)
            maintaining.cancel()
            await asyncio.wait({maintaining})


async def ask(gateway: Gateway, max_tokens: int = NUM_TOKENS, model: str = "base") -> Any:
    body = {"model": model, "prompt": "a", "max_tokens": max_tokens, "stream": True}
    return await gateway.http.post("/v1/completions", json=body, timeout=PATIENCE_S)


def is_whole(answer: Any) -> bool:
    return answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]")


def is_refused(answer: Any) -> bool:
    return (
        answer.status_code == 503
        and answer.json()["error"]["code"] == "quota_unavailable"
        and int(answer.headers["retry-after"]) >= 1
    )


def hold_streams(gateway: Gateway, after: int = NUM_TOKENS // 4) -> asyncio.Event:
    """Let streams stop after a few tokens until the returned event is set, so that a test can act amid all of them."""
    script, resume = gateway.engine.script, asyncio.Event()
    gateway.engine.script = lambda add: replace(script(add), stall_after=after, resume=resume)
    return resume


async def until_streaming(gateway: Gateway, num_streams: int) -> None:
    def num_amid() -> int:
        return sum(0 < received < NUM_TOKENS for received in gateway.services.run.requests.progress().values())

    async with asyncio.timeout(PATIENCE_S):
        while num_amid() < num_streams:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def is_ready(gateway: Gateway) -> bool:
    return bool((await gateway.http.get("/health/ready")).status_code == 200)


async def until_ready(gateway: Gateway, wanted: bool) -> float:
    started = time.monotonic()
    while await is_ready(gateway) is not wanted:
        assert time.monotonic() - started < PATIENCE_S
        await asyncio.sleep(0.05)
    return time.monotonic() - started


async def until_spool_is_empty(gateway: Gateway) -> None:
    spool = gateway.services.run.spool
    assert spool is not None
    async with asyncio.timeout(PATIENCE_S):
        while spool.num_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def assert_all_is_settled(gateway: Gateway) -> None:
    with gateway.database.read() as connection:
        left = connection.execute(select(schema.reservations.c.id, schema.reservations.c.state)).all()
        held = connection.execute(select(schema.quota_counters.c.reserved)).scalars().all()
    assert left == [], "refused requests hold nothing either"
    assert set(held) == {0}
