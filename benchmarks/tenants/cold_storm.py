"""Measures the slowdown of other tenants' streams while many cold adapters are loaded.

An in-process engine with a small base serves resident streams: continuous sequences of requests for adapters in the
pool. Four kinds of extra traffic alternate in one run:

    quiet   none
    loads   `Load` messages for many adapters that were never loaded, without requests
    warm    the same number of short requests, for adapters that are in the pool
    storm   the same requests as in `warm` at the same times, each for an adapter that was never loaded

Every new adapter is read from the disk or from the blob store, verified, and copied to the pool. About half of the new
adapters evict another adapter. The result is the p99 of the time between consecutive tokens of a resident stream.
`loads` over `quiet` and `storm` over `warm` show the cost of loading. `storm` over `quiet` also includes the storm's
own requests.

Each kind of traffic runs for two seconds at a time, with 20 requests or `Load` messages per second. The speed of a
shared machine can drift by a third within ten seconds, so longer turns could not resolve a difference of 10 %.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.answers import CheckError
from benchmarks.harness import begin, new_parser, reports_failure, rotated
from benchmarks.hot_load_files import drop_cached
from benchmarks.running_engine import RunningEngine
from benchmarks.s_lora.adapters import AdapterFiles
from benchmarks.s_lora.engine import PoolPlan, open_engine
from benchmarks.s_lora.run import Arrival, Stream, Window
from benchmarks.s_lora.setting import add_engine, describe_workload, lengths, open_files, require_sound
from benchmarks.s_lora.workload import Lengths
from benchmarks.tenants.figures import Target, compare, pooled, spread, spread_table
from benchmarks.tenants.setting import (
    check,
    draw_tails,
    keep_only,
    leave,
    longest,
    observe,
    say_disturbed,
    traffic_of,
)
from loramux.engine.protocol.messages import Load

QUIET, LOADS, WARM, STORM = WAYS = ("quiet", "loads", "warm", "storm")
COLD_WAYS = (LOADS, STORM)
TARGETS = (Target(LOADS, QUIET, 1.1), Target(STORM, WARM, 1.1), Target(STORM, QUIET, 1.1))

NUM_REQUESTS = 32
"""Number of distinct requests of one resident stream. Prefixes are not cached, so a repeated request is computed in
full."""


class Measurement:
    def __init__(self, arguments: argparse.Namespace, files: AdapterFiles) -> None:
        self.arguments = arguments
        self.files = files
        self.traffic = traffic_of(arguments, files)
        self.resident = files.digests[: arguments.resident_adapters]
        self.warm = files.digests[arguments.resident_adapters : arguments.pool_adapters - arguments.spare_adapters]
        # Adapters for `loads` and `storm`. Each is used once, so that it is new to the engine even in later rounds.
        self._fresh: Iterator[str] = iter(files.digests[arguments.pool_adapters :])
        self.plan = PoolPlan(
            arguments.pool_adapters,
            arguments.residents + arguments.seats,
            arguments.host_adapters,
            longest(arguments.input),
            longest(arguments.output),
        )

    def streams(self) -> list[Stream]:
        count = self.arguments.residents
        adds = [
            msgspec.structs.replace(add, digest=digest, share_key=f"resident {number % count}", isolation_key=b"")
            for number, (add, digest) in enumerate(
                zip(self.traffic.requests(count * NUM_REQUESTS, self.resident), itertools.cycle(self.resident))
            )
        ]
        return [Stream(itertools.cycle(adds[place::count])) for place in range(count)]

    def timed(self, way: str, number: int) -> list[Arrival]:
        """The extra traffic in round `number`, at random times that are the same in all variants."""
        if way == QUIET:
            return []
        count = self.arguments.loads
        times = np.sort(np.random.default_rng(number).uniform(0.0, self.arguments.seconds, count)).tolist()
        if way == WARM:
            digests = list(itertools.islice(itertools.cycle(self.warm), count))
        else:
            digests = list(itertools.islice(self._fresh, count))
            _forget(self.files, digests, self.arguments.source)
        if way == LOADS:
            messages: list[Any] = [Load(call_id=digest, digest=digest) for digest in digests]
        else:
            short = replace(self.traffic, outputs=self.arguments.storm_output)
            messages = [
                msgspec.structs.replace(add, digest=digest, share_key=digest, isolation_key=b"")
                for add, digest in zip(short.requests(count, digests, seed=300 + number), digests, strict=True)
            ]
        return [Arrival(at_s, message) for at_s, message in zip(times, messages, strict=True)]


def _forget(files: AdapterFiles, digests: Sequence[str], source: str) -> None:
    """Ask the operating system to drop its cached pages of the packed files, so that they are read from the disk.

    If `source` is "blobs", also remove the files from the disk tier.
    """
    for digest in digests:
        for path in files.cache_dir.glob(f"*/{digest}.packed"):
            if source == "blobs":
                path.unlink()
            else:
                drop_cached(path)
        for path in files.packed_blobs(digest):
            drop_cached(path)


def measure(
    engine: RunningEngine, measurement: Measurement, console: Console | None, num_untimed: int = 0
) -> dict[str, list[Window]]:
    """Run all rounds, and return each variant's observations, one per round.

    `num_untimed` further rounds come first. Without a console, neither progress nor warnings are printed.
    """
    found: dict[str, list[Window]] = {way: [] for way in WAYS}
    numbers = range(num_untimed + measurement.arguments.repeats)
    for number in numbers if console is None else track(numbers, "Rounds", console=console):
        for way in rotated(WAYS, number):
            observed = _window(engine, measurement, way, number)
            if number >= num_untimed:
                found[way].append(observed)
            if console is not None:
                say_disturbed(observed, console)
    return found


def figures_of(found: Mapping[str, Sequence[Window]]) -> dict[str, dict[str, Any]]:
    """Each variant's figures over all rounds."""
    return {
        way: {
            "between_resident_tokens": spread([one.load_gaps_s for one in rounds]),
            "ttft": spread([one.first_tokens_s for one in rounds]),
            "load": spread([one.loads_s for one in rounds]),
            "steps_s": [round(one.counted("num_steps") / one.seconds, 1) for one in rounds],
            "loads": [one.counted("num_adapter_loads") for one in rounds],
            "evictions": [one.counted("num_adapter_evictions") for one in rounds],
            "preemptions": [one.counted("num_preemptions") for one in rounds],
            "processor_share": [round(one.processor_share, 3) for one in rounds],
        }
        for way, rounds in found.items()
    }


