"""Measures how many requests per second a gateway can reserve and settle, and how long each operation takes.

Each client reserves quota for a request under its tenant's three policies, settles the request, and immediately sends
the next one. Two methods are compared in one run, on SQLite and PostgreSQL, with one tenant that all clients share and
with a thousand tenants:

    one by one      each operation in its own transaction, on the same number of threads as in a gateway
    group commit    the method that a gateway uses: each transaction commits all queued operations

On PostgreSQL, a third case divides the clients among several gateway processes with group commit. With a single tenant,
these processes wait for each other's locks.

Afterwards, the ledger must contain every token exactly once, and no reservation may remain open.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from sqlalchemy import func, select

from benchmarks.accounts.databases import KINDS, open_database_at
from benchmarks.answers import CheckError
from benchmarks.harness import begin, new_parser, percentiles_ms, reports_failure
from benchmarks.tables import table
from loramux.engine.server.gc_freeze import freeze_gc
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import quota_counters, reservations, usage_events
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.group_commit import GroupCommit
from loramux.platform.admission.records import Closing, Operation, ReservationRequest
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.metrics import CONCURRENT_REQUESTS, REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE
from loramux.platform.quotas.policies import QuotaPolicies

ONE_BY_ONE, GROUP = WAYS = ("one by one", "group commit")
GATEWAY_THREADS = 16
AMPLE = 10**9
METRICS = (REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE, CONCURRENT_REQUESTS)
PROMPT, MOST, USED = 20, 100, 50

Commit = Callable[[Operation], Awaitable[Any]]

WARM_UP_S = 1.5

_start: Any = None
"""The gateway processes wait at this barrier to start together."""


@reports_failure
def main(argv: Sequence[str] | None = None) -> None:
    run = begin(_parse(argv))
    arguments = run.arguments
    # Freeze the garbage collector, as every gateway does when it starts.
    freeze_gc()
    cases: list[dict[str, Any]] = []

    def keep(rounds: Sequence[dict[str, Any]], **setting: Any) -> None:
        cases.append({**setting, **_pooled(rounds)})
        named = ", ".join(f"{name} {value}" for name, value in setting.items())
        run.console.print(f"{named}: {cases[-1]['pairs_s']:.0f}/s")

    for kind in KINDS:
        for num_tenants in (1, arguments.tenants):
            with open_database_at(kind) as (database, url):
                accounts = _accounts(database, num_tenants)
                for clients in arguments.clients:
                    # A tenant's first request fills caches, so an unmeasured warm-up runs first.
                    asyncio.run(_measure(database, accounts, GROUP, clients, WARM_UP_S))
                    # Alternate the methods, so that drift in the machine's speed affects both alike.
                    rounds = [
                        asyncio.run(_measure(database, accounts, way, clients, arguments.seconds))
                        for _ in range(arguments.repeats)
                        for way in WAYS
                    ]
                    setting = {"database": kind, "tenants": num_tenants, "clients": clients}
                    for index, way in enumerate(WAYS):
                        keep(rounds[index::2], **setting, way=way, gateways=1)
                    if not database.is_sqlite and arguments.gateways > 1:
                        together = _measure_together(database, url, accounts, clients, arguments)
                        keep(together, **setting, way=GROUP, gateways=arguments.gateways)
    rows = [[str(value) for value in case.values()] for case in cases]
    run.console.print(table("reserve and settle", cases[0], rows))
    run.write({"seconds": arguments.seconds, "cases": cases})


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("accounts.admission", __doc__)
    parser.add_argument("--tenants", type=int, default=1000, help="tenants in the case with many tenants")
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256], help="requests in flight")
    parser.add_argument("--gateways", type=int, default=4, help="gateway processes on PostgreSQL; 1 skips that case")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement")
    parser.add_argument("--repeats", type=int, default=2)
    return parser.parse_args(argv)


def _accounts(database: Database, num_tenants: int) -> list[tuple[str, str]]:
    tenants, keys, policies = Tenants(database), ApiKeys(database, None), QuotaPolicies(database)
    accounts = []
    for number in range(num_tenants):
        tenant = tenants.create(f"tenant-{number}")
        accounts.append((tenant.id, keys.create(tenant.id, "key").key.id))
        for metric in METRICS:
            policies.set(tenant.id, metric, AMPLE)
    return accounts


async def _measure(
    database: Database, accounts: Sequence[tuple[str, str]], way: str, clients: int, seconds: float
) -> dict[str, Any]:
    admission = Admission(database)
    before = _ledger_tokens(database)
    if way == GROUP:
        committer = GroupCommit(admission, num_threads=admission.num_writers)
        try:
            figures = await _run(accounts, committer.submit, range(clients), clients, seconds)
        finally:
            committer.close()
    else:
        loop = asyncio.get_running_loop()

        def only(operation: Operation) -> Any:
            (outcome,) = admission.commit([operation])
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        with ThreadPoolExecutor(GATEWAY_THREADS) as threads:
            commit: Commit = lambda operation: loop.run_in_executor(threads, only, operation)  # noqa: E731
            figures = await _run(accounts, commit, range(clients), clients, seconds)
    _check(database, before, figures["num_pairs"])
    return figures


def _measure_together(
    database: Database,
    url: str,
    accounts: Sequence[tuple[str, str]],
    clients: int,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Run the rounds on several gateway processes, each with its share of the clients."""
    num_gateways: int = arguments.gateways
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(num_gateways)
    rounds = []
    with ProcessPoolExecutor(num_gateways, context, initializer=_take_barrier, initargs=(start,)) as processes:
        for _ in range(arguments.repeats):
            before = _ledger_tokens(database)
            parts = [
                processes.submit(_gateway, url, accounts, range(number, clients, num_gateways), clients, arguments)
                for number in range(num_gateways)
            ]
            figures = [part.result() for part in parts]
            num_pairs = sum(one["num_pairs"] for one in figures)
            _check(database, before, num_pairs + sum(one["num_warm"] for one in figures))
            rounds.append(
                {
                    "num_pairs": num_pairs,
                    "seconds": max(one["seconds"] for one in figures),
                    "reserved": [each for one in figures for each in one["reserved"]],
                    "settled": [each for one in figures for each in one["settled"]],
                }
            )
    return rounds


