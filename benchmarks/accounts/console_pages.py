"""Measures how long the console's pages take with data on ten million requests from a thousand tenants.

The data comes from usage_world.py. Every page is requested once after its cached figures have expired, and again a
moment later. Requests go through the whole app, but not over a network.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import httpx
from rich.progress import Progress

from benchmarks.accounts.admin_lists import ADMIN_KEY, open_services
from benchmarks.accounts.registry_world import World
from benchmarks.accounts.usage_world import UsageWorld, add_usage_world, describe_usage_world, open_usage_world
from benchmarks.answers import CheckError
from benchmarks.harness import begin, new_parser, percentiles_ms, reports_failure, require_below
from benchmarks.machine import busy_share
from benchmarks.tables import table_by_database
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
                    times.setdefault(name, []).append(time.perf_counter() - started)
                    # A section that could not be loaded shows an alert in a page with status 200.
                    if response.status_code != 200 or 'role="alert"' in response.text:
                        raise CheckError(f"{name}: {response.status_code}, {response.text[-300:]}")
    # The first round compiles templates and statements and is not counted.
    return {
        name: {
            f"{when}_{figure}": value
            for when, times in (("first", first), ("again", again))
            for figure, value in percentiles_ms(times[name][1:], 50, 95, digits=1).items()
        }
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


@reports_failure
def main(argv: Sequence[str] | None = None) -> None:
    parser = new_parser("accounts.console_pages", __doc__)
    add_usage_world(parser)
    parser.add_argument("--rounds", type=int, default=20, help="rounds, 10 s apart; each requests every page twice")
    run = begin(parser.parse_args(argv))
    arguments = run.arguments
    world = World(arguments.tenants, arguments.adapters_each, 10)
    results: dict[str, Any] = {}
    with Progress(console=run.console) as progress:
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
    load, size = round(os.getloadavg()[0], 1), describe_usage_world(arguments)
    title = f"{size['events']} events, {size['tenants']} tenants, load {load}"
    found = {kind: result["pages"] for kind, result in results.items()}
    run.console.print(table_by_database(title, "page", found))
    run.write({"load_1m_after": load, **size, "rounds": arguments.rounds, "results": results})
    p95s = {
        f"{kind}: {name}": max(figures["first_p95_ms"], figures["again_p95_ms"])
        for kind, pages_found in found.items()
        for name, figures in pages_found.items()
    }
    require_below(TARGET_MS, p95s)


if __name__ == "__main__":
    raise SystemExit(main())