def _window(engine: RunningEngine, measurement: Measurement, way: str, number: int) -> Window:
    arguments = measurement.arguments
    timed = measurement.timed(way, number)
    keep_only(engine, (*measurement.resident, *measurement.warm))
    observed = observe(engine, measurement.streams(), timed, arguments.settle, arguments.seconds)
    if way in COLD_WAYS:
        # Count answers, because the last few adapters may arrive after the end of the window.
        num_answered = sum(math.isfinite(one) for one in (*observed.loads_s, *observed.first_tokens_s))
        if num_answered < arguments.loads or (way == STORM and observed.num_cold < arguments.loads):
            raise CheckError(f"only {num_answered} of {arguments.loads} adapters loaded, {observed.num_cold} were cold")
    elif observed.counted("num_adapter_loads") or observed.num_cold:
        raise CheckError("adapters were loaded in a window in which none should be loaded")
    return observed


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser("tenants.cold_storm", __doc__)
    add = parser.add_argument
    add("--residents", type=int, default=16, help="resident streams")
    add("--resident-adapters", type=int, default=8, help="adapters of the resident streams")
    add("--from", dest="source", choices=("disk", "blobs"), default="disk", help="source of new adapters")
    add("--loads", type=int, default=40, help="adapters loaded for the first time in each window")
    add("--settle", type=float, default=0.4, help="seconds of resident streams alone before each window")
    add("--seats", type=int, default=16, help="sequence slots in addition to those of the resident streams")
    add("--pool-adapters", type=int, default=50, help="adapters that fit in the pool in addition to K and V")
    add("--spare-adapters", type=int, default=4, help="part of --pool-adapters to keep free for loads")
    add("--host-adapters", type=int, default=50, help="adapters that fit in the host tier")
    add("--storm-output", type=lengths, default=Lengths(4, 12), metavar="LO-HI", help="new tokens in [LO, HI)")
    add_engine(parser, repeats=20, seconds=2.0, inputs=Lengths(8, 32), outputs=Lengths(64, 128), threads=1)
    arguments = parser.parse_args(argv)
    require_sound(parser, arguments)
    if not 0 < arguments.resident_adapters < arguments.pool_adapters - arguments.spare_adapters:
        parser.error("--pool-adapters must exceed the sum of --resident-adapters and --spare-adapters")
    return arguments


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(parse(argv))
    arguments, console = run.arguments, run.console
    num_fresh = len(COLD_WAYS) * arguments.loads * arguments.repeats
    files = open_files(arguments, arguments.pool_adapters + num_fresh, console)
    measurement = Measurement(arguments, files)
    checked = check(run, files)
    with open_engine(arguments.base, files, measurement.plan, arguments.dtype, "lru", arguments.threads) as engine:
        found = measure(engine, measurement, console)
    gaps = {way: [one.load_gaps_s for one in rounds] for way, rounds in found.items()}
    first_tokens = {way: [one.first_tokens_s for one in rounds] for way, rounds in found.items()}
    loads = {way: [one.loads_s for one in rounds] for way, rounds in found.items()}
    figures = figures_of(found)
    for way, one in figures.items():
        moved = f"{sum(one['loads'])} adapters loaded, {sum(one['evictions'])} evicted"
        console.print(f"  {way}: {moved}, {statistics.median(one['steps_s']):.0f} steps/s")
    console.print(spread_table("time between a resident stream's tokens", {"gaps": gaps}))
    console.print(spread_table("extra requests and loads", {"TTFT": first_tokens, "Load": loads}))
    picture = draw_tails(
        f"Resident streams while {arguments.loads / arguments.seconds:g} adapters arrive per second",
        "time between tokens",
        {way: pooled(rounds) for way, rounds in gaps.items()},
    )
    comparisons = [compare(gaps, target) for target in TARGETS]
    leave(run, _workload(measurement), {"check": checked, "figures": figures}, comparisons, picture)
    return 0


def _workload(measurement: Measurement) -> dict[str, Any]:
    arguments = measurement.arguments
    pages, page_bytes = measurement.files.num_pages(arguments.dtype), measurement.files.page_bytes(arguments.dtype)
    return {
        **describe_workload(arguments),
        "residents": f"{arguments.residents} streams over {arguments.resident_adapters} adapters",
        "from": arguments.source,
        "storm": f"{arguments.loads} adapters of {pages * page_bytes / 1e6:.2f} MB in {arguments.seconds:g} s",
        "storm_output_tokens": str(arguments.storm_output),
        "pool_adapters": arguments.pool_adapters,
        "host_adapters": arguments.host_adapters,
    }


if __name__ == "__main__":
    raise SystemExit(main())
