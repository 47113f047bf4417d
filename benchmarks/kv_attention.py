"""Measures decode attention on a CPU with K and V in int8, compared with bfloat16.

A step of one token for each sequence computes the attention of several layers. Both formats are timed in turn, on one
thread, in processor time, and the fastest times are compared. Beforehand, both results are compared with the reference
kernels over the same pages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.answers import CheckError
from benchmarks.harness import begin, new_parser, reports_failure
from benchmarks.tables import table
from loramux.engine.pages.pool_memory import allocate_pool
from loramux.kernels.cpu.instructions.threads import set_num_threads
from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.layout import PageGeometry
from loramux.kernels.reference.kernels import ReferenceKernels
from loramux.kernels.tables import AttentionBatch, AttentionSpec, PoolViews

SHAPES = {
    "SmolLM2-135M": (9, 3, 64, 30),
    "Llama-3.2-1B": (32, 8, 64, 16),
    "Llama-3.1-8B, 8 layers": (32, 8, 128, 8),
}
"""Numbers of query heads and KV heads, head_dim, and number of layers."""

FORMATS = {"bfloat16": torch.bfloat16, "int8": torch.int8}
PAGE_TOKENS = 16
TOLERANCE = 1e-4


def pool_of(num_pages: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> PoolViews:
    span = head_dim if dtype is torch.int8 else 0
    geometry = PageGeometry(num_layers, num_kv_heads, head_dim, dtype.itemsize, 2, elements_per_scale=span)
    size = num_pages * geometry.pool_page_bytes
    return allocate_pool(geometry, size, dtype, torch.bfloat16, torch.device("cpu"))


class Decode:
    """Sequences of `context` tokens in shuffled pages, with a kernel for each format of K and V."""

    def __init__(self, shape: tuple[int, int, int, int], num_rows: int, context: int) -> None:
        num_heads, num_kv_heads, head_dim, self.num_layers = shape
        generator = torch.Generator().manual_seed(0)
        pages_each = -(-context // PAGE_TOKENS)
        num_pages = num_rows * pages_each
        pages = torch.randperm(num_pages, generator=generator).view(num_rows, pages_each)
        slots = (pages[:, :, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten(1)[:, :context]
        whole = AttentionBatch(
            cu_q=torch.arange(0, num_rows * context + 1, context, dtype=torch.int32),
            seq_lens=torch.full((num_rows,), context, dtype=torch.int32),
            pages=pages.flatten().int(),
            page_starts=torch.arange(0, num_pages, pages_each, dtype=torch.int32),
            kv_slots=slots.flatten(),
            max_q=context,
        )
        cu_q = torch.arange(num_rows + 1, dtype=torch.int32)
        self.batch = replace(whole, cu_q=cu_q, kv_slots=slots[:, -1].contiguous(), max_q=1)
        self.spec = AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
        self.q = torch.randn(num_rows, num_heads, head_dim, generator=generator)
        self.pools = {
            name: pool_of(num_pages, self.num_layers, num_kv_heads, head_dim, dtype) for name, dtype in FORMATS.items()
        }
        self.kernels = {name: CpuKernels(pool) for name, pool in self.pools.items()}
        k, v = torch.randn(2, num_rows * context, num_kv_heads, head_dim, generator=generator)
        for kernels in self.kernels.values():
            for layer in range(self.num_layers):
                kernels.kv_write(k, v, layer, whole)

    def run(self, name: str) -> torch.Tensor:
        out = torch.empty_like(self.q)
        for layer in range(self.num_layers):
            self.kernels[name].paged_attention(self.q, layer, self.batch, self.spec, out)
        return out

    def check(self) -> dict[str, float]:
        """The largest error of each format in the last layer."""
        errors = {}
        for name, pool in self.pools.items():
            expected = torch.empty_like(self.q)
            ReferenceKernels(pool).paged_attention(self.q, self.num_layers - 1, self.batch, self.spec, expected)
            errors[name] = float((self.run(name) - expected).abs().max())
            if errors[name] > TOLERANCE:
                raise CheckError(f"attention with {name} is wrong by {errors[name]:.1e}")
        return errors

    def measure(self, num_rounds: int) -> dict[str, float]:
        """Shortest processor time of a step in each format, in seconds."""
        seconds = dict.fromkeys(FORMATS, float("inf"))
        for number in range(num_rounds):
            for name in list(FORMATS)[:: 1 if number % 2 else -1]:
                begun = time.thread_time()
                self.run(name)
                seconds[name] = min(seconds[name], time.thread_time() - begun)
        return seconds


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(_parse(argv))
    given = run.arguments
    set_num_threads(1)
    cases: list[dict[str, Any]] = []
    for name in given.shape:
        for context in given.context:
            decode = Decode(SHAPES[name], given.rows, context)
            errors, seconds = decode.check(), decode.measure(given.rounds)
            milliseconds = {f"{kind}_ms": round(1e3 * value, 3) for kind, value in seconds.items()}
            ratio = round(seconds["int8"] / seconds["bfloat16"], 3)
            cases.append({"shape": name, "rows": given.rows, "context": context, **milliseconds, "ratio": ratio})
            cases[-1]["error"] = max(errors.values())
    shown = [[str(value) for value in case.values()] for case in cases]
    run.console.print(table("Decode attention", list(cases[0]), shown))
    run.write({"cases": cases})
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    # Processor time on one thread can be compared on a busy machine.
    parser = new_parser("kv_attention", __doc__, is_timed=False)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--context", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
