"""Measures how much quotas add to the time to first token with many concurrent requests.

Two tenants, one without quota policies and one with three, alternate on one gateway, round by round in one run. Their
requests run through the real scheduler on a simulated device that takes 10 ms per step. The gateway spends the rest of
the time authenticating, reserving, submitting, and sending the first chunk. Each round keeps `--concurrency` requests
in flight.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accounts.databases import KINDS, open_database_at
from benchmarks.harness import begin, new_parser, percentiles_ms, reports_failure
from benchmarks.tables import table
from loramux.platform.quotas.policies import QuotaPolicies
from tests.conformance.gateway_lab import ask, gateway_lab

METRICS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
AMPLE = 10**9
MODEL = Path(__file__).parents[2] / "admin" / "demo" / "base"


@reports_failure
def main(argv: Sequence[str] | None = None) -> None:
    parser = new_parser("accounts.first_token", __doc__)
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight")
    parser.add_argument("--rounds", type=int, default=10, help="rounds per tenant; 4 requests per client in each")
    run = begin(parser.parse_args(argv))
    concurrency, rounds = run.arguments.concurrency, run.arguments.rounds
    cases = []
    for kind in KINDS:
        with (
            open_database_at(kind) as (_, url),
            tempfile.TemporaryDirectory(prefix="loramux-lab-") as directory,
            gateway_lab(Path(directory), url, MODEL, 1) as lab,
        ):
            free, limited = lab.account("free"), lab.account("limited")
            for metric in METRICS:
                QuotaPolicies(lab.database).set(limited[0].id, metric, AMPLE)
            port = lab.gateways[0].port
            keys = {"without": free[1], "with": limited[1]}
            asyncio.run(_rounds(port, keys, concurrency, 1))
            waits = asyncio.run(_rounds(port, keys, concurrency, rounds))
            lab.wait_settled()
            lab.check_nothing_held()
        for way, found in waits.items():
            case = {"database": kind, "quotas": way, "requests": len(found)}
            cases.append({**case, **percentiles_ms(found, 50, 99, digits=1)})
    rows = [[str(value) for value in case.values()] for case in cases]
    run.console.print(table("time to first token", cases[0], rows, num_left=2))
    run.write({"concurrency": concurrency, "rounds": rounds, "cases": cases})


async def _rounds(port: int, keys: dict[str, str], concurrency: int, num_rounds: int) -> dict[str, list[float]]:
    waits: dict[str, list[float]] = {way: [] for way in keys}

    async def place(key: str, into: list[float]) -> None:
        for _ in range(4):
            started = time.perf_counter()
            status, _ = await ask(port, key, 4, cut_after=1)
            into.append(time.perf_counter() - started)
            if status != 200:
                raise SystemExit(f"a request was answered with {status}")

    for _ in range(num_rounds):
        # The tenants alternate, so that drift in the machine's speed affects both alike.
        for way, key in keys.items():
            await asyncio.gather(*(place(key, waits[way]) for _ in range(concurrency)))
    return waits


if __name__ == "__main__":
    raise SystemExit(main())
