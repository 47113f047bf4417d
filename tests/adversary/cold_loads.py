from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import httpx

from tests.adversary.stand import Stand
from tests.conformance.demo_adapters import changed_adapter

NUM_ADAPTERS = 6
LIMIT = 2
"""Cold loads per minute, and the burst size."""
LOADS = "loramux_engine_adapter_loads_total", ()


async def attack(stand: Stand, dice: random.Random, num_calls: int) -> Counter[str]:
    """Request `NUM_ADAPTERS` cold adapters by preload and by completion. Loads beyond the limit are a fault."""
    slug = f"cold-{dice.randrange(10**9)}"
    key, adapter_ids = await asyncio.to_thread(_prepare, stand, slug, dice)
    before, started = stand.metrics()[LOADS], time.monotonic()
    outcomes: Counter[str] = Counter()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:

        async def preload(adapter_id: str) -> httpx.Response:
            url = f"{stand.admin_url}/admin/v1/adapters/{adapter_id}/versions/1/preload"
            return await http.post(url, headers={"authorization": f"Bearer {key}"})

        async def complete(number: int) -> httpx.Response:
            body = {"model": f"cold-{number}", "prompt": "Hello", "max_tokens": 1}
            url = f"{stand.url}/v1/completions"
            return await http.post(url, headers={"authorization": f"Bearer {key}"}, json=body)

        for _ in range(max(1, num_calls // 100)):
            ways = [preload(adapter_id) for adapter_id in adapter_ids]
            ways += [complete(number) for number in range(NUM_ADAPTERS)]
            dice.shuffle(ways)
            for answer in await asyncio.gather(*ways):
                outcomes[str(answer.status_code)] += 1
    allowed = LIMIT + LIMIT * (time.monotonic() - started) / 60
    loads = stand.metrics()[LOADS] - before
    if loads > allowed:
        stand.undocumented[f"{loads:.0f} cold loads where {allowed:.1f} are allowed"] += 1
    return outcomes


def _prepare(stand: Stand, slug: str, dice: random.Random) -> tuple[str, list[str]]:
    command = stand.deployment.json
    command("tenants", "create", slug)
    scopes = [option for scope in ("adapters", "tenant:develop") for option in ("--scope", scope)]
    key = command("keys", "create", "--tenant", slug, *scopes)["secret"]
    for number in range(NUM_ADAPTERS):
        files = changed_adapter(stand.directory / slug / str(number), dice.uniform(1.0, 1.2))
        command("adapters", "push", str(files), "--tenant", slug, "--name", f"cold-{number}")
    command("quotas", "set", "--tenant", slug, "--metric", "cold_loads_per_minute", "--limit", str(LIMIT))
    answer = httpx.get(
        f"{stand.admin_url}/admin/v1/adapters", params={"tenant": slug}, headers=stand.operator, trust_env=False
    )
    return key, [adapter["id"] for adapter in answer.json()["data"]]
