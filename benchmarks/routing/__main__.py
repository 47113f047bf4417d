"""Simulates a fleet of replicas and compares the router with simpler policies.

The router is loramux's own code. Gateways, replicas and time are simulated, so the figures do not depend on the
machine, and equal seeds give equal figures. Each run ends with a check that no request was lost or ended twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from benchmarks.harness import begin, new_parser, reports_failure
from benchmarks.routing.figures import MAX_IMBALANCE, MIN_HIT_RATE, best_hit_rate, measure
from benchmarks.routing.fleet import Fleet, MakePolicy
from benchmarks.routing.policies import POLICIES
from benchmarks.routing.scenarios import Scenario, cold_burst, replica_dies, replica_joins
from benchmarks.routing.setting import Setting
from benchmarks.tables import table

COLD_SETTLE_S = 300.0
"""Simulated seconds for empty pools to fill before the measurement begins."""

SCENARIOS: dict[str, Callable[[Setting, MakePolicy], Scenario]] = {
    "dies": replica_dies,
    "joins": replica_joins,
    "burst": cold_burst,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("routing", __doc__, is_timed=False)
    defaults = Setting()
    parser.add_argument("--adapters", type=int, default=defaults.num_adapters)
    parser.add_argument("--replicas", type=int, default=defaults.num_replicas)
    parser.add_argument("--pool", type=int, default=defaults.pool_adapters, help="adapters in one replica's pool")
    parser.add_argument(
        "--capacity", type=int, default=defaults.capacity, help="sequences that one replica runs at once"
    )
    parser.add_argument(
        "--zipf",
        type=float,
        nargs="*",
        default=[0.8, 1.0, 1.2],
        help="exponents of Zipf's law; if empty, only the scenarios run",
    )
    parser.add_argument("--load", type=float, nargs="*", default=[0.7, 0.9], help="fractions of the fleet's capacity")
    parser.add_argument("--gateways", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--start", choices=("warm", "cold"), nargs="*", default=["warm", "cold"])
    parser.add_argument("--policies", choices=POLICIES, nargs="*", default=list(POLICIES))
    parser.add_argument("--scenarios", choices=SCENARIOS, nargs="*", default=list(SCENARIOS))
    parser.add_argument("--settle-s", type=float, help="simulated seconds before measuring (default 60, cold 300)")
    parser.add_argument("--measure-s", type=float, default=defaults.measure_s, help="simulated seconds measured")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    return parser.parse_args(argv)


@reports_failure
def main(argv: Sequence[str] | None = None) -> None:
    started = begin(parse(argv))
    arguments, console = started.arguments, started.console
    headings = ("start", "zipf", "load", "gateways", "policy", "hits", "imbalance", "p99 wait", "loads/s", "queues")
    rows, shown = [], []
    started_s = time.process_time()
    base = Setting(
        num_adapters=arguments.adapters,
        num_replicas=arguments.replicas,
        pool_adapters=arguments.pool,
        capacity=arguments.capacity,
        measure_s=arguments.measure_s,
        seed=arguments.seed,
    )
    axes = product(arguments.start, arguments.zipf, arguments.load, arguments.gateways)
    for start, zipf, load, num_gateways in axes:
        settle_s = arguments.settle_s or (base.settle_s if start == "warm" else COLD_SETTLE_S)
        setting = dataclasses.replace(
            base, is_warm=start == "warm", zipf=zipf, load=load, num_gateways=num_gateways, settle_s=settle_s
        )
        bound = best_hit_rate(setting)
        shown.append([start, str(zipf), str(load), str(num_gateways), "bound", f"{bound:.4f}", str(MAX_IMBALANCE)])
        for policy in arguments.policies:
            row = run(setting, policy)
            figures = row["figures"]
            rows.append({**row, "best_hit_rate": bound})
            numbers = (f"{figures['hit_rate']:.4f}", f"{figures['imbalance']:.2f}", f"{figures['p99_wait_s']:.2f} s")
            queues = "diverge" if row["is_diverging"] else ""
            shown.append([*("", "", "", "", policy), *numbers, f"{figures['loads_per_s']:.1f}", queues])
    if rows:
        console.print(table("simulated fleet", headings, shown))
    events = [dataclasses.asdict(SCENARIOS[name](base, POLICIES["router"])) for name in arguments.scenarios]
    for event in events:
        console.print(event["name"], event["remarks"])
        for phase in ("before", "during", "after"):
            console.print(f"  {phase}:", event[phase])
    routed = [row for row in rows if row["policy"] == "router"]
    num_met = sum(row["meets_goals"] for row in routed)
    console.print(f"the router meets the goals in {num_met} of {len(routed)} settings")
    goals = {"min_hit_rate": MIN_HIT_RATE, "max_imbalance": MAX_IMBALANCE}
    cpu_s = round(time.process_time() - started_s, 1)
    started.write({"goals": goals, "cpu_s": cpu_s, "rows": rows, "scenarios": events})


def run(setting: Setting, policy: str) -> dict[str, Any]:
    fleet = Fleet(setting, POLICIES[policy])
    fleet.run(setting.settle_s)
    figures = measure(fleet, setting.measure_s)
    fleet.check()
    return {
        "setting": dataclasses.asdict(setting),
        "policy": policy,
        "figures": dataclasses.asdict(figures),
        "is_diverging": figures.is_diverging,
        "meets_goals": figures.meets_goals,
    }


if __name__ == "__main__":
    raise SystemExit(main())
