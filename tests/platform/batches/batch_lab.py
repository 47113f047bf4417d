"""Batches on a gateway with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from openai.types import Batch

from loramux.engine.protocol.messages import Add
from loramux.migrations.database import Database
from loramux.platform.batches.batch_claims import BatchQueue
from loramux.platform.batches.batch_run import BatchPace
from loramux.platform.batches.room import RoomLimits
from loramux.platform.batches.runner import BatchRunner
from loramux.platform.ledger.events import Ledger, UsageEvent
from tests.platform.gateways import Gateway
from tests.platform.scripted_engine import Script

CHAT = "/v1/chat/completions"
PACE = BatchPace(poll_s=0.02, retry_s=0.05, caller_s=0.0)
LIMITS = RoomLimits(capacity=lambda: 6, look_s=0.01, queue_s=0.2, gather_s=0.005)


def line(custom_id: str, model: str = "base", url: str = CHAT, **body: Any) -> dict[str, Any]:
    sent = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": custom_id}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": sent}


def content_of(lines: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def events_of(database: Database) -> list[UsageEvent]:
    """All entries of the ledger."""
    found: list[UsageEvent] = []
    after = None
    while True:
        page = Ledger(database).events(None, limit=100, after=after)
        found += page.data
        if not page.has_more:
            return found
        after = page.data[-1].request_id


@dataclass
class BatchLab:
    gateway: Gateway
    limits: RoomLimits = LIMITS
    pace: BatchPace = PACE
    lease_us: int = 30_000_000

    def runner(self) -> BatchRunner:
        services = self.gateway.services
        queue = BatchQueue(self.gateway.database, self.lease_us)
        return BatchRunner(services, self.gateway.kept.files, queue, services.metrics.batches, self.limits, self.pace)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.runner().run(asyncio.Event()))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def create(self, lines: Sequence[dict[str, Any]] | bytes, endpoint: Any = CHAT, **options: Any) -> Batch:
        content = lines if isinstance(lines, bytes) else content_of(lines)
        client = self.gateway.openai
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)

    def hold_after(self, num_answers: int) -> asyncio.Event:
        """Let the engine answer this many lines, and the others only once the returned event is set."""
        engine, resume = self.gateway.engine, asyncio.Event()
        num_before = len(engine.adds)

        def script(_: Add) -> Script:
            # The engine has already counted this line.
            is_held = len(engine.adds) - num_before > num_answers
            return Script(token_ids=(5, 6), stall_after=0 if is_held else None, resume=resume)

        engine.script = script
        return resume

    async def finished(self, batch: Batch) -> Batch:
        return await self.until(batch, lambda now: now.status in ("completed", "failed", "expired", "cancelled"))

    async def until(self, batch: Batch, is_so: Any) -> Batch:
        async with asyncio.timeout(60):
            while not is_so(now := await self.gateway.openai.batches.retrieve(batch.id)):  # noqa: ASYNC110
                # The call takes as long as some batches. More of them would delay the batch.
                await asyncio.sleep(0.03)
        return now

    async def lines_of(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        content = (await self.gateway.openai.files.content(file_id)).content
        return [json.loads(one) for one in content.splitlines()]

    async def outputs(self, batch: Batch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return await self.lines_of(batch.output_file_id), await self.lines_of(batch.error_file_id)

    def tokens(self) -> int:
        return sum(event.prompt_tokens + event.completion_tokens for event in self.gateway.usage())
