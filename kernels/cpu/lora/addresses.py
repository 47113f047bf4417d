"""Locations of an adapter's rows in the pages, for the CPU's LoRA kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.kernels.cpu.instructions.compiled import helper
from loramux.kernels.layout import PageGeometry, row_layout
from loramux.kernels.tables import ModuleGroup

MODULE, IN, A_PADDED, OUT, COLUMN, B_PADDED, B_CHUNK = range(7)
"""Columns of a plan: the module's index in the tables, the row length and padded length of A, and the row length, first
output column, padded length and chunk length of B."""


def group_plan(group: ModuleGroup, geometry: PageGeometry) -> npt.NDArray[np.int64]:
    """A group's modules in the form that kernels read, int64 `[len(group.modules), 7]`."""
    page_elements = geometry.adapter_elements
    a = row_layout(group.in_features, page_elements)
    plan = []
    for module, out_features, column in zip(group.modules, group.out_features, group.out_offsets, strict=True):
        b = row_layout(out_features, page_elements)
        plan.append((module, a.row_len, a.padded_len, out_features, column, b.padded_len, b.chunk_len))
    return np.array(plan, np.int64)


@helper
def place(pool: Any, layer: int, pages: Any, e: int) -> int:
    """Index into the flattened pool `[P, L, E]` of element `e` of the stream stored in `pages`."""
    page_elements = np.int64(pool.shape[2])
    return place_in(pool, layer, pages, e // page_elements, e % page_elements)


@helper
def place_in(pool: Any, layer: int, pages: Any, page: int, inside: int) -> int:
    """`place` of element `inside` of the stream's page `page`."""
    return (np.int64(pages[page]) * pool.shape[1] + layer) * np.int64(pool.shape[2]) + inside


@helper
def step_on(page: int, inside: int, step: int, page_elements: int) -> Any:
    """The page, and the element in it, `step` elements later. A division would take as long as reading a row."""
    inside += step
    while inside >= page_elements:
        page, inside = page + 1, inside - page_elements
    return page, inside
