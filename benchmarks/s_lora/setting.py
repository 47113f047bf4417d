"""Arguments, adapters on disk, and the initial check, shared by the measurements on the S-LoRA engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import add_allow_busy
from benchmarks.s_lora.adapters import AdapterFiles, make_adapters
from benchmarks.s_lora.check import NUM_ADAPTERS, answer_alone, check_mixed, pairs_of, roomy_plan, small_plan
from benchmarks.s_lora.engine import DISK_BYTES, open_engine
from benchmarks.s_lora.traffic import Traffic
from benchmarks.s_lora.workload import Lengths
from loramux.engine.architectures.model_config import ModelConfig

FOLDER = Path(__file__).parents[1]
DEMO_BASE = FOLDER.parent / "admin" / "demo" / "base"
DTYPES = ("bfloat16", "float32")


def add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", type=Path, default=DEMO_BASE, help="the base model's directory")
    add("--rank", type=int, default=8)
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of weights, K and V, and adapters while measuring")
    add("--scratch", type=Path, default=FOLDER / "scratch" / "s_lora", help="directory for adapters, kept between runs")
    add("--out", type=Path, help="write the figures to this JSON file")
    add_allow_busy(parser)


def lengths(text: str) -> Lengths:
    shortest, end = (int(part) for part in text.split("-"))
    if not 0 < shortest < end:
        raise ValueError(text)
    return Lengths(shortest, end)


def describe_base(base: Path) -> dict[str, str]:
    model = ModelConfig.load(base)
    return {
        "base": base.name if base != DEMO_BASE else "the demo's",
        "base_shape": f"{model.num_layers} layers, hidden {model.hidden_size}",
    }


def open_files(arguments: argparse.Namespace, num_adapters: int, console: Console) -> AdapterFiles:
    """Make at least `num_adapters` adapters and pack them into the disk tier."""
    count = max(num_adapters, NUM_ADAPTERS)
    files = make_adapters(arguments.scratch, arguments.base, count, arguments.rank, console.print)
    files.pack(files.digests[:NUM_ADAPTERS], "float32", DISK_BYTES, console.print)
    files.pack(files.digests[:count], arguments.dtype, DISK_BYTES, console.print)
    return files


def check_answers(
    arguments: argparse.Namespace, files: AdapterFiles, traffic: Traffic, policies: Sequence[str]
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
            found[policy] = asdict(check_mixed(engine, traffic, digests, pairs, expected))
    return found
