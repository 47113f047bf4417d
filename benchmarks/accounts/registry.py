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

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.accounts.databases import KINDS as DATABASES
from benchmarks.accounts.databases import open_database_at
from benchmarks.accounts.registry_world import Filled, World, add_world, digest_of, fill, world_of
from benchmarks.answers import CheckError
from benchmarks.harness import begin, new_parser, percentiles_ms, reports_failure, require_below
from benchmarks.tables import table_by_database
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


@reports_failure
def main(argv: Sequence[str] | None = None) -> None:
    parser = new_parser("accounts.registry", __doc__)
    add_world(parser)
    parser.add_argument("--calls", type=int, default=3000, help="names per kind; each list gets a tenth as many reads")
    run = begin(parser.parse_args(argv))
    world = world_of(run.arguments)
    results: dict[str, Any] = {}
    for kind in DATABASES:
        with open_database_at(kind) as (database, _):
            started = time.perf_counter()
            filled = fill(database, world)
            run.console.print(f"{kind}: filled in {time.perf_counter() - started:.1f} s")
            results[kind] = _measure(database, world, filled, run.arguments.calls)
    shown = {kind: {**result["resolve"], **result["lists"]} for kind, result in results.items()}
    run.console.print(table_by_database(str(world), "call", shown, digits=2))
    run.write({"world": world.document, "calls": run.arguments.calls, "results": results})
    slowest = {kind: max(one["p99_ms"] for one in result["resolve"].values()) for kind, result in results.items()}
    require_below(TARGET_MS, {f"the slowest name on {kind} at p99": value for kind, value in slowest.items()})


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
        "resolve": {kind: percentiles_ms(samples, 50, 99, digits=3) for kind, samples in times.items()},
        "lists": {name: percentiles_ms(samples, 50, 99, digits=3) for name, samples in lists.items()},
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


if __name__ == "__main__":
    raise SystemExit(main())
