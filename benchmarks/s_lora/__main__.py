"""Measures the S-LoRA workload on a CPU, where requests name far more adapters than fit in the pool.

In-process engines run a small base, with adapters on disk and a pool that holds some of them and the K and V of the
running sequences. Each combination of an eviction policy and a number of adapters has its own engine. All engines are
open at the same time and take turns. Each engine is measured above the capacity with the fewest adapters, for
throughput, and at about 70 % of it, for latencies. See `workload.py` for the source of the workload.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from rich.console import Console

from benchmarks.harness import begin, new_parser, reports_failure, write_svg
from benchmarks.line_plots import draw_lines
from benchmarks.running_engine import RunningEngine
from benchmarks.s_lora.adapters import AdapterFiles
from benchmarks.s_lora.engine import PoolPlan, open_engine
from benchmarks.s_lora.figures import Case, Figures, Goal, latency_figures, summaries, tables, throughput_figures
from benchmarks.s_lora.run import Arrival, Drive, drive, drive_in_turns
from benchmarks.s_lora.setting import add_engine, check_answers, describe_workload, open_files, require_sound
from benchmarks.s_lora.traffic import Traffic
from benchmarks.s_lora.workload import Lengths
from loramux.engine.pages.eviction import POLICIES

SATURATED = 1.5
"""Request rate for measuring throughput, relative to capacity."""

CALM = 0.7
"""Request rate for measuring latencies, relative to capacity."""

WARM_SHARE = 0.25
"""Warm-up before each window, relative to the window's length."""

PATIENCE_S = 30.0
"""Longest wait for a window's requests after the window has closed, in seconds."""

TURN_S = 0.25
"""Length of a saturated engine's turn, in seconds. It is short, because the machine's speed drifts within seconds."""

SEED_STRIDE = 1000
"""Distance between the seeds of two rounds, large enough that no round repeats prompts that are still cached."""

CAPACITY_BATCHES = 64
"""Number of full batches queued at the start to measure capacity."""

CAPACITY_S = 5.0
"""Longest window for measuring capacity, in seconds."""


class Measurement:
    """Measures capacity, throughput and latencies with the settings of one run."""

    def __init__(self, arguments: argparse.Namespace, files: AdapterFiles) -> None:
        self.arguments = arguments
        self.files = files
        self.traffic = Traffic(
            arguments.input,
            arguments.output,
            files.model.vocab_size,
            alpha=arguments.alpha,
            cv=arguments.cv,
            num_prefix=arguments.prefix,
            is_one_share=arguments.shares == "one",
        )
        self.plan = PoolPlan(
            arguments.pool_adapters,
            arguments.max_sequences,
            arguments.host_adapters,
            self.traffic.full_prompts,
            arguments.output,
        )
        self.warm_s = WARM_SHARE * arguments.seconds

    def open(self, plan: PoolPlan, dtype: str, policy: str) -> Any:
        return open_engine(self.arguments.base, self.files, plan, dtype, policy, self.arguments.threads)

    def capacity(self) -> float:
        """Requests/s that an engine with the first policy and the fewest adapters answers from a full queue."""
        requests = self.traffic.requests(
            CAPACITY_BATCHES * self.plan.num_sequences, self._digests(min(self.arguments.adapters))
        )
        arrivals = [Arrival(0.0, add) for add in requests]
        seconds = min(CAPACITY_S, self.arguments.seconds)
        while True:
            with self.open(self.plan, self.arguments.dtype, self.arguments.policy[0]) as engine:
                window = drive(engine, arrivals, WARM_SHARE * seconds, (1.0 + WARM_SHARE) * seconds, 0.0)
            if window.fewest_sequences < self.plan.num_sequences:
                # The queue ran empty before the window closed: use a shorter window.
                seconds /= 2
            elif window.num_finished:
                return window.num_finished / window.seconds
            # Otherwise, no request finished because other processes kept the machine busy: try again.

    def _digests(self, num_adapters: int) -> Sequence[str]:
        return self.files.digests[:num_adapters]

    def saturate(self, engines: Sequence[tuple[Case, RunningEngine]], rate: float, number: int) -> list[Figures]:
        """Measure the throughput of all engines in one round, in turns of less than a second."""
        end_s = self.warm_s + self.arguments.seconds
        drives = []
        for case, engine in engines:
            digests, num_at_once = self._digests(case.num_adapters), 2 * self.plan.num_sequences
            # Start with more requests than sequence slots, so that the queue never runs empty.
            arrivals = self.traffic.arrivals(digests, rate, end_s, num_at_once, seed=42 + number * SEED_STRIDE)
            drives.append(Drive(engine, arrivals, self.warm_s, end_s, 0.0))
        return [{**throughput_figures(window), "rate": rate} for window in drive_in_turns(drives, TURN_S)]

    def calm(self, case: Case, engine: RunningEngine, rate: float, number: int) -> Figures:
        """Measure one engine's latencies in one round, while the other engines are idle."""
        end_s = self.warm_s + self.arguments.seconds
        arrivals = self.traffic.arrivals(self._digests(case.num_adapters), rate, end_s, seed=142 + number * SEED_STRIDE)
        figures = latency_figures(drive(engine, arrivals, self.warm_s, end_s, PATIENCE_S), self.arguments.slo)
        figures["rate"] = rate
        return figures


