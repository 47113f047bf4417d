"""How the CPU's LoRA kernels divide their work.

`shrink.py` and `expand.py` read adapters straight from the pages. Work is divided into tasks whose costs are added up
over segments and modules, and each thread takes one contiguous share of the total, so the threads stay balanced even if
ranks and segments are ragged. If whole segments divide nearly evenly, `low_rank.py` gives threads whole segments
instead. A task reads its part of an adapter once for all rows of its segment. In decode, a segment usually has one row
and memory is the bottleneck, so each thread prefetches the data that it reads next while it computes, across ranks,
modules and adapters.
"""

from __future__ import annotations

from typing import Any

from loramux.kernels.cpu.compiled import helper
from loramux.kernels.cpu.vectors import PANEL, WIDTH

IS_WIDE = WIDTH == PANEL
"""Whether there are registers for twice as many sums: AVX-512 has 32 registers of 16 lanes, and AVX2 has 16 of 8."""

RANKS = 4
"""Ranks computed in one pass over the activations."""

READ_COST = 3
"""Cost of fetching and widening adapter weights, as the number of rows that could be multiplied by them instead."""


@helper
def share_of(cursor: int, cost: int, count: int, low: int, high: int) -> Any:
    """The range `[first, last)` of tasks that begin in `[low, high)`: `count` tasks of `cost` each follow `cursor`."""
    first = min(count, max(0, (low - cursor + cost - 1) // cost))
    last = min(count, max(0, (high - cursor + cost - 1) // cost))
    return first, last