def _take_barrier(start: Any) -> None:
    global _start
    _start = start


def _gateway(
    url: str, accounts: Sequence[tuple[str, str]], mine: range, clients: int, arguments: argparse.Namespace
) -> Any:
    """In one gateway process, warm up with the clients `mine`, then measure at the same time as the other processes."""
    freeze_gc()
    database = Database(url)
    admission = Admission(database)
    committer = GroupCommit(admission, num_threads=admission.num_writers)
    try:
        warm = asyncio.run(_run(accounts, committer.submit, mine, clients, WARM_UP_S))
        _start.wait(60)
        figures = asyncio.run(_run(accounts, committer.submit, mine, clients, arguments.seconds))
    finally:
        committer.close()
        database.close()
    return {**figures, "num_warm": warm["num_pairs"]}


async def _run(
    accounts: Sequence[tuple[str, str]], commit: Commit, clients: range, num_clients: int, most_s: float
) -> dict[str, Any]:
    """Run the clients numbered `clients` for `most_s` seconds. All processes together run `num_clients` clients.

    After each request, a client moves on by `num_clients` tenants. If there are at least as many tenants as clients,
    clients that have sent equally many requests use different tenants.
    """
    reserved: list[float] = []
    settled: list[float] = []
    deadline = time.perf_counter() + most_s

    async def client(number: int) -> None:
        sent = number
        while (started := time.perf_counter()) < deadline:
            tenant_id, key_id = accounts[sent % len(accounts)]
            sent += num_clients
            request = ReservationRequest(
                request_id=new_id("req"),
                tenant_id=tenant_id,
                api_key_id=key_id,
                model="base",
                adapter_version_id=None,
                endpoint="completions",
                prompt_tokens=PROMPT,
                reserved_tokens=MOST,
            )
            await commit(request)
            reserved.append(time.perf_counter() - started)
            settlement = Settlement(status="completed", prompt_tokens=PROMPT, completion_tokens=USED - PROMPT)
            started = time.perf_counter()
            if await commit(Closing(request_id=request.request_id, settlement=settlement)) is not True:
                raise CheckError("a request was not settled")
            settled.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(client(number) for number in clients))
    seconds = time.perf_counter() - started
    return {"num_pairs": len(settled), "seconds": seconds, "reserved": reserved, "settled": settled}


def _ledger_tokens(database: Database) -> int:
    tokens = func.sum(usage_events.c.prompt_tokens + usage_events.c.completion_tokens)
    with database.read() as connection:
        return int(connection.execute(select(tokens)).scalar() or 0)


def _check(database: Database, before: int, num_pairs: int) -> None:
    charged = _ledger_tokens(database) - before
    if charged != num_pairs * USED:
        raise CheckError(f"the ledger gained {charged} tokens, but {num_pairs} requests used {num_pairs * USED}")
    is_open = select(func.count()).select_from(reservations).where(reservations.c.state == "open")
    with database.read() as connection:
        held = int(connection.execute(select(func.sum(quota_counters.c.reserved))).scalar() or 0)
        num_open = int(connection.execute(is_open).scalar() or 0)
    if held or num_open:
        raise CheckError(f"{held} tokens are still reserved and {num_open} reservations are still open")


def _pooled(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "pairs_s": round(sum(one["num_pairs"] for one in rounds) / sum(one["seconds"] for one in rounds), 1)
    }
    for name in ("reserved", "settled"):
        found = percentiles_ms([each for one in rounds for each in one[name]], 50, 99)
        figures |= {f"{name}_{figure}": value for figure, value in found.items()}
    return figures


if __name__ == "__main__":
    raise SystemExit(main())
