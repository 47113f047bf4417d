"""How the CPU's LoRA kernels cut their work.

`shrink.py` and `expand.py` read adapters straight from the pages. Work is cut into tasks whose costs are
counted over segments and modules, and each thread takes one contiguous share of the total, so ragged ranks and segments
stay balanced; `low_rank.py` has threads take whole segments instead where these are nearly alike. A task reads a
piece of adapter rows once for all rows of its segment. With one row a segment, which is what decoding is, memory sets
the pace: what a thread reads next is fetched while it computes, across ranks, modules and adapters.
"""

from __future__ import annotations

from typing import Any

from loramux.kernels.cpu.compiled import helper
from loramux.kernels.cpu.vectors import PANEL, WIDTH

IS_WIDE = WIDTH == PANEL
"""Whether there are registers for twice as many sums: AVX-512 has 32 of 16 lanes, AVX2 has 16 of 8."""

RANKS = 4
"""Ranks that one pass over the activations serves."""

READ_COST = 3
"""What fetching and widening a piece of adapter costs, in rows multiplied with it."""


@helper
def share_of(cursor: int, cost: int, count: int, low: int, high: int) -> Any:
    """Which of `count` tasks of `cost` each, laid out from `cursor` on, begin in `[low, high)`: `[first, last)`."""
    first = min(count, max(0, (low - cursor + cost - 1) // cost))
    last = min(count, max(0, (high - cursor + cost - 1) // cost))
    return first, last
