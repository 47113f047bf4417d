"""What all benchmarks do: parse arguments, refuse a busy machine, compare in turns, and write the figures as JSON."""

from __future__ import annotations

import argparse
import functools
import json
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

import numpy as np
from rich.console import Console

from benchmarks.answers import CheckError, RunFailed
from benchmarks.machine import add_allow_busy, busy_share, describe, out_file, require_idle
from benchmarks.tables import open_console

SCRATCH = Path(__file__).parent / "scratch"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """A benchmark that has started: its arguments, where it prints, and the machine before the measurement."""

    arguments: argparse.Namespace
    console: Console
    machine: Mapping[str, Any]
    busy_before: float | None
    """Busy share of the machine, or None for a benchmark that measures no time."""

    def say(self, lines: Mapping[str, Any]) -> None:
        """Print settings of the run, and the machine."""
        for name, value in (dict(lines) | dict(self.machine)).items():
            self.console.print(f"[dim]{name}: {value}[/dim]", highlight=False)

    def write(self, figures: Mapping[str, Any]) -> None:
        """Write the figures to `--out`, if it is given, with the date and the machine."""
        if self.arguments.out is not None:
            document = {"date": datetime.now(UTC).date().isoformat(), "machine": self.machine}
            if self.busy_before is not None and "busy_share" not in figures:
                document["busy_share"] = {"before": round(self.busy_before, 3), "after": round(busy_share(), 3)}
            text = json.dumps(document | dict(figures), indent=1, allow_nan=False)
            self.arguments.out.write_text(text + "\n")


def new_parser(name: str, description: str | None, is_timed: bool = True) -> argparse.ArgumentParser:
    """A parser for `python -m benchmarks.NAME`, with the arguments that all benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=out_file, help="write the figures to this JSON file")
    if is_timed:
        add_allow_busy(parser)
    return parser


def begin(arguments: argparse.Namespace, console: Console | None = None) -> Run:
    """Describe the machine. Exit if a benchmark that measures time would run on a busy machine, unless that is
    allowed.
    """
    machine = describe()
    is_timed = hasattr(arguments, "allow_busy")
    return Run(arguments, console or open_console(), machine, require_idle(arguments.allow_busy) if is_timed else None)


def reports_failure(main: Callable[P, int | None]) -> Callable[P, int]:
    """Make `main` print the message of a RunFailed and return 1, and otherwise return its status, by default 0."""

    @functools.wraps(main)
    def reporting(*arguments: P.args, **named: P.kwargs) -> int:
        try:
            return main(*arguments, **named) or 0
        except RunFailed as error:
            start = "nothing was measured: " if isinstance(error, CheckError) else ""
            open_console().print(f"{start}{error}", style="red", markup=False, highlight=False)
            return 1

    return reporting


def require_below(limit_ms: float, found: Mapping[str, float]) -> None:
    """Exit with the names and times of the figures above the limit, if there are any."""
    slow = [f"{name}, {value:g} ms" for name, value in found.items() if value > limit_ms]
    if slow:
        raise SystemExit(f"slower than {limit_ms:g} ms: " + "; ".join(slow))


def write_svg(path: Path | None, picture: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(picture)


def percentiles_ms(seconds: Sequence[float], *percents: int, digits: int = 2) -> dict[str, float]:
    """Percentiles in milliseconds, named like `p50_ms`."""
    found = np.percentile(np.array(seconds) * 1e3, percents).tolist()
    return {f"p{percent}_ms": round(value, digits) for percent, value in zip(percents, found, strict=True)}


def percentile(samples: Sequence[float], percent: float) -> float:
    """The percentile, rounded up to the next sample, because infinity cannot be interpolated. Infinity if there are no
    samples.
    """
    return float(np.percentile(samples, percent, method="higher")) if samples else math.inf


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def rotated(ways: Sequence[T], number: int) -> list[T]:
    """The ways in the order of round `number`. It rotates, so that drift in the machine's speed affects all alike."""
    place = number % len(ways)
    return [*ways[place:], *ways[:place]]


def exit_on_sigterm() -> None:
    """Raise SystemExit on SIGTERM too, so that servers are stopped with this process."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    # `timeout` signals both the process and its group. Ignore the second signal, so that the servers shut down cleanly.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
