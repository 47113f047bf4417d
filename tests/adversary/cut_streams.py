from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import httpx

from tests.adversary.raw_calls import is_documented
from tests.adversary.stand import ADAPTER, BASE, Stand

NUM_AT_ONCE = 16
RACE_TOKENS = 200


async def cut(stand: Stand, dice: random.Random, num_calls: int) -> Counter[str]:
    """Start `num_calls` streams and disconnect from each after a random number of reads, possibly zero."""
    outcomes: Counter[str] = Counter()
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def one() -> None:
        async with places:
            body = _body(dice.choice((ADAPTER, BASE)), max_tokens=dice.randrange(1, 60), n=dice.choice((1, 1, 2)))
            answer, is_left = await _stream(stand, body, num_reads=dice.randrange(12))
        outcomes["left" if is_left else answer[9:12].decode() or "closed"] += 1
        if answer[9:10] == b"5" and not is_documented(answer):
            stand.undocumented[f"{answer[9:12].decode()} cut stream"] += 1

    await asyncio.gather(*(one() for _ in range(num_calls)))
    return outcomes


async def race(stand: Stand, dice: random.Random, num_calls: int) -> Counter[str]:
    """Send concurrent calls that together need more than twice the token quota, and check that it is not exceeded."""
    outcomes: Counter[str] = Counter()
    per_call = 11
    limit = num_calls * per_call * 4 // 9
    slug = f"race-{dice.randrange(10**9)}"
    stand.deployment.json("tenants", "create", slug)
    key = stand.deployment.json("keys", "create", "--tenant", slug)["secret"]
    policy = ("--metric", "tokens_per_day", "--limit", str(limit))
    stand.deployment.json("quotas", "set", "--tenant", slug, *policy)
    places = asyncio.Semaphore(4 * NUM_AT_ONCE)

    async def one() -> None:
        async with places:
            answer, _ = await _stream(stand, _body(BASE, max_tokens=per_call - 1, n=1), key=key)
        outcomes[answer[9:12].decode() or "closed"] += 1

    await asyncio.gather(*(one() for _ in range(num_calls)))
    async with httpx.AsyncClient(base_url=stand.admin_url, headers=stand.operator, trust_env=False) as http:
        usage = (await http.get("/admin/v1/usage", params={"tenant": slug}, timeout=30)).json()
    results = [result for bucket in usage["data"] for result in bucket["results"]]
    used = sum(result["prompt_tokens"] + result["completion_tokens"] for result in results)
    if used > limit or used != outcomes["200"] * per_call:
        stand.undocumented[f"overspent: {used} of {limit}, {outcomes['200']} admitted"] += 1
    return outcomes


def _body(model: str, max_tokens: int, n: int) -> bytes:
    return json.dumps(
        {"model": model, "prompt": [5], "max_tokens": max_tokens, "n": n, "ignore_eos": True, "stream": True}
    ).encode()


async def _stream(stand: Stand, body: bytes, num_reads: int | None = None, key: str = "") -> tuple[bytes, bool]:
    """Return the bytes read from a stream, and whether the client disconnected before the stream ended."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key or stand.attacker.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    received = b""
    try:
        async with asyncio.timeout(120):
            reader, writer = await asyncio.open_connection("127.0.0.1", stand.deployment.port)
            try:
                writer.write(head + body)
                while num_reads is None or num_reads > 0:
                    if not (data := await reader.read(4096)):
                        return received, False
                    received += data
                    num_reads = None if num_reads is None else num_reads - 1
            finally:
                writer.transport.abort()
    except OSError:
        return received, False
    return received, True
