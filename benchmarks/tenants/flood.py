"""Measures how much one account that floods the engine slows down polite accounts.

An in-process engine with a small base serves a background load and a few polite accounts, whose requests arrive as a
Poisson process. The background load has three variants, which alternate in one run and consist of requests for the same
resident adapters:

    flood         from one account, which keeps the queue full at all times
    full crowd    from many accounts, which together keep the same number of requests open
    calm crowd    from many accounts, as a Poisson process slightly below the engine's capacity

The result is the p99 of the polite accounts' time to first token during the flood, divided by the p99 during each
crowd.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.answers import CheckError
from benchmarks.harness import begin, new_parser, reports_failure, rotated
from benchmarks.running_engine import RunningEngine
from benchmarks.s_lora.adapters import AdapterFiles
from benchmarks.s_lora.engine import PoolPlan, open_engine
from benchmarks.s_lora.run import CLOCKS, Arrival, Stream, Window
from benchmarks.s_lora.setting import add_engine, describe_workload, open_files, require_sound
from benchmarks.s_lora.workload import Lengths, draw_arrivals
from benchmarks.tenants.figures import Target, compare, pooled, spread, spread_table
from benchmarks.tenants.setting import (
    PATIENCE_S,
    check,
    draw_tails,
    keep_only,
    leave,
    longest,
    observe,
    say_disturbed,
    traffic_of,
)
from loramux.engine.protocol.messages import Add

FLOOD, FULL, CALM = WAYS = ("flood", "full crowd", "calm crowd")
LIMIT = 1.25
CALIBRATION_S = 4.0
WARM_S = 2.0

NUM_REQUESTS = 1024
"""Number of distinct requests of the background load. Prefixes are not cached, so a repeated request is computed in
full."""


class Measurement:
    def __init__(self, arguments: argparse.Namespace, files: AdapterFiles) -> None:
        self.arguments = arguments
        self.files = files
        self.traffic = traffic_of(arguments, files)
        self.crowd = files.digests[: arguments.crowd]
        self.polite = files.digests[arguments.crowd : arguments.crowd + arguments.polite]
        self.plan = PoolPlan(
            arguments.crowd + arguments.polite,
            arguments.seats,
            arguments.crowd + arguments.polite,
            longest(arguments.input),
            longest(arguments.output),
        )

    def streams(self, way: str) -> list[Stream]:
        """The background load of `flood` and `full crowd`: the same requests in the same order, from one account or
        from many."""
        if way == CALM:
            return []
        adds = self._load(NUM_REQUESTS, seed=42)
        shares = 1 if way == FLOOD else len(self.crowd)
        if way == FLOOD:
            adds = [msgspec.structs.replace(add, share_key=FLOOD) for add in adds]
        return [Stream(itertools.cycle(adds[place::shares]), self.arguments.open // shares) for place in range(shares)]

    def timed(self, way: str, capacity: float, number: int) -> list[Arrival]:
        """The timed requests in round `number`. The polite accounts' requests are the same in every variant."""
        timed = self._arrivals(self.arguments.polite_load * capacity, 100 + number, is_counted=True)
        if way == CALM:
            rate = (self.arguments.calm_load - self.arguments.polite_load) * capacity
            timed += self._arrivals(rate, 200 + number, is_counted=False)
        return sorted(timed, key=lambda one: one.at_s)

    def _arrivals(self, rate: float, seed: int, is_counted: bool) -> list[Arrival]:
        # The background load starts before the window, so that the engine has reached its steady state.
        begin_s = 0.0 if is_counted else -WARM_S
        times = list(draw_arrivals(rate, 1.0, self.arguments.seconds - begin_s, seed))
        if is_counted:
            adds = [_unshared(add) for add in self.traffic.requests(len(times), self.polite, seed=seed)]
        else:
            adds = self._load(len(times), seed)
        return [Arrival(begin_s + at_s, add, is_counted) for at_s, add in zip(times, adds, strict=True)]

    def _load(self, count: int, seed: int) -> list[Add]:
        """Requests that cycle through the crowd's accounts, each with its own adapter."""
        adds = self.traffic.requests(count, self.crowd, seed=seed)
        digests = itertools.cycle(self.crowd)
        return [
            msgspec.structs.replace(_unshared(add), digest=digest, share_key=digest)
            for add, digest in zip(adds, digests, strict=False)
        ]


def _unshared(add: Add) -> Add:
    """Clear the isolation key, so that prefixes are not cached and cannot evict adapters from the pool."""
    return msgspec.structs.replace(add, isolation_key=b"")


