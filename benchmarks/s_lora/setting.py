"""Arguments, adapters on disk, and the initial check, shared by the measurements on the S-LoRA engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import SCRATCH
from benchmarks.s_lora.adapters import AdapterFiles, make_adapters
from benchmarks.s_lora.check import NUM_ADAPTERS, answer_alone, check_mixed, pairs_of, roomy_plan, small_plan
from benchmarks.s_lora.engine import DISK_BYTES, open_engine
from benchmarks.s_lora.traffic import Traffic
from benchmarks.s_lora.workload import Lengths
from loramux.engine.architectures.model_config import ModelConfig

DEMO_BASE = Path(__file__).parents[2] / "admin" / "demo" / "base"
DTYPES = ("bfloat16", "float32")


def add_engine(
    parser: argparse.ArgumentParser, *, repeats: int, seconds: float, inputs: Lengths, outputs: Lengths, threads: int
) -> None:
    """Add the arguments of all measurements on the S-LoRA engine, with these defaults."""
    add = parser.add_argument
    add("--repeats", type=int, default=repeats, help="rounds; each has a window for each case")
    add("--seconds", type=float, default=seconds, help="length of each window")
    add("--input", type=lengths, default=inputs, metavar="LO-HI", help="prompt tokens in [LO, HI)")
    add("--output", type=lengths, default=outputs, metavar="LO-HI", help="new tokens in [LO, HI)")
    add("--threads", type=int, default=threads, help="threads per step")
    add("--base", type=Path, default=DEMO_BASE, help="the base model's directory")
    add("--rank", type=int, default=8)
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of weights, K and V, and adapters while measuring")
    add("--scratch", type=Path, default=SCRATCH / "s_lora", help="directory for adapters, kept between runs")
    add("--plot", type=Path, help="plot the figures to this SVG file")


def require_sound(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with an error if the benchmark cannot run or plot with these arguments."""
    if arguments.plot is not None and arguments.plot.suffix != ".svg":
        parser.error("--plot writes SVG only: name a file that ends in .svg")
    if arguments.seconds <= 0 or arguments.repeats < 1:
        parser.error("--seconds and --repeats must be above 0")


def lengths(text: str) -> Lengths:
    shortest, end = (int(part) for part in text.split("-"))
    if not 0 < shortest < end:
        raise ValueError(text)
    return Lengths(shortest, end)


def describe_workload(arguments: argparse.Namespace) -> dict[str, Any]:
    """The part of the workload that all measurements on the S-LoRA engine have."""
    base, model = arguments.base, ModelConfig.load(arguments.base)
    return {
        "base": base.name if base != DEMO_BASE else "the demo's",
        "base_shape": f"{model.num_layers} layers, hidden {model.hidden_size}",
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "rank": arguments.rank,
        "prompt_tokens": str(arguments.input),
        "output_tokens": str(arguments.output),
        "seconds": arguments.seconds,
        "repeats": arguments.repeats,
    }


def open_files(arguments: argparse.Namespace, num_adapters: int, console: Console) -> AdapterFiles:
    """Make at least `num_adapters` adapters and pack them into the disk tier."""
    count = max(num_adapters, NUM_ADAPTERS)
    files = make_adapters(arguments.scratch, arguments.base, count, arguments.rank, console.print)
    files.pack(files.digests[:NUM_ADAPTERS], "float32", DISK_BYTES, console.print)
    files.pack(files.digests[:count], arguments.dtype, DISK_BYTES, console.print)
    return files


def check_answers(
    arguments: argparse.Namespace, files: AdapterFiles, traffic: Traffic, policies: Sequence[str], console: Console
) -> dict[str, dict[str, Any]]:
    """Check that answers are the same alone and in a batch with evictions, and return the figures for each policy.

    Raises CheckError as `answer_alone` and `check_mixed` do.
    """
    digests = files.digests[:NUM_ADAPTERS]
    pairs = pairs_of(traffic, digests)
    with open_engine(arguments.base, files, roomy_plan(), "float32", policies[0], arguments.threads) as engine:
        expected = answer_alone(engine, pairs)
    found = {}
    for policy in policies:
        with open_engine(arguments.base, files, small_plan(), "float32", policy, arguments.threads) as engine:
            checked = check_mixed(engine, traffic, digests, pairs, expected)
        console.print(
            f"checked, {policy}: {checked.num_tokens} float32 tokens are equal alone and in a batch with "
            f"{checked.num_evictions} evictions"
        )
        found[policy] = asdict(checked)
    return found
