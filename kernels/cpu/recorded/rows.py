"""Norms, rotary embedding, K and V, and gates as operations, with one task for each row.

The kernels in `fused.py` and `kv.py` compute rows with the same helpers, so the results are bitwise equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from loramux.kernels.cpu.fused import (
    add_norm_row,
    clamped_silu_row,
    gelu_row,
    norm_row,
    rotate_row,
    silu_row,
)
from loramux.kernels.cpu.instructions.vectors import floats_at, pointer_at
from loramux.kernels.cpu.kv import PAGE_TOKENS, page_start, write_row, write_row_of_codes
from loramux.kernels.cpu.programs.operation import Operation, doubles_at, words_at
from loramux.kernels.cpu.programs.step_words import KV_SLOTS


@Operation
def norm(arguments: Any, step: Any, task: Any) -> None:
    """Words: x, its step, out, its step, weight, vectors per row, size. Double: eps. Steps are in bytes."""
    words, doubles = words_at(arguments), doubles_at(arguments)
    size = words[6]
    for vector in range(words[5]):
        place = 4 * vector * size
        x, out = words[0] + task * words[1] + place, words[2] + task * words[3] + place
        norm_row(x, out, words[4], size, doubles[7])


@Operation
def add_norm(arguments: Any, step: Any, task: Any) -> None:
    """Words: x, its step, residual, its step, out, its step, weight, size. Double: eps."""
    words, doubles = words_at(arguments), doubles_at(arguments)
    x, residual = words[0] + task * words[1], words[2] + task * words[3]
    add_norm_row(x, residual, words[4] + task * words[5], words[6], words[7], doubles[8])


@Operation
def rotate(arguments: Any, step: Any, task: Any) -> None:
    """Words: q or k, its step, number of heads, head_dim, cos, sin, half."""
    words = words_at(arguments)
    angles = 4 * task * words[6]
    row = words[0] + task * words[1]
    rotate_row(row, words[2], words[3], words[4] + angles, words[5] + angles, words[6])


def _store(element: Any) -> Operation:
    """Words: k, its step, v, its step, pool, its pages, layers and elements, layer, KV heads, head_dim, first word of
    the group of layers.
    """

    def store(arguments: Any, step: Any, task: Any) -> None:
        words = words_at(arguments)
        pool = carray(pointer_at(words[4]), (words[5], words[6], words[7]), element)
        slot = words_at(words_at(step)[words[11] + KV_SLOTS])[task]
        start = page_start(pool, slot // PAGE_TOKENS, words[8])
        k, v = floats_at(words[0] + task * words[1]), floats_at(words[2] + task * words[3])
        none = np.int64(0)
        write_row(k, none, v, none, pool.reshape(-1), start, slot % PAGE_TOKENS, words[9], words[10])

    return Operation(store)


STORE = {2: _store(np.uint16), 4: _store(np.float32)}
"""Stores K and V, by the size of the pool's elements in bytes."""


@Operation
def store_codes(arguments: Any, step: Any, task: Any) -> None:
    """Words: k, its step, v, its step, pool, its pages, layers and elements, layer, KV heads, head_dim, first word of
    the group of layers, scales, scales of a page in a layer.
    """
    words = words_at(arguments)
    pool = carray(pointer_at(words[4]), (words[5], words[6], words[7]), np.int8)
    scales = carray(pointer_at(words[12]), (words[5], words[6], words[13]), np.uint16)
    slot = words_at(words_at(step)[words[11] + KV_SLOTS])[task]
    page, layer = slot // PAGE_TOKENS, words[8]
    k, v = floats_at(words[0] + task * words[1]), floats_at(words[2] + task * words[3])
    write_row_of_codes(
        k, 0, v, 0, pool.reshape(-1), page_start(pool, page, layer), scales.reshape(-1),
        page_start(scales, page, layer), slot % PAGE_TOKENS, words[9], words[10],
    )  # fmt: skip


@Operation
def silu(arguments: Any, step: Any, task: Any) -> None:
    """Words: gate and up, their step, out, its step, size."""
    words = words_at(arguments)
    silu_row(words[0] + task * words[1], words[2] + task * words[3], words[4])


@Operation
def gelu(arguments: Any, step: Any, task: Any) -> None:
    """Words: gate and up, their step, out, its step, size."""
    words = words_at(arguments)
    gelu_row(words[0] + task * words[1], words[2] + task * words[3], words[4])


@Operation
def clamped_silu(arguments: Any, step: Any, task: Any) -> None:
    """Words: gate and up, their step, out, its step, size. Doubles: alpha, limit."""
    words, doubles = words_at(arguments), doubles_at(arguments)
    x, out = words[0] + task * words[1], words[2] + task * words[3]
    clamped_silu_row(x, out, words[4], np.float32(doubles[5]), np.float32(doubles[6]))