def measure(measurement: Measurement, console: Console) -> tuple[dict[str, list[Window]], list[float]]:
    """Run all rounds. Return each variant's observations, and the engine's capacity in requests/s in each round."""
    arguments = measurement.arguments
    found: dict[str, list[Window]] = {way: [] for way in WAYS}
    capacities: list[float] = []
    with open_engine(
        arguments.base, measurement.files, measurement.plan, arguments.dtype, "lru", arguments.threads
    ) as engine:
        keep_only(engine, (*measurement.crowd, *measurement.polite))
        for number in range(arguments.repeats):
            # Calibrate in each round, because the speed of a shared machine drifts.
            full = measurement.streams(FULL)
            calibration = observe(engine, full, [], WARM_S, CALIBRATION_S, 0.0, arguments.clock)
            capacity = calibration.num_finished / CALIBRATION_S
            capacities.append(capacity)
            console.print(f"  round {number + 1}: the engine answers {capacity:.1f} requests/s")
            for way in rotated(WAYS, number):
                observed = _window(engine, measurement, way, measurement.timed(way, capacity, number))
                found[way].append(observed)
                console.print(f"  {way}: {observed.num_finished / observed.seconds:.1f} requests/s answered")
                if way != CALM and arguments.clock == "wall":
                    say_disturbed(observed, console)
    return found, capacities


def _window(engine: RunningEngine, measurement: Measurement, way: str, timed: list[Arrival]) -> Window:
    arguments = measurement.arguments
    streams = measurement.streams(way)
    observed = observe(engine, streams, timed, WARM_S, arguments.seconds, PATIENCE_S, arguments.clock)
    if observed.num_cold or observed.counted("num_adapter_loads"):
        raise CheckError("an adapter was not resident, so the variants differ in more than their accounts")
    if way != CALM and observed.fewest_sequences <= arguments.seats:
        raise CheckError("the queue ran empty: --open must be well above --seats")
    return observed


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser("tenants.flood", __doc__)
    add = parser.add_argument
    add("--seats", type=int, default=32, help="sequence slots")
    add("--open", type=int, default=256, help="requests in the background load that run or wait at any time")
    add("--crowd", type=int, default=32, help="accounts that share the background load in the crowd variants")
    add("--polite", type=int, default=8, help="polite accounts, the same in all variants")
    add("--polite-load", type=float, default=0.12, help="load of all polite accounts, relative to capacity")
    add("--calm-load", type=float, default=0.95, help="total load with the calm crowd, relative to capacity")
    add("--clock", choices=CLOCKS, default="wall", help="processor: the engine thread's CPU time, for shared machines")
    short = Lengths(8, 32)
    add_engine(parser, repeats=6, seconds=20.0, inputs=short, outputs=short, threads=1)
    arguments = parser.parse_args(argv)
    require_sound(parser, arguments)
    fair = 1.0 / (arguments.crowd + arguments.polite) if min(arguments.crowd, arguments.polite) > 0 else 0.0
    if arguments.open % max(1, arguments.crowd) or not 0 < arguments.polite_load < fair * arguments.polite:
        parser.error(
            "--crowd must divide --open, and --polite-load must be above 0 and below the polite accounts' fair share"
        )
    if arguments.clock == "processor" and arguments.threads > 1:
        parser.error("--clock processor measures one thread only: use --threads 1")
    if not arguments.polite_load < arguments.calm_load < 1:
        parser.error("--calm-load must be between --polite-load and 1")
    return arguments


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(parse(argv))
    arguments = run.arguments
    files = open_files(arguments, arguments.crowd + arguments.polite, run.console)
    measurement = Measurement(arguments, files)
    checked = check(run, files)
    found, capacities = measure(measurement, run.console)
    first_tokens = {way: [one.first_tokens_s for one in rounds] for way, rounds in found.items()}
    gaps = {way: [one.gaps_s for one in rounds] for way, rounds in found.items()}
    run.console.print(spread_table("the polite accounts' requests", {"TTFT": first_tokens, "between tokens": gaps}))
    picture = draw_tails(
        "Polite accounts during a flood from one account, and during the same load from many",
        "time to first token",
        {way: pooled(rounds) for way, rounds in first_tokens.items()},
    )
    figures = {
        way: {
            "ttft": spread(first_tokens[way]),
            "between_tokens": spread(gaps[way]),
            "tokens_s": [round(one.num_tokens / one.seconds, 1) for one in rounds],
            "requests_s": [round(one.num_finished / one.seconds, 1) for one in rounds],
            "fewest_waiting": max(0, min(one.fewest_sequences for one in rounds) - arguments.seats),
            "preemptions": sum(one.counted("num_preemptions") for one in rounds),
            "processor_share": [round(one.processor_share, 3) for one in rounds],
        }
        for way, rounds in found.items()
    }
    comparisons = [compare(first_tokens, Target(FLOOD, reference, LIMIT)) for reference in (FULL, CALM)]
    leave(run, _workload(measurement, capacities), {"check": checked, "figures": figures}, comparisons, picture)
    return 0


def _workload(measurement: Measurement, capacities: Sequence[float]) -> dict[str, Any]:
    arguments = measurement.arguments
    return {
        **describe_workload(arguments),
        "clock": arguments.clock,
        "seats": arguments.seats,
        "full_load": f"{arguments.open} requests that run or wait, from 1 account or from {arguments.crowd}",
        "calm_load": f"{arguments.calm_load:.0%} of capacity, from {arguments.crowd} accounts",
        "polite": f"{arguments.polite} accounts, together {arguments.polite_load:.0%} of capacity",
        "capacity_requests_s": [round(capacity, 1) for capacity in capacities],
        "adapters": f"{arguments.crowd + arguments.polite}, all resident",
    }


if __name__ == "__main__":
    raise SystemExit(main())
