"""Measures how much quotas add to the time to first token with many concurrent requests.

Two tenants, one without quota policies and one with three, alternate on one gateway, round by round in one run. Their
requests run through the real scheduler on a simulated device that takes 10 ms per step. The gateway spends the rest of
the time authenticating, reserving, submitting, and sending the first chunk. Each round keeps `--concurrency` requests
in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from benchmarks.accounts.databases import KINDS, open_database
from benchmarks.machine import add_allow_busy, describe, require_idle
from benchmarks.tables import open_console
from loramux.platform.quotas.policies import QuotaPolicies
from tests.conformance.gateway_lab import ask, gateway_lab

METRICS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
AMPLE = 10**9
MODEL = Path(__file__).parents[2] / "admin" / "demo" / "base"


def main() -> None:
    arguments = _arguments()
    require_idle(arguments.allow_busy)
    cases = []
    for kind in KINDS:
        with open_database(kind) as database, tempfile.TemporaryDirectory(prefix="loramux-lab-") as directory:
            url = database._url.render_as_string(hide_password=False)
            with gateway_lab(Path(directory), url, MODEL, 1) as lab:
                free, limited = lab.account("free"), lab.account("limited")
                for metric in METRICS:
                    QuotaPolicies(lab.database).set(limited[0].id, metric, AMPLE)
                port = lab.gateways[0].port
                keys = {"without": free[1], "with": limited[1]}
                asyncio.run(_rounds(port, keys, arguments.concurrency, 1))
                waits = asyncio.run(_rounds(port, keys, arguments.concurrency, arguments.rounds))
                lab.wait_settled()
                lab.check_nothing_held()
                cases += [{"database": kind, "quotas": way, **_figures(waits[way])} for way in keys]
    _print(cases)
    document = {"machine": describe(), "concurrency": arguments.concurrency, "rounds": arguments.rounds, "cases": cases}
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight")
    parser.add_argument("--rounds", type=int, default=10, help="rounds per tenant; 4 requests per client in each")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    add_allow_busy(parser)
    return parser.parse_args()


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


def _figures(waits: Sequence[float]) -> dict[str, Any]:
    p50, p99 = np.percentile(np.array(waits) * 1e3, [50, 99])
    return {"requests": len(waits), "p50_ms": round(float(p50), 1), "p99_ms": round(float(p99), 1)}


def _print(cases: Sequence[dict[str, Any]]) -> None:
    table = Table(title="time to first token")
    for column in ("database", "quotas", "requests", "p50_ms", "p99_ms"):
        table.add_column(column, justify="left" if column in ("database", "quotas") else "right")
    for case in cases:
        table.add_row(*(str(case[column]) for column in ("database", "quotas", "requests", "p50_ms", "p99_ms")))
    open_console().print(table)


if __name__ == "__main__":
    main()
