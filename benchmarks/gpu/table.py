"""Counts the launches, bytes and programs of whole steps without a GPU: `python -m benchmarks.gpu.table`.

A step of the engine runs over meta tensors, and its kernels are compiled for the card. The table lists the step's
launches, the bytes that they move, the resources that each program takes on a multiprocessor, and the shortest possible
time for these bytes and launches. Nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton

from benchmarks.gpu.cards import CARDS, Card
from benchmarks.gpu.code_formats import FORMATS
from benchmarks.gpu.model import (
    LLAMA_7B,
    LLAMA_8B,
    LLAMA_70B,
    QWEN3_5_9B,
    QWEN3_30B_A3B,
    TINY,
    TINY_EXPERTS,
    TINY_HYBRID,
    Model,
)
from benchmarks.gpu.random_models import ALL_MODULES, HYBRID_MODULES
from benchmarks.gpu.table_bytes import Bytes, bytes_of, once, shape_text, shared_bytes
from benchmarks.gpu.table_step import RecordedStep, TableCase, TorchLaunch, TritonLaunch, record_step
from benchmarks.machine import out_file
from loramux.engine.loop.config import KV_DTYPES

MODELS = {
    "llama-3.1-8b": LLAMA_8B,
    "llama-3.1-70b": LLAMA_70B,
    "llama-7b": LLAMA_7B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3.5-9b": QWEN3_5_9B,
    "tiny": TINY,
    "tiny-experts": TINY_EXPERTS,
    "tiny-hybrid": TINY_HYBRID,
}
MAX_ADAPTERS = 16
CONTEXT = 1024
Q_AND_V = (0, 2)
"""PEFT's default target modules."""


@dataclass(frozen=True, slots=True)
class Program:
    """Resources of one program of a compiled kernel. `registers` and `spilled_bytes` (local memory) are per thread."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int
    resident: int


@dataclass(frozen=True, slots=True)
class TableRow:
    """All launches of a kernel with the same grid in a step, with their total bytes."""

    kernel: str
    work: str
    launches: int
    least_mb: float
    asked_mb: float
    floor_us: float
    program: Program | None


@dataclass(frozen=True, slots=True)
class SharedLoads:
    """The bytes of a step's products of experts: as in `Bytes`, and if programs that run at the same time share loads.

    `in_flight_mb` is the shared memory of these programs, where their loads arrive.
    """

    least_mb: float
    asked_mb: float
    shared_mb: float
    in_flight_mb: float


@dataclass(frozen=True, slots=True)
class StepTable:
    case: str
    launches: int
    least_mb: float
    asked_mb: float
    floor_us: float
    rows: tuple[TableRow, ...]
    experts: SharedLoads | None = None


def cases(model: Model) -> Iterator[TableCase]:
    if model.experts is not None:
        yield from _expert_cases(model, model.experts.num_experts)
        return
    if model.hybrid is not None:
        yield from _hybrid_cases()
        return
    for batch in (1, 16, 64, 256):
        count = min(batch, MAX_ADAPTERS)
        adapters = f"{count} adapter{'s' if count > 1 else ''}, rank 16"
        decode = f"decode, batch {batch}, context {CONTEXT}"
        base = TableCase(f"{decode}: base only", batch, CONTEXT - 1)
        yield base
        adapted = replace(base, name=f"{decode}: {adapters}", num_adapters=count, modules=ALL_MODULES)
        yield adapted
        if batch == 64:
            yield replace(adapted, name=f"{adapted.name}, fused", fuses=True)
            each = replace(adapted, name=f"{decode}: 64 adapters, rank 16", num_adapters=64)
            yield each
            yield replace(each, name=f"{each.name}, fused", fuses=True)
            yield replace(base, name=f"{decode}: {adapters}, q and v alone", num_adapters=count, modules=Q_AND_V)
    prefill = TableCase("prefill, 16 prompts of 128: base only", 16, 0, 128)
    yield prefill
    yield replace(
        prefill, name="prefill, 16 prompts of 128: 16 adapters, rank 16", num_adapters=16, modules=ALL_MODULES
    )
    yield TableCase("prefill, last 2,048 of 8,192: base only", 1, 6144, 2048)


def _hybrid_cases() -> Iterator[TableCase]:
    """Yield cases without adapters, and with adapters on all linear layers, among them those of the delta rule."""
    for batch, num_queries in ((1, 1), (64, 1), (1, 2048), (16, 128)):
        count = min(batch, MAX_ADAPTERS)
        name = f"decode, batch {batch}, context {CONTEXT}" if num_queries == 1 else f"prefill, {batch} x {num_queries}"
        base = TableCase(f"{name}: base only", batch, CONTEXT - 1 if num_queries == 1 else 0, num_queries)
        yield base
        name = f"{name}: {count} adapter{'s' if count > 1 else ''}, rank 16"
        yield replace(base, name=name, num_adapters=count, modules=HYBRID_MODULES)


def _expert_cases(model: Model, num_experts: int) -> Iterator[TableCase]:
    """Yield cases without adapters, with adapters on attention, and with adapters on attention and all experts.

    Gate and up share an A, as PEFT stacks them.
    """
    # The modules are q, k, v and o, then the router, then gate/up, gate, up and down of each expert.
    attention, first = (0, 1, 2, 3), 5
    experts = tuple(first + 4 * expert + linear for expert in range(num_experts) for linear in (0, 3))
    shapes = [(1, 1), (16, 1), (64, 1), (256, 1), (16, 128)]
    for batch, num_queries in shapes:
        count = min(batch, MAX_ADAPTERS)
        adapters = f"{count} adapter{'s' if count > 1 else ''}, rank 16, attention"
        name = f"decode, batch {batch}, context {CONTEXT}" if num_queries == 1 else "prefill, 16 prompts of 128"
        base = TableCase(f"{name}: base only", batch, CONTEXT - 1 if num_queries == 1 else 0, num_queries)
        base = replace(base, experts=model.experts)
        yield base
        yield replace(base, name=f"{name}: {adapters}", num_adapters=count, modules=attention)
        yield replace(base, name=f"{name}: {adapters} and experts", num_adapters=count, modules=(*attention, *experts))


def table_of(step: RecordedStep, card: Card) -> StepTable:
    """A step's launches, grouped by kernel and grid, in order of first occurrence."""
    grouped: dict[tuple[Any, ...], list[TritonLaunch | TorchLaunch]] = {}
    for launch in step.launches:
        grouped.setdefault(_key(launch), []).append(launch)
    rows, total = [], once(0)
    for launches in grouped.values():
        moved = once(0)
        for launch in launches:
            moved += bytes_of(launch, step)
        total += moved
        first = launches[0]
        is_triton = isinstance(first, TritonLaunch)
        rows.append(
            TableRow(
                kernel=first.name,
                work="x".join(map(str, first.grid)) if isinstance(first, TritonLaunch) else shape_text(first),
                launches=len(launches),
                **_figures(moved, len(launches), card),
                program=program_of(first, card) if is_triton else None,
            )
        )
    count = len(step.launches)
    figures = _figures(total, count, card)
    return StepTable(case=step.case.name, launches=count, **figures, rows=tuple(rows), experts=_experts(step, card))


