"""Compares a mixture of experts on a CPU with vLLM, and measures the overhead of adapters on all experts.

Sixteen greedy requests arrive together, for the base only and for sixteen adapters on attention and on all experts. No
peer runs such adapters in one batch: vLLM's CPU build has no LoRA for experts, and peft cannot mix them in a batch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.machine import add_allow_busy, describe, require_idle
from benchmarks.peers.__main__ import LOADS, MIN_COLUMNS, exit_on_signal, load_of, positive
from benchmarks.peers.agreement import CheckFailed, TokenIds, answers_of, check_work, compare, require_effect
from benchmarks.peers.loramux_server import open_loramux
from benchmarks.peers.measurement import MachineBusy, Measurement
from benchmarks.peers.mixture_files import SHAPES, MixtureFiles, make_mixture_files, write_merged
from benchmarks.peers.system import LORAMUX, System, SystemFailed
from benchmarks.peers.vllm_server import find_vllm
from benchmarks.peers.workload import BASE, DISTINCT, Load

OVER_VLLM, OVERHEAD = 1.0, 0.25
"""Targets for the base's throughput relative to vLLM's, and for the overhead of adapters relative to the base only."""

KINDS = (BASE, DISTINCT)
POOL_BYTES = "5GiB"
"""Room for K, V and sixteen adapters. An adapter of rank 16 on all experts takes 0.2 GB."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    console = Console()
    if not console.is_terminal:
        console.width = MIN_COLUMNS
    machine = describe()
    require_idle(arguments.allow_busy)
    logs = arguments.scratch.absolute() / "logs"
    vllm = find_vllm(os.environ, arguments.threads, logs)
    console.print(f"{vllm.name}: {vllm.missing or vllm.version}")
    bases = [system for system in vllm.systems if system.kinds == (BASE,) and system.dtype == "bfloat16"]
    try:
        small = make_mixture_files(arguments.scratch, "small", arguments.adapters, arguments.rank)
        console.print(f"loramux's answers that equal transformers': {check(small, arguments.threads, logs)}")
        files = make_mixture_files(arguments.scratch, arguments.size, arguments.adapters, arguments.rank)
        systems = [own_system(arguments.dtype, arguments.threads, logs), *bases]
        measurement = Measurement(files, systems, arguments.load, arguments.repeats, arguments.allow_busy, console)  # type: ignore[arg-type]
        measurement.run(lambda: None)
    except (CheckFailed, SystemFailed, MachineBusy) as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    rows = figures(measurement, arguments.load, arguments.adapters)
    for row in rows:
        console.print(row)
    if arguments.out is not None:
        shape = {name: getattr(files.shape, name) for name in files.shape.__slots__}
        body = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine,
            "is_busy_allowed": arguments.allow_busy,
            "shape": shape,
            "adapters": arguments.adapters,
            "rank": arguments.rank,
            "vllm": vllm.missing or vllm.version,
            "failures": measurement.failures,
            "seconds": seconds_of(measurement),
            "figures": rows,
            "targets": {"base over vLLM": OVER_VLLM, "overhead": OVERHEAD},
        }
        arguments.out.write_text(json.dumps(body, indent=1) + "\n")
    return 0


def own_system(dtype: str, threads: int, logs: Path) -> System:
    return System(LORAMUX, dtype, KINDS, partial(open_loramux, dtype, threads, logs, pool_bytes=POOL_BYTES))


def check(files: MixtureFiles, threads: int, logs: Path) -> str:
    """Compare loramux's float32 answers with transformers' answers, for which each adapter is merged into its own copy
    of the base.

    Raises CheckFailed if an answer differs.
    """
    expected = {BASE: _reference(files, BASE), DISTINCT: _reference(files, DISTINCT)}
    require_effect(expected)
    agreement = compare(expected, answers_of(own_system("float32", threads, logs), files, KINDS))  # type: ignore[arg-type]
    if not agreement.is_whole:
        raise CheckFailed(f"{LORAMUX} and transformers disagree in float32: {agreement}")
    return str(agreement)


def _reference(files: MixtureFiles, kind: str) -> TokenIds:
    from transformers import Qwen3MoeForCausalLM

    work = check_work(kind, files)  # type: ignore[arg-type]
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
    rows = []
    for load in loads:

        def speed(name: str, kind: str, samples: dict[Any, list[float]], load: Load = load) -> float | None:
            found = [
                num_requests * load.num_output / statistics.median(seconds)
                for cell, seconds in samples.items()
                if (cell.system.name, cell.load, cell.kind) == (name, load, kind)
            ]
            return max(found, default=None)

        base, vllm = (speed(name, BASE, measurement.samples) for name in (LORAMUX, "vLLM"))
        own = [speed(LORAMUX, kind, measurement.own_samples) for kind in KINDS]
        row: dict[str, Any] = {"load": str(load), "base": base, "adapters": own[1], "vLLM base": vllm}
        if base and vllm:
            row["base over vLLM"] = base / vllm
        if own[0] and own[1]:
            row["overhead"] = own[0] / own[1] - 1
        rows.append({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
    return rows


def seconds_of(measurement: Measurement) -> dict[str, list[float]]:
    """The duration of every turn in seconds, by system, load and kind."""
    cells = measurement.samples | measurement.own_samples
    return {
        f"{cell.system.name}, {cell.load}, {cell.kind}": [round(s, 3) for s in each] for cell, each in cells.items()
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.mixture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=sorted(SHAPES), default="4b")
    add("--load", type=load_of, action="append", metavar="PROMPT/OUTPUT", help="repeatable; default 64/32 and 32/128")
    add("--adapters", type=positive, default=16, help="number of adapters, and of requests that arrive together")
    add("--rank", type=positive, default=16)
    add("--repeats", type=positive, default=3, help="rounds over both systems; medians are reported")
    add("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of loramux")
    add_allow_busy(parser)
    add("--scratch", type=Path, default=Path(__file__).parents[1] / "scratch" / "peers", help="directory for models")
    add("--out", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args(argv)
    arguments.load = arguments.load or list(LOADS)
    return arguments


if __name__ == "__main__":
    # Raise SystemExit on SIGTERM too, so that the servers are stopped with this process.
    signal.signal(signal.SIGTERM, exit_on_signal)
    raise SystemExit(main())
