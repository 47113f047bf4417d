"""A server with a gateway, and another server that runs its requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.migrations.database import Database
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.replicas.lab import Replica, two_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A server with a gateway, and another that runs its requests."""

    gateway: Gateway
    first: Replica
    second: Replica

    async def complete(self, **more: Any) -> dict[str, Any]:
        body = {"model": "base", "prompt": "abc", "max_tokens": 8, **more}
        answer = await self.gateway.http.post("/v1/completions", json=body)
        return {"status": answer.status_code, **answer.json()}

    def bills(self) -> list[tuple[object, ...]]:
        return [
            (one.status, one.model, one.prompt_tokens, one.completion_tokens, one.cached_tokens)
            for one in self.gateway.usage()
        ]


@asynccontextmanager
async def open_pair(
    database: Database,
    tokenizer: ModelTokenizer,
    threads: ThreadPoolExecutor,
    directory: Path,
    base_ids: tuple[str, str] = ("", ""),
) -> AsyncIterator[Pair]:
    async with two_replicas(database, threads, directory, base_ids) as (first, second):
        routed = first.engine, first.scripted
        draw = first.draw if any(base_ids) else None
        async with open_gateway(database, tokenizer, threads, routed=routed, draw=draw) as gateway:
            yield Pair(gateway=gateway, first=first, second=second)
