"""Measures how long the registry takes to resolve a name among a large company's adapters.

By default there are 1,000 tenants, 10,000 adapters and 100,000 versions, on SQLite and on PostgreSQL. Names of each
kind are first checked against the inserted rows and then timed. Pages at the start of the lists and further down are
timed too. Together, the pages of the list of all adapters must contain each adapter exactly once.

    bare        tenant/adapter, the default alias; every tenth alias also has a canary
    number      tenant/adapter@3
    digest      tenant/adapter@sha256:...
    granted     an adapter that another tenant granted to the caller
    foreign     another tenant's adapter, not granted
    absent      a name that does not exist
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.accounts.databases import KINDS as DATABASES
from benchmarks.accounts.databases import open_database
from benchmarks.accounts.registry_world import Filled, World, digest_of, fill
from benchmarks.gpu.bench import CheckError
from benchmarks.machine import add_allow_busy, describe, require_idle
from benchmarks.tables import open_console
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.migrations.database import Database

KINDS = ("bare", "number", "digest", "granted", "foreign", "absent")
TARGET_MS = 2.0
PAGE = 100
STICKY_USERS = 50


class Names:
    """Random names of each kind, each with the version numbers that it can resolve to. 0 means not found."""

    def __init__(self, registry: AdapterRegistry, world: World, filled: Filled, seed: int) -> None:
        self._registry = registry
        self._world = world
        self._filled = filled
        self._random = random.Random(seed)

    def draw(self, kind: str) -> tuple[Callable[[], int], set[int]]:
        world = self._world
        tenant, adapter = self._random.randrange(world.num_tenants), self._random.randrange(world.adapters_each)
        number = 1 + self._random.randrange(world.versions_each)
        caller, slug, name = tenant, f"tenant-{tenant}", f"adapter-{adapter}"
        which: dict[str, Any] = {}
        expected = {world.default(tenant, adapter), world.canary(tenant, adapter) or world.default(tenant, adapter)}
        if kind == "number":
            which, expected = {"version": number}, {number}
        elif kind == "digest":
            which, expected = {"digest_prefix": digest_of(tenant, adapter, number)[:16]}, {number}
        elif kind == "granted":
            name, caller = "adapter-0", (tenant + 1) % world.num_tenants
            expected = {world.default(tenant, 0), world.canary(tenant, 0) or world.default(tenant, 0)}
        elif kind == "foreign":
            caller, expected = (tenant + 2) % world.num_tenants, {0}
        elif kind == "absent":
            name, expected = "adapter-x", {0}
        sticky = str(self._random.randrange(STICKY_USERS))
        caller_id = self._filled.tenant_ids[caller]

        def resolve() -> int:
            ref = self._registry.resolve(slug, name, caller_id=caller_id, sticky=sticky, **which)
            return 0 if ref is None else ref.version

        return resolve, expected


def main() -> None:
    arguments = _arguments()
    require_idle(arguments.allow_busy)
    world = World(arguments.tenants, arguments.adapters_each, arguments.versions_each)
    results: dict[str, Any] = {}
    for kind in DATABASES:
        with open_database(kind) as database:
            started = time.perf_counter()
            filled = fill(database, world)
            Console(stderr=True).print(f"{kind}: filled in {time.perf_counter() - started:.1f} s")
            results[kind] = _measure(database, world, filled, arguments.calls)
    document = {"machine": describe(), "world": _shape(world), "calls": arguments.calls, "results": results}
    _print(document)
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    worst = max(figures["p99_ms"] for result in results.values() for figures in result["resolve"].values())
    if worst > TARGET_MS:
        raise SystemExit(f"resolving a name took {worst:.2f} ms at p99; the target is {TARGET_MS:g} ms")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--adapters-each", type=int, default=10)
    parser.add_argument("--versions-each", type=int, default=10)
    parser.add_argument("--calls", type=int, default=3000, help="names per kind; each list gets a tenth as many reads")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    add_allow_busy(parser)
    return parser.parse_args()


def _shape(world: World) -> dict[str, int]:
    return {"tenants": world.num_tenants, "adapters": world.num_adapters, "versions": world.num_versions}


def _measure(database: Database, world: World, filled: Filled, calls: int) -> dict[str, Any]:
    registry = AdapterRegistry(database)
    names = Names(registry, world, filled, seed=0)
    for kind in KINDS:
        for _ in range(100):
            resolve, expected = names.draw(kind)
            found = resolve()
            if found not in expected:
                raise CheckError(f"a {kind} name resolved to version {found}, not one of {expected}")
    _check_pages(registry, world, filled)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(calls):
        for kind in KINDS:
            times[kind].append(_seconds(names.draw(kind)[0]))
    lists: dict[str, list[float]] = {name: [] for name in ("own adapters", "first page", "far page", "versions")}
    choose = random.Random(1)
    oldest_first = sorted(adapter_id for row in filled.adapter_ids for adapter_id in row)
    for _ in range(calls // 10):
        tenant = choose.randrange(world.num_tenants)
        far = oldest_first[choose.randrange(min(1000, len(oldest_first)))]
        adapter_id = filled.adapter_ids[tenant][0]
        lists["own adapters"].append(_seconds(registry.list_adapters, filled.tenant_ids[tenant], PAGE))
        lists["first page"].append(_seconds(registry.list_adapters, None, PAGE))
        lists["far page"].append(_seconds(registry.list_adapters, None, PAGE, far))
        lists["versions"].append(_seconds(registry.list_versions, adapter_id, PAGE))
    return {
        "resolve": {kind: _figures(samples) for kind, samples in times.items()},
        "lists": {name: _figures(samples) for name, samples in lists.items()},
    }


def _check_pages(registry: AdapterRegistry, world: World, filled: Filled) -> None:
    """Check that the pages together list every adapter exactly once."""
    seen: list[str] = []
    after: str | None = None
    while True:
        page = registry.list_adapters(None, PAGE, after)
        seen += [adapter.id for adapter in page.data]
        if not page.has_more:
            break
        after = seen[-1]
    if sorted(seen) != sorted(adapter_id for row in filled.adapter_ids for adapter_id in row):
        raise CheckError(f"the pages hold {len(seen)} adapters of {world.num_adapters}")


def _seconds(function: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def _figures(samples: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.array(samples) * 1e3, [50, 99])
    return {"p50_ms": round(float(p50), 3), "p99_ms": round(float(p99), 3)}


def _print(document: dict[str, Any]) -> None:
    table = Table(title="{tenants} tenants, {adapters} adapters, {versions} versions".format(**document["world"]))
    table.add_column("call")
    for kind in document["results"]:
        for column in ("p50", "p99"):
            table.add_column(f"{kind} {column}, ms", justify="right")
    first = next(iter(document["results"].values()))
    for part in ("resolve", "lists"):
        for name in first[part]:
            cells = [result[part][name] for result in document["results"].values()]
            table.add_row(name, *(f"{cell[key]:.2f}" for cell in cells for key in ("p50_ms", "p99_ms")))
    open_console().print(table)


if __name__ == "__main__":
    main()
