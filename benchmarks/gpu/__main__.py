"""Measures loramux's kernels and its whole engine on one GPU, after checking their answers.

Run it from the repository root: `PYTHONPATH=.src python -m benchmarks.gpu --out FILE.json`. It needs torch >= 2.11,
triton >= 3.6, numba, numpy, safetensors and msgspec. It finishes within nine minutes, writes each row to one JSON file
as soon as it is measured, and prints one Markdown table per part. With `--only`, the rows of the selected parts are
added to the file, and a single part gets all of that time. Without a GPU, `TRITON_INTERPRET=1 ... --check-only --tiny`
checks the answers on a small model, and `--dry-run` lists the memory and time that each case needs on a card. The exit
code is 1 if a part failed, gave a wrong answer, was cut short or would not fit, and 2 if the benchmark cannot run on
this machine. `gpu/README.md` describes the parts and their goals.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.gpu.bench import MAX_WARMERS, Bench, Row, sentence_of
from benchmarks.gpu.cards import PLANNED
from benchmarks.gpu.dry_run import Limits, dry_run
from benchmarks.gpu.machine import describe
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.report import store, stored, table
from benchmarks.gpu.table_step import META
from benchmarks.machine import out_file, shown_command

PEERS = Path(__file__).parents[1] / "scratch" / "peers"
APART = " and ".join(part.name for part in PARTS if part.is_apart)
TOTAL_S = 460
WARM_S = 80
NO_PDL = "launches do not overlap: this GPU, its driver or this Triton has no programmatic dependent launch"


def run_part(
    part: Part, bench: Bench, deadline: float, keep: Callable[[dict[str, Any]], None] = lambda result: None
) -> dict[str, Any]:
    """Run one part, and return its result.

    `keep` receives each partial result, in case the run is killed. No case starts after `deadline`, a time on the
    monotonic clock. An exception becomes the part's error, and the run continues.
    """
    started = time.monotonic()
    bench.deadline = deadline if bench.is_timed and not bench.is_full else float("inf")
    rows: list[Row] = []
    error = ""
    try:
        for row in part.run(bench):
            rows.append(row)
            keep(_result(part, bench, rows, time.monotonic() - started, "not finished"))
    except Exception as problem:
        traceback.print_exc()
        error = sentence_of(problem)
    # Free the part's memory on the card even after an error.
    with contextlib.suppress(RuntimeError):
        bench.drop()
    result = _result(part, bench, rows, time.monotonic() - started, error)
    bench.say(f"{part.name}: {result['seconds']} s" + (", FAILED" if result["is_failed"] else ""))
    return result


def _result(part: Part, bench: Bench, rows: list[Row], seconds: float, error: str) -> dict[str, Any]:
    is_failed = bool(error) or any(row.is_failure for row in rows)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shown_command(),
        "seconds": round(seconds, 1),
        "is_failed": is_failed,
        "error": error,
        "model": dataclasses.asdict(part.model(bench)),
        "dtype": str(bench.dtype).removeprefix("torch."),
        # The rows' floors are computed from the ceilings.
        "ceilings": None if bench.ceilings is None else dataclasses.asdict(bench.ceilings),
        "rows": [
            dataclasses.asdict(row)
            # JSON cannot represent infinity or NaN.
            | {"figures": {name: value if math.isfinite(value) else None for name, value in row.figures.items()}}
            | {"goals": [{"goal": str(goal), "is_met": goal.is_met(row.figures)} for goal in row.goals]}
            for row in rows
        ],
    }


def restart_process(left: list[Part], arguments: argparse.Namespace, seconds: float) -> NoReturn:
    """Replace this process, which has lost its device, with a new one that runs the remaining parts."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--peers", str(arguments.peers), "--no-warm", "--has-failed"]
    command += ["--seconds", str(round(seconds)), "--only", *(part.name for part in left)]
    command += [flag for flag in ("--quick", "--full", "--check-only") if getattr(arguments, as_name(flag))]
    command += ["--out", str(arguments.out)] if arguments.out else []
    sys.stdout.flush()
    # The driver keeps the card's memory allocated while any of its files is open.
    os.closerange(3, 1 << 16)
    os.execv(sys.executable, command)


def as_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def warm_up(parts: list[Part], arguments: argparse.Namespace) -> dict[str, Any]:
    """Compile all parts' kernels in parallel processes that share Triton's cache. One process would take minutes."""
    if not any(part.warm for part in parts):
        return {"seconds": 0.0, "failed": []}
    started = time.monotonic()
    count = max(1, min(MAX_WARMERS, len(os.sched_getaffinity(0)) - 2))
    command = [sys.executable, "-m", "benchmarks.gpu", "--peers", str(arguments.peers)]
    command += ["--only", *(part.name for part in parts)]
    command += [flag for flag in ("--quick", "--full") if getattr(arguments, as_name(flag))]
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
            # Kernels that this process did not compile are compiled on their first launch, before timing starts.
            failed.append(f"{shard}/{count}: {errors.strip().splitlines()[-1] if errors.strip() else 'no message'}")
    seconds = time.monotonic() - started
    print(f"compiling in {count} processes: {seconds:.1f} s, {len(failed)} failed", flush=True)
    return {"seconds": round(seconds, 1), "failed": failed}


