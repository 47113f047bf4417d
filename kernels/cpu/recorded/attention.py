"""Attention of a step with one row per sequence as an operation. A task is one KV head of one sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from loramux.kernels.cpu.attention import attend_tile
from loramux.kernels.cpu.instructions.vectors import integers_at, pointer_at
from loramux.kernels.cpu.kv import PAGE_TOKENS
from loramux.kernels.cpu.programs.operation import Operation, doubles_at, words_at
from loramux.kernels.cpu.programs.step_words import PAGE_STARTS, PAGES, SEQ_LENS


def _attend(element: Any) -> Operation:
    """Words: q, its step, out, its step, pool, its pages, layers and elements, layer, group size, KV heads, head_dim,
    window, sinks, first word of the group of layers, scales of the codes or 0, scales of a page in a layer. Doubles:
    scale, soft cap.
    """

    def attend(arguments: Any, step: Any, task: Any) -> None:
        words, doubles = words_at(arguments), doubles_at(arguments)
        pool = carray(pointer_at(words[4]), (words[5], words[6], words[7]), element)
        group_size, num_kv_heads, head_dim, window = words[9], words[10], words[11], words[12]
        row, head = task // num_kv_heads, task % num_kv_heads
        batch = words_at(step + 8 * words[14])
        length = np.int64(integers_at(batch[SEQ_LENS])[row])
        num_keys: Any = min(window, length)
        num_pages = (length + PAGE_TOKENS - 1) // PAGE_TOKENS - (length - num_keys) // PAGE_TOKENS
        row_len = num_pages * PAGE_TOKENS
        # numba frees an array after its last use, and taking its address is a use. The slice keeps all of the scratch.
        scratch = np.empty(group_size * (2 * head_dim + row_len + 1), np.float32)
        weights = scratch[group_size * (2 * head_dim + row_len) :]
        q_tile = np.int64(scratch.ctypes.data)
        out_tile = q_tile + 4 * group_size * head_dim
        scores = out_tile + 4 * group_size * head_dim
        column = 4 * head * group_size * head_dim
        none = np.int64(0)
        attend_tile(
            words[0] + row * words[1] + column, none, words[2] + row * words[3] + column, none, np.int64(1),
            pool, words[8], integers_at(batch[PAGES]), np.int64(integers_at(batch[PAGE_STARTS])[row]), length, window,
            head, group_size, num_kv_heads, head_dim, doubles[17], doubles[18], words[13], words[15], words[16],
            q_tile, out_tile, scores, row_len, weights,
        )  # fmt: skip

    return Operation(attend)


ATTEND = {1: _attend(np.int8), 2: _attend(np.uint16), 4: _attend(np.float32)}
"""Attention, by the size of the pool's elements in bytes."""