def measure(measurement: Measurement, console: Console) -> tuple[list[Case], dict[str, float]]:
    arguments = measurement.arguments
    capacity = measurement.capacity()
    calm_rate = CALM * capacity if arguments.rate is None else arguments.rate
    console.print(
        f"capacity with {min(arguments.adapters)} adapters: {capacity:.1f} requests/s; "
        f"throughput is measured at {SATURATED * capacity:.1f} requests/s, latencies at {calm_rate:.1f}"
    )
    cases = [Case(policy, n, [], []) for policy in arguments.policy for n in sorted(arguments.adapters)]
    with ExitStack() as stack:
        engines = [
            (case, stack.enter_context(measurement.open(measurement.plan, arguments.dtype, case.policy)))
            for case in cases
        ]
        # The first round only fills the pools. Its figures are discarded.
        for number in range(arguments.repeats + 1):
            saturated = measurement.saturate(engines, SATURATED * capacity, number)
            for (case, engine), throughput in zip(engines, saturated, strict=True):
                latency = measurement.calm(case, engine, calm_rate, number)
                if number == 0:
                    continue
                case.throughput.append(throughput)
                case.latency.append(latency)
                console.print(f"  {case.policy}, {case.num_adapters} adapters: {throughput['tokens_s']:.0f} tokens/s")
                if (throughput["fewest_sequences"] or 0) <= arguments.max_sequences:
                    console.print("  [yellow]the queue ran empty: throughput is a lower bound[/yellow]")
            # Rotate the order: the engine that was first in this round is last in the next.
            engines.append(engines.pop(0))
    return cases, {
        "requests_s": capacity,
        "saturated_rate": SATURATED * capacity,
        "calm_rate": calm_rate,
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser("s_lora", __doc__)
    add = parser.add_argument
    add("--adapters", type=_numbers, default=[5, 100, 1000, 2000], help="numbers of adapters to compare")
    add("--pool-adapters", type=int, default=50, help="adapters that fit in the pool in addition to K and V")
    add("--host-adapters", type=int, default=200, help="adapters that fit in the host tier")
    add("--max-sequences", type=int, default=32, help="sequence slots")
    add("--alpha", type=float, default=1.0, help="popularity: 1 is uniform, lower is more skewed (numpy.random.power)")
    add("--cv", type=float, default=1.0, help="coefficient of variation of the time between arrivals")
    add("--rate", type=_rate, default=None, help="requests/s for measuring latencies; auto: 70 %% of capacity")
    add("--prefix", type=int, default=0, help="additional prompt tokens that an adapter's requests share")
    add("--shares", choices=("adapter", "one"), default="adapter", help="one account per adapter, or one for all")
    add("--policy", type=_policies, default=list(POLICIES), help=",".join(POLICIES))
    add("--slo", type=_goal, default=Goal(1.0, 0.05), metavar="TTFT,TPOT", help="goodput limits, in seconds")
    whole, cores = Lengths(8, 128), len(os.sched_getaffinity(0))
    add_engine(parser, repeats=1, seconds=20.0, inputs=whole, outputs=whole, threads=cores)
    arguments = parser.parse_args(argv)
    require_sound(parser, arguments)
    if min(arguments.alpha, arguments.cv) <= 0 or min(arguments.adapters) < 1:
        parser.error("--alpha, --cv and the numbers of adapters must be above 0")
    return arguments


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(parse(argv))
    arguments, console = run.arguments, run.console
    files = open_files(arguments, max(arguments.adapters), console)
    measurement = Measurement(arguments, files)
    checked = check_answers(arguments, files, measurement.traffic, arguments.policy, console)
    cases, rates = measure(measurement, console)
    found = summaries(cases)
    workload = _workload(measurement)
    titles = (f"saturated, {rates['saturated_rate']:.1f} requests/s", f"calm, {rates['calm_rate']:.1f} requests/s")
    for table in tables(found, *titles):
        console.print(table)
    console.print(f"goodput counts requests with TTFT <= {arguments.slo.ttft_s} s and TPOT <= {arguments.slo.tpot_s} s")
    run.say(workload)
    run.write({"workload": workload, "check": checked, "capacity": rates, "cases": found})
    if arguments.plot is not None:
        lines: dict[str, list[tuple[float, float]]] = {policy: [] for policy in arguments.policy}
        for one in found:
            lines[one["policy"]].append((one["adapters"], one["throughput"]["tokens_s"]))
        title = f"S-LoRA workload, alpha {arguments.alpha:g}, a pool of {arguments.pool_adapters} adapters"
        write_svg(arguments.plot, draw_plot(title, lines))
    return 0


def draw_plot(title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw `lines`, which maps each policy to its (adapters, tokens/s) points, with a logarithmic horizontal axis."""
    numbers = sorted({number for points in lines.values() for number, _ in points})
    span = math.log(numbers[-1] / numbers[0]) or 1.0
    return draw_lines(
        title, ("adapters", "tokens/s"), lines, lambda x: math.log(x / numbers[0]) / span, numbers, has_dots=True
    )


def _workload(measurement: Measurement) -> dict[str, Any]:
    arguments, plan = measurement.arguments, measurement.plan
    pages = measurement.files.num_pages(arguments.dtype)
    return {
        **describe_workload(arguments),
        "pool": f"{plan.num_adapters} adapters of {pages} pages, {plan.kv_pages} pages of K and V",
        "host_adapters": plan.num_host_adapters,
        "max_sequences": plan.num_sequences,
        "alpha": arguments.alpha,
        "cv": arguments.cv,
        "shared_prefix_tokens": arguments.prefix,
        "shares": arguments.shares,
        "slo": asdict(arguments.slo),
    }


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _rate(text: str) -> float | None:
    return None if text == "auto" else float(text)


def _goal(text: str) -> Goal:
    ttft_s, tpot_s = (float(part) for part in text.split(","))
    return Goal(ttft_s, tpot_s)


def _policies(text: str) -> list[str]:
    named = text.split(",")
    if not set(named) <= POLICIES.keys():
        raise ValueError(text)
    return named


if __name__ == "__main__":
    raise SystemExit(main())