def parse(arguments: list[str]) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=out_file,
        help="write JSON to this file and keep its other parts, which must be from the same commit, card and versions",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quick", action="store_true", help="the most important cases only")
    amount.add_argument("--full", action="store_true", help="all cases, without a time limit")
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_S, help="start no case after this many seconds (%(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="PART", help=f"{', '.join(names)}; {APART} run only if named"
    )
    parser.add_argument("--peers", type=Path, default=PEERS, help="directory of the peers' kernels; see gpu/peers.py")
    parser.add_argument("--check-only", action="store_true", help="check the answers without timing")
    parser.add_argument("--tiny", action="store_true", help="use a small model on the CPU; requires --check-only")
    parser.add_argument("--dry-run", action="store_true", help="list what each case needs on a card, without a GPU")
    parser.add_argument("--card", choices=PLANNED, default="h200", help="card for --dry-run (%(default)s)")
    parser.add_argument("--no-warm", action="store_true", help="compile in this process, on first launch")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--has-failed", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    # A dry run without names lists every part.
    parsed.only = parsed.only or [part.name for part in PARTS if parsed.dry_run or not part.is_apart]
    return parsed


def why_not(arguments: argparse.Namespace) -> str:
    """Return why this machine cannot run the benchmark with these arguments, or an empty string if it can."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if arguments.tiny:
        if not arguments.check_only:
            return "--tiny does not measure times: add --check-only"
        return "" if is_interpreted else "--tiny runs in Triton's interpreter: set TRITON_INTERPRET=1"
    if is_interpreted:
        return "TRITON_INTERPRET is set, so kernels would be interpreted: unset it, or use --check-only --tiny"
    return "" if torch.cuda.is_available() else "there is no CUDA device here; --check-only --tiny needs none"


def main() -> int:
    arguments = parse(sys.argv[1:])
    if arguments.dry_run:
        return list_needs(arguments)
    problem = why_not(arguments)
    if problem:
        print(f"benchmarks.gpu: {problem}", file=sys.stderr)
        return 2
    ends_at = time.monotonic() + arguments.seconds
    bench, parts = _bench_of(arguments, torch.device("cpu" if arguments.tiny else "cuda")), _parts_of(arguments)
    torch.manual_seed(0)
    if arguments.warm:
        return run_warmer(bench, parts, arguments.warm)
    machine = describe()
    try:
        results = stored(arguments.out, machine)
    except (ValueError, KeyError) as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    if not bench.has_pdl:
        print(NO_PDL, flush=True)
    warmed = warm_up(parts, arguments) if bench.is_timed and not arguments.no_warm else None
    has_failed = arguments.has_failed
    is_alone = len(arguments.only) == 1

    def keep(part: Part, result: dict[str, Any]) -> None:
        results[part.name] = result | {"warm_up": warmed}
        if arguments.out:
            store(arguments.out, machine, results)

    for number, part in enumerate(parts):
        deadline = ends_at if is_alone else min(ends_at, time.monotonic() + part.budget_s)
        with torch.inference_mode():
            result = run_part(part, bench, deadline, partial(keep, part))
        keep(part, result)
        has_failed |= result["is_failed"]
        print(table(part.name, result), flush=True)
        left = parts[number + 1 :]
        if result["error"] and left and bench.is_broken():
            restart_process(left, arguments, ends_at - time.monotonic())
    return 1 if has_failed else 0


def _bench_of(arguments: argparse.Namespace, device: torch.device) -> Bench:
    return Bench(
        device=device,
        is_tiny=arguments.tiny,
        is_quick=arguments.quick,
        is_full=arguments.full,
        is_timed=not arguments.check_only and not arguments.warm,
        is_warming=bool(arguments.warm),
        peers=arguments.peers,
    )


def _parts_of(arguments: argparse.Namespace) -> list[Part]:
    return [part for part in PARTS if part.name in arguments.only or part is PARTS[0]]


def list_needs(arguments: argparse.Namespace) -> int:
    """Perform the dry run, and return 1 if a part exceeds the card's memory or the part's time limit."""
    bench, planned = _bench_of(arguments, META), PLANNED[arguments.card]
    bench = dataclasses.replace(bench, is_tiny=False, is_timed=True, is_warming=False, planned=planned)
    return dry_run(bench, _parts_of(arguments), Limits(total_s=arguments.seconds, warm_s=WARM_S), arguments.out)


def run_warmer(bench: Bench, parts: list[Part], share: str) -> int:
    """Compile one share of the kernels in this process. `share` is "SHARD/NUM_SHARDS"."""
    shard, num_shards = (int(number) for number in share.split("/"))
    has_failed = False
    for part in parts:
        if part.warm is None:
            continue
        try:
            with torch.inference_mode():
                part.warm(bench, shard, num_shards)
        except Exception:
            # Compile the other parts' kernels anyway.
            traceback.print_exc()
            has_failed = True
        bench.drop()
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
