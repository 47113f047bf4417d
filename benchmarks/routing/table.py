"""Prints result files of the simulation as a Markdown table: python -m benchmarks.routing.table FILE.json..."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HEADING = "| start | Zipf | load | gateways | policy | hit rate | bound | max/mean | in 10 s | p99 wait | loads/s | |"


def lines(documents: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = [row for document in documents for row in document["rows"]]
    if rows:
        yield HEADING
        yield "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---|"
    for row in sorted(rows, key=_axes):
        setting, figures = row["setting"], row["figures"]
        name = f"**{row['policy']}**" if row["policy"] == "router" else row["policy"]
        verdict = "diverges" if row["is_diverging"] else "meets the goals" if row["meets_goals"] else ""
        yield (
            f"| {_start(setting)} | {setting['zipf']} | {setting['load']:.0%} | {setting['num_gateways']} | {name} "
            f"| {figures['hit_rate']:.4f} | {row['best_hit_rate']:.4f} | {figures['imbalance']:.2f} "
            f"| {figures['imbalance_10_s']:.2f} | {figures['p99_wait_s']:.2f} s | {figures['loads_per_s']:.1f} "
            f"| {verdict} |"
        )
    scenarios = [scenario for document in documents for scenario in document["scenarios"]]
    if scenarios:
        yield ""
        yield "| scenario | phase | hit rate | max/mean | p99 wait | loads/s | remarks |"
        yield "|---|---|---:|---:|---:|---:|---|"
    for scenario in scenarios:
        remarks = ", ".join(f"{name}: {value:g}" for name, value in scenario["remarks"].items())
        for phase in ("before", "during", "after"):
            figures = scenario[phase]
            yield (
                f"| {scenario['name']} | {phase} | {figures['hit_rate']:.4f} | {figures['imbalance']:.2f} "
                f"| {figures['p99_wait_s']:.2f} s | {figures['loads_per_s']:.1f} "
                f"| {remarks if phase == 'during' else ''} |"
            )


def _start(setting: dict[str, Any]) -> str:
    return "warm" if setting["is_warm"] else "cold"


def _axes(row: dict[str, Any]) -> tuple[str, float, float, int]:
    setting = row["setting"]
    return _start(setting), setting["zipf"], setting["load"], setting["num_gateways"]


def main(argv: Sequence[str]) -> None:
    print("\n".join(lines([json.loads(Path(name).read_text()) for name in argv])))


if __name__ == "__main__":
    main(sys.argv[1:])
