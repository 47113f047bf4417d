"""LoRA's gather on the CPU: reads one row of an embedding's A per token, directly from pages."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loramux.kernels.cpu.instructions.compiled import kernel
from loramux.kernels.cpu.instructions.vectors import floats_at, widen
from loramux.kernels.cpu.lora.addresses import place


@kernel
def gather(
    tokens: Any,
    planes_address: int,
    row_stride: int,
    pool: Any,
    layer: int,
    module: int,
    page_table: Any,
    off: Any,
    rank: Any,
    rows: Any,
    starts: Any,
    slots: Any,
) -> None:
    """`planes[t, 0, :rank] = A[slot, module][:, tokens[t]]`. See `ReferenceKernels.lora_gather`.

    `tokens` is int32 `[T]`. `planes` is float32, passed by address and row stride in elements. `pool` is `[P, L, E]`,
    float32, bfloat16 bits as uint16, or FP8 codes as uint8. Tables and segments have the dtypes given in `tables.py`.
    """
    for s in prange(slots.shape[0]):
        planes, flat_pool = floats_at(planes_address), pool.reshape(-1)
        pages = page_table[slots[s]]
        slot_rank = np.int64(rank[slots[s], layer, module])
        offset = np.int64(off[slots[s], layer, module, 0])
        for j in range(starts[s], starts[s + 1]):
            t = np.int64(rows[j])
            e = offset + np.int64(tokens[t]) * slot_rank
            for r in range(slot_rank):
                planes[t * row_stride + r] = widen(flat_pool[place(pool, layer, pages, e + r)])
