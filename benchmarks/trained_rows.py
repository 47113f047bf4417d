"""Measures the memory that a trained head takes, and the time that it takes on a CPU relative to the base's head.

The head has 128,256 rows, like the head of Llama 3. It is narrow enough for a small machine, which hardly affects the
ratio, because both heads read memory in proportion to their width. The base's head computes the logits of one step's
rows. Then the logits of trained tokens are replaced. Both are timed in turn, and the fastest times are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.answers import CheckError
from benchmarks.harness import begin, new_parser, reports_failure
from benchmarks.tables import table
from loramux.kernels.cpu.instructions.threads import set_num_threads
from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.cpu.linear.linear import PackedLinear
from loramux.kernels.layout import LinearShape, PageGeometry, RowCounts, adapter_layout, row_layout
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import AdapterTables, LoraCall, ModuleGroup, PoolViews

FEW = 64
"""Number of trained tokens of an adapter that adds a few markers."""

OTHER_BYTES = 512 << 20
"""Number of bytes that replace the contents of the caches before each measurement. This exceeds the caches' size."""

TOLERANCE = 0.02
"""Largest accepted error, relative to the largest logit. The base's head may round its input to bfloat16."""


class HeadBench:
    """A base's head in bfloat16, and one adapter in the pages of a pool for each number of trained rows in `counts`."""

    def __init__(self, vocab_size: int, hidden_size: int, counts: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(vocab_size, hidden_size, generator=generator).bfloat16()
        self.base = PackedLinear(self.weight)
        geometry = PageGeometry(4, 4, 64, 2, 2)
        modules = [LinearShape("embedding", vocab_size, hidden_size, is_embedding=True)]
        modules.append(LinearShape("head", hidden_size, vocab_size))
        no_ranks = np.zeros((4, 0), np.int32)
        layouts = [adapter_layout(geometry, (), no_ranks, modules, rows=RowCounts((0, count))) for count in counts]
        self.num_pages = [layout.num_pages for layout in layouts]
        self.page_bytes = geometry.total_page_bytes
        raw = torch.zeros(sum(self.num_pages), 4, geometry.page_bytes, dtype=torch.uint8)
        self.kernels = CpuKernels(PoolViews(raw, raw.view(torch.bfloat16), raw.view(torch.bfloat16), geometry)).outer
        page_table = torch.zeros(len(counts), max(self.num_pages), dtype=torch.int32)
        padded_len = row_layout(hidden_size, geometry.flat.adapter_elements).padded_len
        flat, words, first = raw.view(torch.bfloat16).view(-1), raw.view(torch.int32).view(-1), 0
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for slot, (layout, count) in enumerate(zip(layouts, counts, strict=True)):
            page_table[slot, : layout.num_pages] = torch.arange(first, first + layout.num_pages)
            ids = torch.arange(count) if count == vocab_size else torch.arange(count) * (vocab_size // count)
            rows = torch.randn(count, hidden_size, generator=generator).bfloat16()
            begin, first_id = layout.row_offsets[1, :2].tolist()
            start = first * self.page_bytes
            at = start // 2 + begin
            flat[at : at + count * padded_len].view(count, padded_len)[:, :hidden_size] = rows
            if count < vocab_size:
                words[start // 4 + first_id : start // 4 + first_id + count] = ids
            self.rows.append((ids, rows))
            first += layout.num_pages
        ranks = torch.tensor([[[0, count]] for count in counts], dtype=torch.int32)
        off = torch.from_numpy(np.stack([layout.row_offsets for layout in layouts]))[:, None]
        self._tables = AdapterTables(page_table, off, ranks, torch.ones(ranks.shape))
        self._group = ModuleGroup((1,), hidden_size, (vocab_size,), (0,))
        self._counts = counts

    def logits(self, x: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """Return the logits of rows `x`. `slots` contains the slot of each row's adapter."""
        y = self.base(x)
        self.replace(x, slots, y)
        return y

    def replace(self, x: torch.Tensor, slots: Sequence[int], y: torch.Tensor) -> None:
        """Replace the logits of trained rows in `y`."""
        max_rows = max(self._counts[slot] for slot in slots)
        segments = build_segments(np.array(slots, np.int32), self.kernels.segment_rows, max_rows)
        self.kernels.replace_columns(x, LoraCall(0, self._group, self._tables, segments), y)

    def check(self, x: torch.Tensor, slots: Sequence[int]) -> float:
        """Compare with float32 products and return the largest error relative to the largest logit."""
        y, worst = self.logits(x, slots), 0.0
        for row, slot in enumerate(slots):
            expected = x[row] @ self.weight.float().T
            ids, rows = self.rows[slot]
            expected[ids] = rows.float() @ x[row]
            worst = max(worst, float((y[row] - expected).abs().max() / expected.abs().max()))
        if worst > TOLERANCE:
            raise CheckError(f"a logit is wrong by {worst:.1e} of the largest")
        return worst


def measure(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the shortest time of each method, in seconds. The methods alternate and start with cold caches."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    others = torch.zeros(OTHER_BYTES, dtype=torch.uint8)
    for _ in range(rounds):
        for name, way in ways.items():
            # Evict the weights from the caches, as the rest of the model does in a real step.
            others.add_(1)
            begin = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - begin)
    return {name: min(taken) for name, taken in times.items()}


def measure_all(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    whole = arguments.vocabulary
    bench = HeadBench(whole, arguments.hidden, [whole, whole, whole, whole, FEW])
    cases: list[dict[str, Any]] = []
    worst = 0.0
    for num_rows in arguments.rows:
        x = torch.randn(num_rows, arguments.hidden, generator=torch.Generator().manual_seed(num_rows))
        wanted = {
            "one whole head": [0] * num_rows,
            "four whole heads": [row % 4 for row in range(num_rows)],
            f"{FEW} trained tokens": [4] * num_rows,
        }
        if num_rows < 4:
            del wanted["four whole heads"]
        worst = max(worst, *(bench.check(x, slots) for slots in wanted.values()))
        y = bench.base(x)
        ways = {name: partial(bench.replace, x, slots, y) for name, slots in wanted.items()}
        seconds = measure({"base": partial(bench.base, x), **ways}, arguments.rounds)
        relative = {name: seconds[name] / seconds["base"] for name in ways}
        cases.append({"rows": num_rows, "base_ms": 1000 * seconds["base"], **relative})
    print_cases(cases, console)
    pages = {"whole head": bench.num_pages[0], f"{FEW} trained tokens": bench.num_pages[4]}
    sizes = {name: count * bench.page_bytes for name, count in pages.items()}
    console.print(", ".join(f"{name}: {size / 1e6:.2f} MB of pages" for name, size in sizes.items()))
    return {"check": {"largest_error": worst}, "bytes": sizes, "cases": cases}


def print_cases(cases: list[dict[str, Any]], console: Console) -> None:
    ways = [name for name in cases[-1] if name not in ("rows", "base_ms")]
    rows = [
        (str(case["rows"]), f"{case['base_ms']:.2f}", *(f"{case[name]:.4f}" if name in case else "" for name in ways))
        for case in cases
    ]
    headings = ("rows", "base, ms", *(f"{name}, relative to the base" for name in ways))
    console.print(table("replacing the logits of trained rows", headings, rows))


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("trained_rows", __doc__)
    parser.add_argument("--vocabulary", type=int, default=128_256, help="number of rows of the head")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the head")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="rows per step")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    run = begin(parser.parse_args(argv))
    set_num_threads(run.arguments.threads)
    figures = measure_all(run.arguments, run.console)
    workload = {name: getattr(run.arguments, name) for name in ("vocabulary", "hidden", "rounds", "threads")}
    run.write({"workload": workload, **figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
