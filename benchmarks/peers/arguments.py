"""The arguments that the comparisons with peers share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.harness import SCRATCH, new_parser
from benchmarks.peers.workload import Load

LOADS = (Load(64, 32), Load(32, 128))
MIN_COLUMNS = 160
"""Width of a table when the output is not a terminal, in columns."""


def peers_parser(name: str, description: str | None, sizes: Iterable[str], size: str = "1b") -> argparse.ArgumentParser:
    """A parser for a comparison of systems on a random model, whose shape is one of `sizes`."""
    parser = new_parser(name, description)
    add = parser.add_argument
    add("--size", choices=sorted(sizes), default=size)
    add("--load", type=_load_of, action="append", metavar="PROMPT/OUTPUT", help="repeatable; default 64/32 and 32/128")
    add("--adapters", type=_positive, default=16, help="number of adapters, and of requests that arrive together")
    add("--rank", type=_positive, default=16)
    add("--repeats", type=_positive, default=3, help="rounds over all systems; medians are reported")
    add("--threads", type=_positive, default=len(os.sched_getaffinity(0)))
    add("--scratch", type=Path, default=SCRATCH / "peers", help="directory for models and logs")
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser.parse_args(argv)
    arguments.load = arguments.load or list(LOADS)
    return arguments


def _load_of(text: str) -> Load:
    try:
        return Load.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value