def _experts(step: RecordedStep, card: Card) -> SharedLoads | None:
    moved, shared, in_flight = once(0), 0.0, 0
    for launch in step.launches:
        if isinstance(launch, TritonLaunch) and launch.name == "_multiply":
            program = program_of(launch, card)
            num_resident = program.resident * card.multiprocessors
            moved += bytes_of(launch, step)
            shared += shared_bytes(launch, step, num_resident)
            in_flight = max(in_flight, num_resident * program.shared_bytes)
    if not shared:
        return None
    return SharedLoads(*(round(one / 1e6, 3) for one in (moved.least, moved.asked, shared, in_flight)))


def _key(launch: TritonLaunch | TorchLaunch) -> tuple[Any, ...]:
    if isinstance(launch, TorchLaunch):
        return (launch.name, shape_text(launch))
    return (launch.name, launch.grid, launch.program.hash)


def _figures(moved: Bytes, launches: int, card: Card) -> dict[str, float]:
    return {
        "least_mb": round(moved.least / 1e6, 3),
        "asked_mb": round(moved.asked / 1e6, 3),
        "floor_us": round((moved.least / card.bandwidth + launches * card.node_s) * 1e6, 1),
    }


def program_of(launch: TritonLaunch, card: Card) -> Program:
    """A compiled kernel's resources, from its binary and metadata."""
    compiled = launch.program
    registers, spilled = _usage(compiled.asm["cubin"])
    metadata = compiled.metadata
    return Program(
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=metadata.shared,
        num_warps=metadata.num_warps,
        resident=card.resident_programs(registers, metadata.shared, metadata.num_warps),
    )


@lru_cache(maxsize=4096)
def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory for spilled values."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        int(re.search(rf"\b{name}:(\d+)", told).group(1))
        for name in ("REG", "STACK", "LOCAL")  # type: ignore[union-attr]
    )
    return registers, stack + local


