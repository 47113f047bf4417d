"""Measure loramux on one GPU: ceilings, LoRA, attention. Answers are checked first; what is wrong is not timed.

Run it from the repository root: `PYTHONPATH=.src python -m benchmarks.gpu --out FILE.json`. It needs torch >= 2.11,
triton >= 3.6, numba, numpy, safetensors and msgspec, ends within 8 minutes on an H200, writes one JSON, and prints a
Markdown table a part. Without a GPU, `TRITON_INTERPRET=1 ... --check-only --tiny` checks the answers on a small model.
It ends with 1 if a part failed, gave a wrong answer or was cut short, and with 2 if it cannot run here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_attention, gpu_ceilings, gpu_lora
from benchmarks.gpu_bench import Bench, Row, describe
from benchmarks.gpu_model import LLAMA_8B, TINY

PEERS = Path(__file__).parent / "scratch" / "peers"
TOTAL_S = 460
WARM_S = 120
MAX_WARMERS = 12


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the benchmark. It looks at `bench.seconds_left` between cases and reports those it leaves out.

    `warm(bench, shard, num_shards)` compiles a share of what `run` launches, in a process of its own.
    """

    name: str
    budget_s: float
    run: Callable[[Bench], list[Row]]
    warm: Callable[[Bench, int, int], None] | None = None


PARTS = (
    # The others state their floors against the ceilings, so that this one always runs.
    Part("ceilings", 30, gpu_ceilings.run),
    Part("lora", 220, gpu_lora.run, gpu_lora.warm),
    Part("attention", 100, gpu_attention.run, gpu_attention.warm),
)


def run_part(part: Part, bench: Bench, ends_at: float) -> dict[str, Any]:
    """One part's rows and seconds; what it raises becomes its error, and the run goes on."""
    started = time.monotonic()
    bench.deadline = min(ends_at, started + part.budget_s) if bench.is_timed else float("inf")
    rows: list[Row] = []
    error = ""
    try:
        rows = part.run(bench)
    except Exception as problem:
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}"
    # Also after an error: nothing of this part's may stay on the card.
    bench.release()
    seconds = time.monotonic() - started
    is_failed = bool(error) or any(row.is_failure for row in rows)
    bench.say(f"{part.name}: {seconds:.1f} s" + (", FAILED" if is_failed else ""))
    return {
        "seconds": round(seconds, 1),
        "is_failed": is_failed,
        "error": error,
        "rows": [
            dataclasses.asdict(row)
            | {"goals": [{"goal": str(goal), "is_met": goal.is_met(row.figures)} for goal in row.goals]}
            for row in rows
        ],
    }


def table(name: str, result: dict[str, Any]) -> str:
    """A part as Markdown: a row a way, a column a figure, and which goals were met."""
    rows = result["rows"]
    figures = list(dict.fromkeys(figure for row in rows for figure in row["figures"]))
    lines = [f"\n## {name} ({result['seconds']} s)\n"]
    if result["error"]:
        lines.append(f"FAILED: {result['error']}\n")
    if not rows:
        return "\n".join(lines)
    lines.append("| " + " | ".join(["case", "way", *figures, "goals", "note"]) + " |")
    lines.append("|" + " --- |" * 2 + " ---: |" * len(figures) + " --- |" * 2)
    for row in rows:
        values = [_number(row["figures"].get(figure)) for figure in figures]
        goals = ", ".join(f"{one['goal']} {'met' if one['is_met'] else 'MISSED'}" for one in row["goals"])
        lines.append("| " + " | ".join([row["case"], row["way"], *values, goals, row["problem"]]) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def warm_up(parts: list[Part], arguments: argparse.Namespace) -> dict[str, Any]:
    """Compile what the parts will launch, in many processes that share Triton's cache: one alone would take minutes."""
    if not any(part.warm for part in parts):
        return {"seconds": 0.0, "failed": []}
    started = time.monotonic()
    count = max(1, min(MAX_WARMERS, len(os.sched_getaffinity(0)) - 2))
    command = [sys.executable, "-m", "benchmarks.gpu", "--peers", str(arguments.peers)]
    command += ["--only", *(part.name for part in parts)] + (["--quick"] if arguments.quick else [])
    processes = [
        subprocess.Popen(
            [*command, "--warm", f"{shard}/{count}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for shard in range(count)
    ]
    failed = []
    for shard, process in enumerate(processes):
        try:
            _, errors = process.communicate(timeout=max(1.0, started + WARM_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            errors += f"stopped after {WARM_S} s"
        if process.returncode:
            # What was not compiled here is compiled when it is first launched, before it is timed.
            failed.append(f"{shard}/{count}: {errors.strip().splitlines()[-1] if errors.strip() else 'no message'}")
    seconds = time.monotonic() - started
    print(f"compiling in {count} processes: {seconds:.1f} s, {len(failed)} failed", flush=True)
    return {"seconds": round(seconds, 1), "failed": failed}


def parse(arguments: list[str]) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write everything as JSON, for benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--peers", type=Path, default=PEERS, help="where peers' kernels are; see gpu_peers.py")
    parser.add_argument("--check-only", action="store_true", help="check the answers and time nothing")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, with --check-only")
    parser.add_argument("--no-warm", action="store_true", help="compile as launches come, in this process")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def why_not(arguments: argparse.Namespace) -> str:
    """Why these arguments cannot run on this machine; empty if they can."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if arguments.tiny:
        if not arguments.check_only:
            return "--tiny times nothing: give --check-only with it"
        return "" if is_interpreted else "--tiny runs in Triton's interpreter: set TRITON_INTERPRET=1"
    if is_interpreted:
        return "TRITON_INTERPRET is set: kernels would be interpreted; unset it, or give --check-only --tiny"
    return "" if torch.cuda.is_available() else "there is no CUDA device here; --check-only --tiny needs none"


def main() -> int:
    arguments = parse(sys.argv[1:])
    problem = why_not(arguments)
    if problem:
        print(f"benchmarks.gpu: {problem}", file=sys.stderr)
        return 2
    ends_at = time.monotonic() + TOTAL_S
    bench = Bench(
        device=torch.device("cpu" if arguments.tiny else "cuda"),
        is_tiny=arguments.tiny,
        is_quick=arguments.quick,
        is_timed=not arguments.check_only and not arguments.warm,
        is_warming=bool(arguments.warm),
        peers=arguments.peers,
    )
    parts = [part for part in PARTS if part.name in arguments.only or part is PARTS[0]]
    torch.manual_seed(0)
    with torch.inference_mode():
        if arguments.warm:
            shard, num_shards = (int(number) for number in arguments.warm.split("/"))
            for part in parts:
                if part.warm is not None:
                    part.warm(bench, shard, num_shards)
            return 0
        machine = describe()
        print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
        warmed = warm_up(parts, arguments) if bench.is_timed and not arguments.no_warm else None
        results = {part.name: run_part(part, bench, ends_at) for part in parts}
    for name, result in results.items():
        print(table(name, result))
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "machine": machine,
        "model": dataclasses.asdict(TINY if bench.is_tiny else LLAMA_8B),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "method": "median of CUDA graph replays in turns, L2 flushed by reading before each; see gpu_bench.py",
        "warm_up": warmed,
        "parts": results,
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(result["is_failed"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
