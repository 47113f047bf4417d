"""Clients that stream answers from several servers in turn, as behind a round-robin balancer."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.peers.system import SystemFailed

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The shape of requests. Popularity follows Zipf's law with exponent `alpha`."""

    num_prompt: int
    num_output: int
    alpha: float
    vocab_size: int

    def bodies(self, models: Sequence[str], seed: str, num_requests: int) -> list[dict[str, Any]]:
        dice = random.Random(seed)
        # Shuffle the adapters, so that popularity does not follow the order in which they were pushed.
        ranked = random.Random(0).sample(list(models), len(models))
        weights = [1 / (rank + 1) ** self.alpha for rank in range(len(ranked))]
        return [
            {
                "model": model,
                "prompt": [dice.randrange(300, self.vocab_size) for _ in range(self.num_prompt)],
                "max_tokens": self.num_output,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
            }
            for model in dice.choices(ranked, weights, k=num_requests)
        ]


@dataclass(slots=True)
class Sample:
    """The clients' observations in one round. Times are in seconds."""

    seconds: float = 0.0
    num_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Times between consecutive chunks of a stream."""


async def run_clients(urls: Sequence[str], api_key: str, bodies: Sequence[dict[str, Any]], num_clients: int) -> Sample:
    """Send the bodies to the servers in turn. Each client has one open request at a time.

    Raises SystemFailed if an answer fails or ends early.
    """
    sample = Sample()
    queue = zip(bodies, itertools.cycle(urls), strict=False)
    async with _open_client(api_key) as client:

        async def work() -> None:
            for body, url in queue:
                await stream(client, f"{url}/v1/completions", body, sample)

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(work())
        sample.seconds = time.perf_counter() - started
    return sample


async def run_arrivals(
    urls: Sequence[str], api_key: str, bodies: Sequence[dict[str, Any]], requests_per_s: float, seed: str
) -> Sample:
    """Send the bodies to the servers in turn, at random times (Poisson arrivals).

    Raises SystemFailed if an answer fails or ends early.
    """
    sample, dice = Sample(), random.Random(seed)
    async with _open_client(api_key) as client:
        started = due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for body, url in zip(bodies, itertools.cycle(urls), strict=False):
                due += dice.expovariate(requests_per_s)
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(stream(client, f"{url}/v1/completions", body, sample))
        sample.seconds = time.perf_counter() - started
    return sample


def _open_client(api_key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"authorization": f"Bearer {api_key}"}
    return httpx.AsyncClient(headers=headers, limits=limits, timeout=TIMEOUT_S, trust_env=False)


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any], sample: Sample) -> None:
    """Stream one answer. Raises SystemFailed if it fails, or has not the requested number of tokens."""
    sent = last = time.perf_counter()
    num_tokens = 0
    asks_usage = body | {"stream_options": {"include_usage": True}}
    async with client.stream("POST", url, json=asks_usage) as response:
        if response.status_code != 200:
            raise SystemFailed(f"{url} answers {response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            document = json.loads(line.removeprefix("data: "))
            if "error" in document:
                raise SystemFailed(f"{url} ended a stream: {line[:500]}")
            if document.get("usage"):
                num_tokens = document["usage"]["completion_tokens"]
            elif last == sent:
                sample.first_token_s.append(now - sent)
            else:
                sample.gaps_s.append(now - last)
            last = now
    if num_tokens != body["max_tokens"]:
        raise SystemFailed(f"{url} answered with {num_tokens} tokens instead of {body['max_tokens']}")
    sample.num_tokens += num_tokens
