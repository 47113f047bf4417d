"""Measures a server's memory with each format of weights, and compares it with the plan of `loramux doctor --plan`.

A server without adapters answers requests that fill its page pool. Then the proportional set sizes of its
processes are added up: each page of memory counts once, even if several processes map it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import SCRATCH, begin, exit_on_sigterm, new_parser, reports_failure
from benchmarks.peers.child_server import NO_DRAFTS
from benchmarks.peers.loramux_server import LoramuxServer, open_loramux
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.vocabulary import write_tokenizer
from benchmarks.peers.workload import BASE, Load, draw_work
from benchmarks.random_model import SHAPES, make_base
from benchmarks.tables import table
from loramux.admin.doctor.memory_plan import plan_memory

FORMATS = ("bfloat16", "int8", "int4")
TOLERANCE = 0.05
"""Goal: largest difference between the measured and the planned memory, relative to the plan."""

NUM_REQUESTS = 4
LOAD = Load(480, 16)


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(_parse(argv))
    arguments = run.arguments
    shape = SHAPES[arguments.size]
    files = ModelFiles(arguments.scratch.absolute() / f"{arguments.size}-no-adapters", shape, num_adapters=0, rank=1)
    make_base(shape, files.base)
    write_tokenizer(files.base, shape.vocab_size)
    pool = pool_bytes(files)
    plans = {plan.format: plan for plan in plan_memory(files.base, "cpu", pool)}
    rows: list[dict[str, Any]] = []
    for name in FORMATS:
        measured = measure(files, None if name == "bfloat16" else name, pool, arguments.threads)
        planned = plans[name].total
        print(f"{name}: {measured >> 20} MiB, planned {planned >> 20} MiB", flush=True)
        rows.append(
            {
                "format": name,
                "weights_bytes": plans[name].weights,
                "planned_bytes": planned,
                "measured_bytes": measured,
                "measured_over_planned": round(measured / planned, 4),
            }
        )
    shown = [
        (
            row["format"],
            *(f"{row[key] >> 20}" for key in ("planned_bytes", "measured_bytes")),
            f"{row['measured_over_planned']:.3f}",
        )
        for row in rows
    ]
    headings = ("format", "plan, MiB", "measured, MiB", "measured / plan")
    run.console.print(table(f"memory, goal within {TOLERANCE:.0%}", headings, shown))
    workload = {
        "model": arguments.size,
        "pool_bytes": pool,
        "requests": NUM_REQUESTS,
        "load": str(LOAD),
        "threads": arguments.threads,
        "speculate": NO_DRAFTS[1],
    }
    run.write({"workload": workload, "tolerance": TOLERANCE, "figures": rows})
    return 0 if all(abs(row["measured_over_planned"] - 1) <= TOLERANCE for row in rows) else 1


def pool_bytes(files: ModelFiles) -> int:
    """The size of a pool that the K and V of all requests fill exactly."""
    shape = files.shape
    token_bytes = 2 * 2 * shape.num_layers * shape.num_kv_heads * (shape.hidden_size // shape.num_heads)
    return NUM_REQUESTS * (LOAD.num_prompt + LOAD.num_output) * token_bytes


def measure(files: ModelFiles, quantization: str | None, pool: int, threads: int) -> int:
    """Memory of a server that has answered all requests, in bytes."""
    logs = files.directory / "logs"
    with open_loramux("bfloat16", threads, logs, files, False, str(pool), quantization) as running:
        assert isinstance(running, LoramuxServer)
        running.answer(draw_work(BASE, LOAD, NUM_REQUESTS, files.shape.vocab_size, "memory"), needs_token_ids=False)
        return sum(map(proportional_set_size, descendants(running.server.pid)))


def descendants(pid: int) -> list[int]:
    """The process and all of its descendants."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += descendants(int(child))
    return found


def proportional_set_size(pid: int) -> int:
    """Memory of a process in bytes. A page that n processes map counts as a share of 1/n."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("memory", __doc__, is_timed=False)
    add = parser.add_argument
    add("--size", choices=sorted(SHAPES), default="1b")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--scratch", type=Path, default=SCRATCH / "peers", help="directory for models")
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_on_sigterm()
    raise SystemExit(main())
