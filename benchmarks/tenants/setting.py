"""The rounds, initial check and output files that the multi-tenant measurements share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from benchmarks.answers import CheckError
from benchmarks.harness import Run, percentile, write_svg
from benchmarks.line_plots import draw_lines
from benchmarks.running_engine import RunningEngine
from benchmarks.s_lora.adapters import AdapterFiles
from benchmarks.s_lora.run import Arrival, Drive, Stream, Window
from benchmarks.s_lora.setting import check_answers
from benchmarks.s_lora.traffic import Traffic
from benchmarks.s_lora.workload import Lengths
from benchmarks.tenants.figures import Comparison

WHOLE_SHARE = 0.95
"""Lowest CPU share of an undisturbed engine that always has work, as a fraction of a core. If the share is lower, other
processes used the core too."""

PATIENCE_S = 30.0
"""Longest wait for the first tokens and loads of a window after it has closed, in seconds."""

PERCENTS = (0, 50, 75, 90, 95, 98, 99, 99.5, 99.9)
LABELLED = (0, 50, 90, 99, 99.9)


def traffic_of(arguments: argparse.Namespace, files: AdapterFiles) -> Traffic:
    return Traffic(arguments.input, arguments.output, files.model.vocab_size)


def check(run: Run, files: AdapterFiles) -> dict[str, Any]:
    """Return the check's figures. Raises CheckError if an answer in a batch with evictions differs from the answer to
    the same request alone."""
    return check_answers(run.arguments, files, traffic_of(run.arguments, files), ("lru",), run.console)["lru"]


def observe(
    engine: RunningEngine,
    streams: Sequence[Stream],
    arrivals: Iterable[Arrival],
    warm_s: float,
    seconds: float,
    patience_s: float = PATIENCE_S,
    clock: str = "wall",
) -> Window:
    """Let the streams settle for `warm_s`, and then observe a window of `seconds`.

    The times of arrivals are relative to the start of the window. The streams continue after the window until each
    measured request has its first token and each Load has its answer.
    """
    shifted = [replace(one, at_s=one.at_s + warm_s) for one in arrivals]
    drive = Drive(engine, shifted, warm_s, warm_s + seconds, patience_s, streams, clock, awaits_ends=False)
    drive.run(math.inf)
    return drive.end()


def keep_only(engine: RunningEngine, digests: Sequence[str]) -> None:
    """Unload all other adapters and load these. Raises CheckError if one cannot be loaded."""
    engine.unload(entry.digest for entry in engine.stats().adapters if entry.digest not in digests)
    engine.load(digests)
    if not set(digests) <= {entry.digest for entry in engine.stats().adapters}:
        raise CheckError("some adapters could not be loaded")


def leave(
    run: Run, workload: Mapping[str, Any], figures: Mapping[str, Any], comparisons: Sequence[Comparison], picture: str
) -> None:
    """Print the comparisons with the workload and machine, and write the requested files."""
    for comparison in comparisons:
        run.console.print(f"[bold]{comparison}[/bold]", highlight=False)
    run.say(workload)
    run.write({"workload": workload, **figures, "comparisons": [comparison.document for comparison in comparisons]})
    write_svg(run.arguments.plot, picture)


def draw_tails(title: str, axis: str, lines: Mapping[str, Sequence[float]]) -> str:
    """Draw `lines`, which maps names to samples in seconds. On the percentile axis, each additional nine has the same
    width."""
    curves = {name: [(p, 1e3 * percentile(samples, p)) for p in PERCENTS] for name, samples in lines.items()}
    finite = {name: [(p, value) for p, value in points if value < math.inf] for name, points in curves.items()}
    widest = math.log10(1 - PERCENTS[-1] / 100)
    return draw_lines(
        title, ("percentile", f"{axis}, ms"), finite, lambda p: math.log10(1 - p / 100) / widest, LABELLED
    )


def say_disturbed(observed: Window, console: Console) -> None:
    """Warn if an engine that always had work did not get a whole core."""
    if observed.processor_share < WHOLE_SHARE:
        console.print(f"  [yellow]disturbed: the engine got {observed.processor_share:.0%} of a core[/yellow]")


def longest(drawn: Lengths) -> Lengths:
    """The end of the range as the only length, so that the pool has room for every sequence and none is preempted."""
    return Lengths(drawn.end, drawn.end + 1)
