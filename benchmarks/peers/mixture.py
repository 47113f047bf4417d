"""Compares a mixture of experts on a CPU with vLLM, and measures the overhead of adapters on all experts.

Sixteen greedy requests arrive together, for the base only and for sixteen adapters on attention and on all experts. No
peer runs such adapters in one batch: vLLM's CPU build has no LoRA for experts, and peft cannot mix them in a batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.answers import CheckError
from benchmarks.harness import begin, exit_on_sigterm, reports_failure
from benchmarks.peers.agreement import TokenIds, answers_of, check_work, compare, require_effect
from benchmarks.peers.arguments import MIN_COLUMNS, parsed, peers_parser
from benchmarks.peers.child_server import NO_DRAFTS
from benchmarks.peers.figures import Cell
from benchmarks.peers.loramux_server import open_loramux
from benchmarks.peers.measurement import Measurement
from benchmarks.peers.mixture_files import SHAPES, make_mixture_files, write_merged
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.system import LORAMUX, System
from benchmarks.peers.vllm_server import find_vllm
from benchmarks.peers.workload import BASE, DISTINCT, Load
from benchmarks.tables import open_console

OVER_VLLM, OVERHEAD = 1.0, 0.25
"""Targets for the base's throughput relative to vLLM's, and for the overhead of adapters relative to the base only."""

KINDS = (BASE, DISTINCT)
POOL_BYTES = "5GiB"
"""Room for K, V and sixteen adapters. An adapter of rank 16 on all experts takes 0.2 GB."""


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(_parse(argv), open_console(MIN_COLUMNS))
    arguments, console = run.arguments, run.console
    logs = arguments.scratch.absolute() / "logs"
    vllm = find_vllm(os.environ, arguments.threads, logs)
    console.print(f"{vllm.name}: {vllm.missing or vllm.version}")
    bases = [system for system in vllm.systems if system.kinds == (BASE,) and system.dtype == "bfloat16"]
    small = make_mixture_files(arguments.scratch, "small", arguments.adapters, arguments.rank)
    console.print(f"loramux's answers that equal transformers': {check(small, arguments.threads, logs)}")
    files = make_mixture_files(arguments.scratch, arguments.size, arguments.adapters, arguments.rank)
    systems = [own_system(arguments.dtype, arguments.threads, logs), *bases]
    measurement = Measurement(files, systems, arguments.load, arguments.repeats, arguments.allow_busy, console)
    measurement.run(lambda: None)
    rows = figures(measurement, arguments.load, arguments.adapters)
    for row in rows:
        console.print(row)
    body = {
        "is_busy_allowed": arguments.allow_busy,
        "shape": asdict(files.shape),
        "adapters": arguments.adapters,
        "rank": arguments.rank,
        "speculate": NO_DRAFTS[1],
        "vllm": vllm.missing or vllm.version,
        "failures": measurement.failures,
        "seconds": seconds_of(measurement),
        "figures": rows,
        "targets": {"base over vLLM": OVER_VLLM, "overhead": OVERHEAD},
    }
    run.write(body)
    return 0


def own_system(dtype: str, threads: int, logs: Path) -> System:
    return System(LORAMUX, dtype, KINDS, partial(open_loramux, dtype, threads, logs, pool_bytes=POOL_BYTES))


def check(files: ModelFiles, threads: int, logs: Path) -> str:
    """Compare loramux's float32 answers with transformers' answers, for which each adapter is merged into its own copy
    of the base.

    Raises CheckError if an answer differs.
    """
    expected = {BASE: _reference(files, BASE), DISTINCT: _reference(files, DISTINCT)}
    require_effect(expected)
    agreement = compare(expected, answers_of(own_system("float32", threads, logs), files, KINDS))
    if not agreement.is_whole:
        raise CheckError(f"{LORAMUX} and transformers disagree in float32: {agreement}")
    return str(agreement)


def _reference(files: ModelFiles, kind: str) -> TokenIds:
    from transformers import Qwen3MoeForCausalLM

    work = check_work(kind, files)
    answers = []
    with tempfile.TemporaryDirectory(prefix="loramux-merged-") as scratch:
        for number, question in enumerate(work.questions):
            directory = files.base
            if question.adapter is not None:
                directory = Path(scratch) / str(number)
                write_merged(files, files.adapters[question.adapter], directory)
            model: Any = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            tokens = torch.tensor([question.prompt])
            for _ in range(work.num_output):
                with torch.no_grad():
                    following = model(tokens).logits[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat((tokens, following), 1)
            answers.append(tuple(tokens[0, len(question.prompt) :].tolist()))
    return tuple(answers)


def figures(measurement: Measurement, loads: Sequence[Load], num_requests: int) -> list[dict[str, Any]]:
    """One row per load: tokens per second with loramux's base, with adapters and with vLLM's base, and two ratios."""

    def speed(name: str, load: Load, kind: str, samples: Mapping[Cell, list[float]]) -> float | None:
        found = [
            num_requests * load.num_output / statistics.median(seconds)
            for cell, seconds in samples.items()
            if (cell.system.name, cell.load, cell.kind) == (name, load, kind)
        ]
        return max(found, default=None)

    rows = []
    for load in loads:
        base, vllm = (speed(name, load, BASE, measurement.samples) for name in (LORAMUX, "vLLM"))
        own_base, adapters = (speed(LORAMUX, load, kind, measurement.own_samples) for kind in KINDS)
        row: dict[str, Any] = {"load": str(load), "base": base, "adapters": adapters, "vLLM base": vllm}
        if base and vllm:
            row["base over vLLM"] = base / vllm
        if own_base and adapters:
            row["overhead"] = own_base / adapters - 1
        rows.append({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
    return rows


def seconds_of(measurement: Measurement) -> dict[str, list[float]]:
    """The duration of every turn in seconds, by system, load and kind."""
    cells = measurement.samples | measurement.own_samples
    return {
        f"{cell.system.name}, {cell.load}, {cell.kind}": [round(s, 3) for s in each] for cell, each in cells.items()
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = peers_parser("peers.mixture", __doc__, SHAPES, "4b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of loramux")
    return parsed(parser, argv)


if __name__ == "__main__":
    exit_on_sigterm()
    raise SystemExit(main())
