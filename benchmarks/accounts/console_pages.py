"""Measures how long the console's pages take with data on ten million requests from a thousand tenants.

The data comes from usage_world.py. Every page is requested once after its cached figures have expired, and again a
moment later. Requests go through the whole app, but not over a network.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from rich.progress import Progress
from rich.table import Table

from benchmarks.accounts.admin_lists import ADMIN_KEY, open_services
from benchmarks.accounts.databases import KINDS
from benchmarks.accounts.registry_world import World
from benchmarks.accounts.usage_world import UsageWorld, add_folder, open_usage_world
from benchmarks.gpu.bench import CheckError
from benchmarks.machine import add_allow_busy, busy_share, describe, require_idle
from benchmarks.tables import open_console
from loramux.admin.rest.services import AdminServices
from loramux.admin.serving.app import create_admin_app
from loramux.engine.server.gc_freeze import freeze_gc

TARGET_MS = 200.0
SHARED_S = 10.5
"""Pause that lets the console's cached figures expire, in seconds."""


def pages(made: UsageWorld) -> dict[str, str]:
    tenant, adapter = made.tenant_ids[0], made.adapter_ids[0]
    return {
        "overview": "/",
        "adapters": "/adapters",
        "an adapter": f"/adapters/{adapter}",
        "tenants": "/tenants",
        "a tenant": f"/tenants/{tenant}",
        "quotas": "/quotas",
        "a tenant's quotas": f"/quotas?tenant={tenant}",
        "keys": "/keys",
        "usage": "/usage",
        "usage, 7 days by model": "/usage?days=7&group_by=model",
        "usage, 30 days": "/usage?days=30",
        "usage, 30 days by model": "/usage?days=30&group_by=model",
        "usage, 90 days by status": "/usage?days=90&group_by=status",
        "a tenant's usage, 30 days": f"/usage?days=30&tenant={tenant}&group_by=model",
        "residency": "/residency",
        "residency, disk": "/residency?tier=disk",
        "requests": "/requests",
        "jobs": "/jobs",
        "audit": "/audit",
        "playground": "/playground",
        "health": "/health",
    }


async def measure(services: AdminServices, made: UsageWorld, rounds: int, progress: Progress, kind: str) -> Any:
    first: dict[str, list[float]] = {}
    again: dict[str, list[float]] = {}
    transport = httpx.ASGITransport(create_admin_app(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin.example/console") as client:
        await _sign_in(client)
        for turn in progress.track(range(rounds + 1), description=f"{kind}: pages"):
            if turn:
                await asyncio.sleep(SHARED_S)
            for times in (first, again):
                for name, path in pages(made).items():
                    started = time.perf_counter()
                    response = await client.get(path)
                    times.setdefault(name, []).append((time.perf_counter() - started) * 1e3)
                    # A section that could not be loaded shows an alert in a page with status 200.
                    if response.status_code != 200 or 'role="alert"' in response.text:
                        raise CheckError(f"{name}: {response.status_code}, {response.text[-300:]}")
    # The first round compiles templates and statements and is not counted.
    return {
        name: {"first_p50_ms": _quantile(first[name], 50), "first_p95_ms": _quantile(first[name], 95)}
        | {"again_p50_ms": _quantile(again[name], 50), "again_p95_ms": _quantile(again[name], 95)}
        for name in first
    }


async def _sign_in(client: httpx.AsyncClient) -> None:
    page = await client.get("/login")
    csrf = re.search(r'name="csrf" value="([^"]+)"', page.text)
    if csrf is None:
        raise CheckError("the sign-in page has no CSRF token")
    answer = await client.post("/login", data={"csrf": csrf[1], "key": ADMIN_KEY})
    if answer.status_code != 303:
        raise CheckError(f"signing in: {answer.status_code}")


def _quantile(samples: list[float], percent: int) -> float:
    return round(float(np.percentile(samples[1:], percent)), 1)


def main() -> None:
    arguments = _arguments()
    before = require_idle(arguments.allow_busy)
    world = World(arguments.tenants, arguments.adapters_each, 10)
    results: dict[str, Any] = {}
    with Progress() as progress:
        for kind in arguments.databases:
            with (
                open_usage_world(kind, arguments.folder, arguments.events, world, progress) as (database, made),
                open_services(database, world) as services,
            ):
                if made.end_us < database.now_us():
                    raise SystemExit(f"the data in {arguments.folder} is too old: delete it and run again")
                freeze_gc()
                figures = asyncio.run(measure(services, made, arguments.rounds, progress, kind))
                results[kind] = {"busy_share": round(busy_share(), 2), "pages": figures}
    document = {
        "machine": describe(),
        "busy_share_before": round(before, 2),
        "load_1m_after": round(os.getloadavg()[0], 1),
        "events": arguments.events,
        "tenants": arguments.tenants,
        "adapters": world.num_adapters,
        "rounds": arguments.rounds,
        "results": results,
    }
    _print(document)
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    slow = [
        f"{kind}: {name}, {figures['first_p95_ms']} ms"
        for kind, result in results.items()
        for name, figures in result["pages"].items()
        if max(figures["first_p95_ms"], figures["again_p95_ms"]) > TARGET_MS
    ]
    if slow:
        raise SystemExit(f"slower than {TARGET_MS:g} ms at p95: " + "; ".join(slow))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--adapters-each", type=int, default=10)
    parser.add_argument("--databases", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=20, help="rounds, 10 s apart; each requests every page twice")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    add_folder(parser)
    add_allow_busy(parser)
    return parser.parse_args()


def _print(document: dict[str, Any]) -> None:
    table = Table(title=f"{document['events']} events, {document['tenants']} tenants, load {document['load_1m_after']}")
    table.add_column("page")
    for kind in document["results"]:
        for column in ("first p50", "p95", "again p50", "p95"):
            table.add_column(f"{kind} {column}, ms", justify="right")
    for name in next(iter(document["results"].values()))["pages"]:
        cells = [result["pages"][name] for result in document["results"].values()]
        table.add_row(name, *(f"{value:.1f}" for cell in cells for value in cell.values()))
    open_console().print(table)


if __name__ == "__main__":
    main()
