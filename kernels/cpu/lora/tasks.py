"""Division of work among threads in the CPU's LoRA kernels.

`shrink.py` and `expand.py` read adapters directly from pages. Work is divided into tasks. Each thread processes a
contiguous share of the total cost over all segments and modules, so threads stay balanced even if ranks and segment
lengths differ. If whole segments can be divided nearly evenly, `low_rank.py` assigns whole segments to threads instead.
A task reads its part of an adapter once for all rows of its segment. In decode, a segment usually has one row and
memory is the bottleneck, so each thread prefetches its next data while it computes, across ranks, modules and adapters.
"""

from __future__ import annotations

from typing import Any

from loramux.kernels.cpu.instructions.compiled import helper
from loramux.kernels.cpu.instructions.vectors import PANEL, WIDTH

IS_WIDE = WIDTH == PANEL
"""True if registers have room for more sums: AVX-512 has 32 registers of 16 lanes, while AVX2 has 16 of 8 lanes."""

RANKS = 4
"""Number of ranks computed in one pass over the activations."""

READ_COST = 3
"""Cost of fetching and widening adapter weights, relative to multiplying one row by them."""


@helper
def share_of(cursor: int, cost: int, count: int, low: int, high: int) -> Any:
    """Among `count` tasks, the range `[first, last)` of the tasks that begin at a cumulative cost in `[low, high)`.

    Task `k` begins at `cursor + k * cost`.
    """
    first = min(count, max(0, (low - cursor + cost - 1) // cost))
    last = min(count, max(0, (high - cursor + cost - 1) // cost))
    return first, last
