from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from tests.adversary import cold_loads, cut_streams, raw_calls
from tests.adversary.admin_flood import CHEAP_CALLS, REPORTS, flood_calls
from tests.adversary.ingest_flood import PeftFiles, cancel_uploads, flood_versions, open_without_end, time_push
from tests.adversary.socket_flood import Target, attack_of, flood
from tests.adversary.stand import NUM_SOCKETS, Stand
from tests.conformance.demo_adapters import DEMO

NUM_VERSIONS = 60
OPEN_UPLOAD_BYTES = 1_000_000
RAMP_S = 4.0
"""A socket attack spreads the opening and the closing of its connections over this time, in seconds."""

Counted = Callable[[Stand, random.Random, int], Awaitable[Counter[str]]]
"""Makes about the given number of calls and counts the responses."""
Felt = Callable[[Stand, random.Random, float], Awaitable[Counter[str]]]
"""Runs for about the given number of seconds and counts the responses."""


async def nothing(stand: Stand, dice: random.Random, seconds: float) -> Counter[str]:
    """Do nothing: the baseline of most attacks."""
    return Counter()


async def open_uploads(stand: Stand, dice: random.Random, num_calls: int) -> Counter[str]:
    """Declare uploads, which are capped per tenant, without sending their files. Cancel them at the end."""
    adapter_id = await asyncio.to_thread(stand.adapter_id, stand.attacker)
    key = stand.attacker.admin_key
    counts = await asyncio.to_thread(open_without_end, stand.admin_url, key, adapter_id, OPEN_UPLOAD_BYTES, num_calls)
    await asyncio.to_thread(cancel_uploads, stand.admin_url, key, adapter_id)
    return counts


def sockets(kind: str) -> Felt:
    """Keep `NUM_SOCKETS` connections of one kind open, replacing any that the server closes."""

    async def attack(stand: Stand, dice: random.Random, seconds: float) -> Counter[str]:
        target = Target(host="127.0.0.1", port=stand.deployment.port)
        connection = attack_of(kind, stand.attacker.key)
        found = await flood(target, connection, NUM_SOCKETS, seconds - RAMP_S, RAMP_S, comes_again=True)
        return Counter({name: getattr(found, name) for name in ("held", "closed", "refused", "failed")})

    return attack


def calls(paths: Sequence[str]) -> Felt:
    """Call the admin listener with a read-only key, keeping 24 calls in flight."""

    async def attack(stand: Stand, dice: random.Random, seconds: float) -> Counter[str]:
        return await flood_calls(stand.admin_url, stand.attacker.reader_key, seconds, tuple(paths))

    return attack


async def pending_versions(stand: Stand, dice: random.Random, seconds: float) -> Counter[str]:
    """Push many versions, half of them invalid, and time the polite tenant's push among them.

    Runs until all versions are validated.
    """
    files = PeftFiles.read(DEMO / "adapters" / "pirate")
    start = dice.randrange(10**6)
    versions = [files.valid(start + n) if n % 2 else files.invalid(n) for n in range(NUM_VERSIONS)]
    adapter_id = await asyncio.to_thread(stand.adapter_id, stand.attacker)

    def push(number: int) -> float:
        directory = stand.directory / "pushes" / str(number)
        name = f"push-{number}"
        return time_push(
            stand.admin_url, stand.polite.admin_key, stand.polite.slug, name, files.valid(number), directory
        )

    alone_s = await asyncio.to_thread(push, start + NUM_VERSIONS)
    flooding = asyncio.create_task(
        asyncio.to_thread(flood_versions, stand.admin_url, stand.attacker.admin_key, adapter_id, versions)
    )
    # Wait until some versions are pending.
    await asyncio.sleep(2.0)
    beside_s = await asyncio.to_thread(push, start + NUM_VERSIONS + 1)
    counts = await flooding
    stand.notes.append(f"a polite push took {alone_s:.2f} s alone and {beside_s:.2f} s during the flood")
    began_s = time.monotonic()
    await asyncio.to_thread(stand.wait_idle)
    counts["seconds until all were validated"] = round(time.monotonic() - began_s)
    return counts


COUNTED: dict[str, Counted] = {
    "raw HTTP": raw_calls.attack,
    "cut streams": cut_streams.cut,
    "quota race": cut_streams.race,
    "cold loads": cold_loads.attack,
    "open uploads": open_uploads,
}
FELT: dict[str, Felt] = {
    "reports by end user": calls(REPORTS),
    "ordinary admin calls": calls(CHEAP_CALLS),
    "idle sockets": sockets("idle"),
    "slow heads": sockets("slow_head"),
    "slow bodies": sockets("slow_body"),
    "slow readers": sockets("slow_reader"),
    "pending versions": pending_versions,
}
BASELINES: dict[str, Felt] = {"slow readers": sockets("reader")}
"""Attacks that are compared with as many plain requests instead of quiet periods, and what sends these requests."""