def markdown(tables: list[StepTable], model: str, card: Card) -> str:
    lines = [
        f"# {model} on {card.name}, counted",
        "",
        f"Counted from shapes and compiled programs by `benchmarks/gpu/table.py`, not measured. A floor is the time "
        f"for the least bytes at {card.bandwidth / 1e12:g} TB/s plus {card.node_s * 1e6:g} us per launch. It excludes "
        "arithmetic, which limits the linear layers of a prefill. `least` counts each byte of a launch once; `asked` "
        "counts all loads and stores of its programs. `per SM` is the number of programs that fit on one "
        "multiprocessor.",
        "",
        "| step | launches | least MB | asked MB | floor us |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.case} | {one.launches} | {one.least_mb:,.1f} | {one.asked_mb:,.1f} | {one.floor_us:,.1f} |"
        for one in tables
    ]
    for one in tables:
        lines += [
            "",
            f"## {one.case}",
            "",
            "| kernel | grid or shapes | launches | least MB | asked MB | floor us | registers | spilled B | "
            "shared B | warps | per SM |",
            "|---|---|" + "---:|" * 9,
        ]
        for row in one.rows:
            program = row.program
            needs = "| | | | " if program is None else (
                f"{program.registers} | {program.spilled_bytes} | {program.shared_bytes} | {program.num_warps} | "
                f"{program.resident}"
            )  # fmt: skip
            lines.append(
                f"| {row.kernel} | {row.work} | {row.launches} | {row.least_mb:,.2f} | {row.asked_mb:,.2f} | "
                f"{row.floor_us:,.1f} | {needs} |"
            )
        if one.experts is not None:
            lines += [
                "",
                f"Products of experts: least {one.experts.least_mb:,.1f} MB, asked {one.experts.asked_mb:,.1f} MB. If "
                f"programs that run at the same time share their loads, {one.experts.shared_mb:,.1f} MB come from "
                f"memory. The loads in flight take up to {one.experts.in_flight_mb:,.1f} MB.",
            ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.table", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--card", choices=CARDS, default="h200")
    parser.add_argument("--weights", choices=FORMATS, help="format of the layers' weights (default: bfloat16)")
    parser.add_argument("--adapter-dtype", choices=["fp8"], help="format of the adapters (default: bfloat16)")
    parser.add_argument(
        "--kv-dtype", choices=KV_DTYPES, default="auto", help="format of K and V (default: auto, which is bfloat16)"
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="count the step of one of this many workers, with a launch for each exchange (default: 1)",
    )
    parser.add_argument("--node-us", type=float, help="microseconds that each launch adds to a graph")
    parser.add_argument(
        "--out", type=out_file, help="write JSON to this file, and the same tables as Markdown next to it"
    )
    arguments = parser.parse_args()
    card = CARDS[arguments.card]
    if arguments.node_us is not None:
        card = replace(card, node_s=arguments.node_us / 1e6)
    if triton.knobs.runtime.interpret:
        print("unset TRITON_INTERPRET: the interpreter does not compile kernels", file=sys.stderr)
        return 2
    tables = []
    form = None if arguments.weights is None else FORMATS[arguments.weights]
    for case in cases(MODELS[arguments.model]):
        formats = arguments.adapter_dtype, arguments.kv_dtype
        step = record_step(MODELS[arguments.model], card, case, form, *formats, arguments.tensor_parallel_size)
        table = table_of(step, card)
        print(f"{table.case}: {table.launches} launches, floor {table.floor_us:,.0f} us", file=sys.stderr, flush=True)
        tables.append(table)
    model = arguments.model if arguments.weights is None else f"{arguments.model} in {arguments.weights}"
    if arguments.adapter_dtype is not None:
        model += f", adapters in {arguments.adapter_dtype}"
    if arguments.kv_dtype != "auto":
        model += f", K and V in {arguments.kv_dtype}"
    if arguments.tensor_parallel_size > 1:
        model += f", one of {arguments.tensor_parallel_size} workers,"
    text = markdown(tables, model, card)
    print(text)
    if arguments.out is not None:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        document = {
            "model": arguments.model,
            "weights": arguments.weights or "bfloat16",
            "adapters": arguments.adapter_dtype or "bfloat16",
            "kv": "bfloat16" if arguments.kv_dtype == "auto" else arguments.kv_dtype,
            "tensor_parallel_size": arguments.tensor_parallel_size,
            "card": asdict(card),
            **versions,
            "steps": [asdict(one) for one in tables],
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
