"""How the CPU's LoRA kernels cut their work, and where an adapter's elements lie.

`shrink.py` and `expand.py` read adapters straight from the pages. Work is cut into tasks whose costs are
counted over segments and modules, and each thread takes one contiguous share of the total, so ragged ranks and segments
stay balanced; `low_rank.py` has threads take whole segments instead where these are nearly alike. A task reads a
piece of adapter rows once for all rows of its segment. With one row a segment, which is what decoding is, memory sets
the pace: what a thread reads next is fetched while it computes, across ranks, modules and adapters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.kernels.cpu.compiled import helper
from loramux.kernels.cpu.vectors import PANEL, WIDTH
from loramux.kernels.layout import PageGeometry, row_layout
from loramux.kernels.tables import ModuleGroup

MODULE, IN, A_PADDED, OUT, COLUMN, B_PADDED, B_CHUNK = range(7)
"""Columns of a plan: index of the module in the tables, row length and padded length of A, the row length of B and its
first output column, padded length and chunk."""

IS_WIDE = WIDTH == PANEL
"""Whether there are registers for twice as many sums: AVX-512 has 32 of 16 lanes, AVX2 has 16 of 8."""

RANKS = 4
"""Ranks that one pass over the activations serves."""

READ_COST = 3
"""What fetching and widening a piece of adapter costs, in rows multiplied with it."""


def group_plan(group: ModuleGroup, geometry: PageGeometry) -> npt.NDArray[np.int64]:
    """What the kernels need to know of a group: int64 `[len(group.modules), 7]`."""
    page_elements = geometry.adapter_elements
    a = row_layout(group.in_features, page_elements)
    plan = []
    for module, out_features, column in zip(group.modules, group.out_features, group.out_offsets, strict=True):
        b = row_layout(out_features, page_elements)
        plan.append((module, a.row_len, a.padded_len, out_features, column, b.padded_len, b.chunk_len))
    return np.array(plan, np.int64)


@helper
def place(pool: Any, layer: int, pages: Any, e: int) -> int:
    """The index in the flat pool `[P, L, E]` of element `e` of the stream that lies in `pages`."""
    page_elements = np.int64(pool.shape[2])
    return (np.int64(pages[e // page_elements]) * pool.shape[1] + layer) * page_elements + e % page_elements


@helper
def share_of(cursor: int, cost: int, count: int, low: int, high: int) -> Any:
    """Which of `count` tasks of `cost` each, laid out from `cursor` on, begin in `[low, high)`: `[first, last)`."""
    first = min(count, max(0, (low - cursor + cost - 1) // cost))
    last = min(count, max(0, (high - cursor + cost - 1) // cost))
    return first, last
