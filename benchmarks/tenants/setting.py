"""The arguments, initial check and output files that the multi-tenant measurements share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import busy_share, describe
from benchmarks.s_lora.adapters import AdapterFiles
from benchmarks.s_lora.setting import add_engine, check_answers, describe_base, lengths
from benchmarks.s_lora.traffic import Traffic
from benchmarks.s_lora.workload import Lengths
from benchmarks.tenants.figures import Comparison
from benchmarks.tenants.run import Observed

WHOLE_SHARE = 0.95
"""Lowest CPU share of an undisturbed engine that always has work, as a fraction of a core. If the share is lower, other
processes used the core too."""


def add_common(parser: argparse.ArgumentParser, repeats: int, outputs: Lengths) -> None:
    add = parser.add_argument
    add("--repeats", type=int, default=repeats, help="rounds; each has one window per variant")
    add("--input", type=lengths, default=Lengths(8, 32), metavar="LO-HI", help="prompt tokens in [LO, HI)")
    add("--output", type=lengths, default=outputs, metavar="LO-HI", help="new tokens in [LO, HI)")
    add("--threads", type=int, default=1, help="threads per step; leave a core for loading adapters")
    add("--plot", type=Path, help="plot the tails to this SVG file")
    add_engine(parser)


def traffic_of(arguments: argparse.Namespace, files: AdapterFiles) -> Traffic:
    return Traffic(
        prompts=arguments.input,
        outputs=arguments.output,
        alpha=1.0,
        cv=1.0,
        num_prefix=0,
        is_one_share=False,
        vocab_size=files.model.vocab_size,
    )


def check(arguments: argparse.Namespace, files: AdapterFiles) -> dict[str, Any]:
    """Return the check's figures. Raises CheckError if an answer in a batch with evictions differs from the answer to
    the same request alone."""
    return check_answers(arguments, files, traffic_of(arguments, files), ("lru",))["lru"]


@dataclass(frozen=True, slots=True)
class Outcome:
    busy_before: float
    workload: dict[str, Any]
    checked: dict[str, Any]
    figures: dict[str, Any]
    comparisons: Sequence[Comparison]
    picture: str


def leave(outcome: Outcome, arguments: argparse.Namespace, console: Console) -> None:
    """Print the comparisons with the workload and machine, and write the requested files."""
    for comparison in outcome.comparisons:
        console.print(f"[bold]{comparison}[/bold]", highlight=False)
    machine = describe()
    busy = {"before": round(outcome.busy_before, 3), "after": round(busy_share(), 3)}
    for name, value in (outcome.workload | machine | {"busy": busy}).items():
        console.print(f"[dim]{name}: {value}[/dim]", highlight=False)
    if arguments.out is not None:
        document = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine,
            "busy_share": busy,
            "workload": outcome.workload,
            "check": outcome.checked,
            "figures": outcome.figures,
            "comparisons": [comparison.document for comparison in outcome.comparisons],
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if arguments.plot is not None:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        arguments.plot.write_text(outcome.picture)


def say_disturbed(observed: Observed, console: Console) -> None:
    """Warn if an engine that always had work did not get a whole core."""
    if observed.processor_share < WHOLE_SHARE:
        console.print(f"  [yellow]disturbed: the engine got {observed.processor_share:.0%} of a core[/yellow]")


def common_workload(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **describe_base(arguments.base),
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "rank": arguments.rank,
        "prompt_tokens": str(arguments.input),
        "output_tokens": str(arguments.output),
        "seconds": arguments.seconds,
        "repeats": arguments.repeats,
    }


def longest(drawn: Lengths) -> Lengths:
    """The end of the range as the only length, so that the pool has room for every sequence and none is preempted."""
    return Lengths(drawn.end, drawn.end + 1)


def require_sound(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with an error if the benchmark cannot run or plot with these arguments."""
    if arguments.plot is not None and arguments.plot.suffix != ".svg":
        parser.error("--plot writes SVG only: name a file that ends in .svg")
    if arguments.seconds <= 0 or arguments.repeats < 1:
        parser.error("--seconds and --repeats must be above 0")
