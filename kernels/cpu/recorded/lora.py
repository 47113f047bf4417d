"""The products of adapters' matrices as operations: a shrink, then an expand, each in shares of nearly equal cost."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from loramux.kernels.cpu.instructions.compiled import helper
from loramux.kernels.cpu.instructions.vectors import integers_at, pointer_at
from loramux.kernels.cpu.lora.expand import expand_share, expand_work
from loramux.kernels.cpu.lora.shrink import shrink_share, shrink_work
from loramux.kernels.cpu.programs.operation import Operation, words_at
from loramux.kernels.cpu.programs.step_words import (
    NUM_SEGMENT_ROWS,
    NUM_SEGMENTS,
    SEGMENT_ROWS,
    SEGMENT_SLOTS,
    SEGMENT_STARTS,
)

PLAN_COLUMNS = 7
"""Columns of `group_plan`."""


@helper
def _segments_at(step: int) -> Any:
    """`rows`, `starts` and `slots` of the step's segments."""
    words = words_at(step)
    count, num_rows = words[NUM_SEGMENTS], words[NUM_SEGMENT_ROWS]
    rows = integers_at(words[SEGMENT_ROWS])[:num_rows]
    return rows, integers_at(words[SEGMENT_STARTS])[: count + 1], integers_at(words[SEGMENT_SLOTS])[:count]


@helper
def _tables_at(words: Any) -> Any:
    """The group's plan, and the tables of pages, offsets, ranks and scales."""
    num_slots, num_layers, num_modules = words[14], words[15], words[16]
    plan = carray(pointer_at(words[11]), (words[12], PLAN_COLUMNS), np.int64)
    page_table = carray(pointer_at(words[17]), (num_slots, words[13]), np.int32)
    off = carray(pointer_at(words[18]), (num_slots, num_layers, num_modules, 3), np.int32)
    rank = carray(pointer_at(words[19]), (num_slots, num_layers, num_modules), np.int32)
    scale = carray(pointer_at(words[20]), (num_slots, num_layers, num_modules), np.float32)
    return plan, page_table, off, rank, scale


@cache
def shrink(element_name: str) -> Operation:
    """Words: x or y and its stride, planes, their row stride and module stride, pool, its pages, layers and elements,
    layer, number of tasks, plan, its modules, pages per slot, numbers of slots, layers and modules, page table,
    offsets, ranks, scales. Strides are in elements.

    `element_name` is the dtype of the pool.
    """
    element: Any = np.dtype(element_name).type

    def run(arguments: Any, step: Any, task: Any) -> None:
        words = words_at(arguments)
        plan, page_table, off, rank, _ = _tables_at(words)
        rows, starts, slots = _segments_at(step)
        shifts = np.zeros(slots.shape[0], np.int32)
        pool = carray(pointer_at(words[5]), (words[6], words[7], words[8]), element)
        work = shrink_work(plan, words[9], rank, starts, slots, shifts)
        shrink_share(
            work * task // words[10], work * (task + 1) // words[10],
            words[0], words[1], words[2], words[3], words[4],
            pool, words[9], plan, page_table, off, rank, rows, rows, starts, slots, shifts,
        )  # fmt: skip

    return Operation(run)


@cache
def expand(element_name: str) -> Operation:
    """The same words as `shrink`."""
    element: Any = np.dtype(element_name).type

    def run(arguments: Any, step: Any, task: Any) -> None:
        words = words_at(arguments)
        plan, page_table, off, rank, scale = _tables_at(words)
        rows, starts, slots = _segments_at(step)
        shifts = np.zeros(slots.shape[0], np.int32)
        pool = carray(pointer_at(words[5]), (words[6], words[7], words[8]), element)
        work = expand_work(plan, words[9], rank, starts, slots, shifts)
        expand_share(
            work * task // words[10], work * (task + 1) // words[10],
            words[2], words[3], words[4], words[0], words[1],
            pool, words[9], plan, page_table, off, rank, scale, rows, starts, slots, shifts,
        )  # fmt: skip

    return Operation(run)
