"""LoRA's gather on the GPU: reads one row of an embedding's A per token, directly from pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.addresses import widened
from loramux.kernels.gpu.launches import TILE_ROWS
from loramux.kernels.tables import LoraCall, PoolViews

MAX_BLOCK_R = 64
"""Maximum number of ranks that a program reads for each of its rows."""


@triton.jit(do_not_specialize=["layer"])
def gather_kernel(
    tokens: tl.tensor,
    planes: tl.tensor,
    pool: tl.tensor,
    page_table: tl.tensor,
    off: tl.tensor,
    rank_table: tl.tensor,
    segment_rows: tl.tensor,
    segment_starts: tl.tensor,
    segment_slots: tl.tensor,
    layer: tl.tensor,
    plane_row_stride: tl.tensor,
    MODULE: tl.constexpr,
    L: tl.constexpr,
    M: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """One program handles one segment and ranks `[block * BLOCK_R, (block + 1) * BLOCK_R)`."""
    ranks = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    segment = tl.program_id(1)
    slot = tl.load(segment_slots + segment).to(tl.int64)
    if slot < 0:
        return
    entry = (slot * L + layer) * M + MODULE
    rank = tl.load(rank_table + entry)
    offset = tl.load(off + entry * 3).to(tl.int64)
    first = tl.load(segment_starts + segment)
    end = tl.load(segment_starts + segment + 1)
    pages = page_table + slot * MAX_PAGES
    while first < end:
        listed = first + tl.arange(0, ROWS)
        is_row = listed < end
        row = tl.load(segment_rows + listed, mask=is_row, other=0).to(tl.int64)
        token = tl.load(tokens + row, mask=is_row, other=0).to(tl.int64)
        is_read = is_row[:, None] & (ranks < rank)[None, :]
        # A token's row has `rank` elements. It can begin anywhere and cross a page boundary.
        e = offset + token[:, None] * rank + ranks[None, :]
        page = tl.load(pages + e // E, mask=is_read, other=0).to(tl.int64)
        values = tl.load(pool + (page * (L * E) + layer * E + e % E), mask=is_read, other=0)
        tl.store(
            planes + row[:, None] * plane_row_stride + ranks[None, :], widened(values).to(tl.float32), mask=is_read
        )
        first += ROWS


def lora_gather(pool: PoolViews, tokens: torch.Tensor, call: LoraCall, planes: torch.Tensor) -> None:
    """`planes[0, t, 0, :rank] = A[slot, modules[0]][:, tokens[t]]` for each row `t` of each segment.

    - `pool.adapter` bfloat16, float16, float32 or FP8 codes as uint8 `[P, L, E]`, contiguous; `layout.py` describes
      how an embedding's A is stored.
    - `tokens` int32 or int64 `[T]`, contiguous, in `[0, in_features)` for rows listed by a segment.
    - `call` as for `lora_shrink`, except that `call.group` is one embedding.
    - `planes` float32 `[1, T, 1, max_rank]`, last axis contiguous. Only the first `rank` elements of listed rows are
      written, and `planes` is never read.

    The call allocates nothing and does not wait for the device.
    """
    group, tables, segments = call.group, call.tables, call.segments
    num_planes, _, num_modules, max_rank = planes.shape
    num_segments = segments.num_segments
    if not num_segments:
        return
    assert tokens.is_contiguous()
    assert planes.dtype is torch.float32
    assert planes.stride(3) == 1
    assert num_planes == num_modules == len(group.modules) == 1
    _, num_layers, page_elements = pool.adapter.shape
    block_r = min(MAX_BLOCK_R, triton.next_power_of_2(max_rank))
    gather_kernel[triton.cdiv(max_rank, block_r), num_segments](
        tokens, planes, pool.adapter, tables.page_table, tables.off, tables.rank,
        segments.rows, segments.starts, segments.slots, call.layer, planes.stride(1),
        MODULE=group.modules[0], L=num_layers, M=tables.rank.shape[2], MAX_PAGES=tables.page_table.shape[1],
        E=page_elements, ROWS=TILE_ROWS, BLOCK_R=block_r, num_warps=4,
    )  # fmt: skip
