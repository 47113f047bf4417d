"""Storing K and V of a step's rows in their pages on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.tables import AttentionBatch, PoolViews


def kv_write(k: torch.Tensor, v: torch.Tensor, pool: PoolViews, layer: int, batch: AttentionBatch) -> None:
    """Store K and V of row `t` at `batch.kv_slots[t]`, rounded to the pool's dtype (to nearest, ties to even).

    `k` and `v` `[T, num_kv_heads, head_dim]` of float32, float16 or bfloat16; rows may lie inside wider rows. Both go
    to `[num_kv_heads, page_tokens, head_dim]` of their page, K in the first half of its elements, as
    `paged_attention.py` reads them. A negative slot marks a row that only pads the batch: it is not stored.
    """
    geometry = pool.geometry
    num_rows = k.shape[0]
    assert k.stride()[1:] == v.stride()[1:] == (geometry.head_dim, 1)
    width = geometry.num_kv_heads * geometry.head_dim
    if num_rows:
        block = triton.next_power_of_2(width)
        _store[(num_rows,)](
            k, v, pool.kv, batch.kv_slots, k.stride(0), v.stride(0), layer,
            NUM_LAYERS=geometry.num_layers, WIDTH=width, HEAD_DIM=geometry.head_dim, PAGE_TOKENS=geometry.page_tokens,
            BLOCK=block, num_warps=min(8, max(1, block // 256)),
        )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _store(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    kv_slots_ptr: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    layer: tl.tensor,
    NUM_LAYERS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """All heads of one row; grid `(T,)`."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(kv_slots_ptr + row)
    if slot < 0:
        return
    column = tl.arange(0, BLOCK)
    is_stored = column < WIDTH
    k = tl.load(k_ptr + row * k_stride + column, mask=is_stored)
    v = tl.load(v_ptr + row * v_stride + column, mask=is_stored)

    PLANE: tl.constexpr = WIDTH * PAGE_TOKENS
    page = (slot // PAGE_TOKENS) * NUM_LAYERS + layer
    head, d = column // HEAD_DIM, column % HEAD_DIM
    target = kv_ptr + page * (2 * PLANE) + head * (PAGE_TOKENS * HEAD_DIM) + (slot % PAGE_TOKENS) * HEAD_DIM + d
    tl.store(target, k, mask=is_stored)
    tl.store(target + PLANE, v, mask=is_stored)
