"""LoRA's shrink on the GPU: computes `x Aᵀ`, reading A directly from pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.addresses import chunk_addresses, dot_dtype, pick, prefetch, read_a
from loramux.kernels.gpu.launches import (
    TARGET_PROGRAMS,
    TILE_ROWS,
    expert_list,
    is_decode_shaped,
    overlapping,
    power_of_two_within,
    segment_grid,
    tile_rows,
)
from loramux.kernels.layout import row_layout
from loramux.kernels.tables import LoraCall, ModuleGroup, PoolViews

MAX_SPLITS = 16
"""Maximum number of planes: more planes would cost the expand more time than they save in the shrink."""

MAX_LARGE_SPLITS = 4
"""Maximum number of planes if segments are large: the expand rereads its rows' planes for each block of columns."""

ROW_COLUMNS = 256
"""Maximum number of columns of A that a program with one row multiplies at a time."""

ROW_CHUNKS = 4
"""Maximum number of blocks of ROW_COLUMNS columns per program in decode, unless MAX_SPLITS is reached. The loop over
the blocks is unrolled, so their loads overlap.
"""

TILE_COLUMNS = 128
"""Maximum number of columns of A that a program with several rows multiplies at a time. Halved for large tiles."""

STAGES = 5
"""Pipeline depth of the tile loop. One stage loads a page-table entry, and the next stage computes an address from it.
"""

LARGE_STAGES = 4
"""Pipeline depth for large tiles, reduced so that several programs fit in a multiprocessor's shared memory."""


@triton.jit
def prefetch_a(
    pool: tl.tensor,
    pages: tl.tensor,
    offset: tl.tensor,
    layer: tl.tensor,
    rank: tl.tensor,
    first_rank: tl.tensor,
    begin: tl.tensor,
    IN: tl.constexpr,
    PADDED: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Prefetch the first BLOCK_R ranks of a program's columns of A into the L2 cache."""
    ranks = tl.minimum(first_rank + tl.arange(0, BLOCK_R), rank - 1)
    for k in tl.static_range(0, SPLIT_LEN, BLOCK_K):
        is_read = ranks < tl.where(begin + k < IN, rank, 0)
        prefetch(chunk_addresses(pool, pages, offset + ranks * PADDED + begin + k, layer, is_read, L, E), BLOCK_K)


@triton.jit
def shrink_row(
    x: tl.tensor,
    planes: tl.tensor,
    pool: tl.tensor,
    pages: tl.tensor,
    offset: tl.tensor,
    layer: tl.tensor,
    row: tl.tensor,
    x_stride: tl.tensor,
    plane_row_stride: tl.tensor,
    rank: tl.tensor,
    first_rank: tl.tensor,
    begin: tl.tensor,
    IN: tl.constexpr,
    PADDED: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    RANK_STEP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
) -> None:
    """Shrink one row: products stay in registers, with one reduction at the end and no tensor cores."""
    column = tl.arange(0, BLOCK_K)
    x_row = x + row // PAIRS_PER_ROW * x_stride
    r = first_rank
    while r < rank:
        ranks = r + tl.arange(0, BLOCK_R)
        products = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
        for k in tl.static_range(0, SPLIT_LEN, BLOCK_K):
            a = read_a(pool, pages, offset, layer, ranks, rank, begin + k, IN, PADDED, L, E, BLOCK_K)
            values = tl.load(x_row + begin + k + column, mask=begin + k + column < IN, other=0.0)
            products += a.to(tl.float32) * values.to(tl.float32)[None, :]
        tl.store(planes + row * plane_row_stride + ranks, tl.sum(products, 1), mask=ranks < rank)
        r += RANK_STEP


@triton.jit
def shrink_tiles(
    x: tl.tensor,
    planes: tl.tensor,
    pool: tl.tensor,
    pages: tl.tensor,
    offset: tl.tensor,
    layer: tl.tensor,
    segment_rows: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    x_stride: tl.tensor,
    plane_row_stride: tl.tensor,
    rank: tl.tensor,
    first_rank: tl.tensor,
    begin: tl.tensor,
    IN: tl.constexpr,
    PADDED: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    RANK_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
) -> None:
    """Shrink ROWS rows at a time on tensor cores."""
    column = tl.arange(0, BLOCK_K)
    while first < end:
        listed = first + tl.arange(0, ROWS)
        is_row = listed < end
        row = tl.load(segment_rows + listed, mask=is_row, other=0).to(tl.int64)
        # The pairs of a token and its experts can share the token's row of x, but each has its own row of planes.
        x_row = x + (row // PAIRS_PER_ROW * x_stride)[:, None]
        r = first_rank
        while r < rank:
            ranks = r + tl.arange(0, BLOCK_R)
            v = tl.zeros((ROWS, BLOCK_R), tl.float32)
            for k in tl.range(0, SPLIT_LEN, BLOCK_K, num_stages=STAGES):
                a = read_a(pool, pages, offset, layer, ranks, rank, begin + k, IN, PADDED, L, E, BLOCK_K)
                is_column = begin + k + column < IN
                values = tl.load(
                    x_row + (begin + k + column)[None, :],
                    mask=is_row[:, None] & is_column[None, :],
                    other=0.0,
                )
                v = tl.dot(values.to(DOT_DTYPE), tl.trans(a.to(DOT_DTYPE)), v, input_precision="tf32x3")
            at = planes + row[:, None] * plane_row_stride + ranks[None, :]
            tl.store(at, v, mask=is_row[:, None] & (ranks < rank)[None, :])
            r += RANK_STEP
        first += ROWS


@triton.jit(do_not_specialize=["layer"])
def shrink_kernel(
    x: tl.tensor,
    planes: tl.tensor,
    pool: tl.tensor,
    page_table: tl.tensor,
    off: tl.tensor,
    rank_table: tl.tensor,
    segment_rows: tl.tensor,
    segment_starts: tl.tensor,
    segment_slots: tl.tensor,
    segment_experts: tl.tensor,
    layer: tl.tensor,
    x_stride: tl.tensor,
    plane_stride: tl.tensor,
    plane_row_stride: tl.tensor,
    plane_module_stride: tl.tensor,
    MODULES: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    L: tl.constexpr,
    M: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    E: tl.constexpr,
    IN: tl.constexpr,
    PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    RANK_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROW_K: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    PDL: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
) -> None:
    """One program handles one segment and module, columns `[split * SPLIT_LEN, (split + 1) * SPLIT_LEN)` of A, and
    ranks `[n * RANK_STEP + b * BLOCK_R, n * RANK_STEP + (b + 1) * BLOCK_R)` for all `n`."""
    split = tl.program_id(0) % NUM_SPLITS
    i = tl.program_id(0) // NUM_SPLITS % NUM_MODULES
    first_rank = tl.program_id(0) // (NUM_SPLITS * NUM_MODULES) * BLOCK_R
    segment = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    if PDL:
        # Let the expand start its table lookups. It waits for this grid to end before it reads a plane.
        tl.extra.cuda.gdc_launch_dependents()

    slot = tl.load(segment_slots + segment).to(tl.int64)
    if slot < 0:
        if STARTS_EARLY:
            tl.extra.cuda.gdc_wait()
        return
    entry = (slot * L + layer) * M + pick(i, MODULES, NUM_MODULES)
    if EXPERT_STRIDE:
        entry += tl.load(segment_experts + segment) * EXPERT_STRIDE
    rank = tl.load(rank_table + entry)
    if first_rank >= rank:
        if STARTS_EARLY:
            tl.extra.cuda.gdc_wait()
        return
    offset = tl.load(off + entry * 3)
    first = tl.load(segment_starts + segment)
    end = tl.load(segment_starts + segment + 1)
    pages = page_table + slot * MAX_PAGES
    plane = planes + split.to(tl.int64) * plane_stride + i * plane_module_stride
    begin = split * SPLIT_LEN
    if STARTS_EARLY:
        # Prefetch before waiting: the previous kernel may still write x, but tables and adapter pages are fixed within
        # a step.
        prefetch_a(pool, pages, offset, layer, rank, first_rank, begin, IN, PADDED, L, E, SPLIT_LEN, BLOCK_R, ROW_K)
        tl.extra.cuda.gdc_wait()

    if ROWS == 1:
        row = tl.load(segment_rows + first).to(tl.int64)
        shrink_row(
            x, plane, pool, pages, offset, layer, row, x_stride, plane_row_stride, rank, first_rank, begin,
            IN, PADDED, L, E, SPLIT_LEN, RANK_STEP, BLOCK_R, ROW_K,
            PAIRS_PER_ROW,
        )  # fmt: skip
    else:
        shrink_tiles(
            x, plane, pool, pages, offset, layer, segment_rows, first, end, x_stride, plane_row_stride, rank,
            first_rank, begin, IN, PADDED, L, E, SPLIT_LEN, RANK_STEP, ROWS, BLOCK_R, TILE_K, STAGES, DOT_DTYPE,
            PAIRS_PER_ROW,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    """Compile-time parameters of a shrink launch, and the size of its grid's first axis."""

    num_programs: int
    padded_len: int
    split_len: int
    rank_step: int
    block_r: int
    row_k: int
    tile_k: int
    stages: int


@lru_cache(maxsize=4096)
def _plan(
    group: ModuleGroup,
    page_elements: int,
    num_tokens: int,
    num_segments: int,
    num_splits: int,
    max_rank: int,
    rows: int,
) -> ShrinkPlan:
    layout = row_layout(group.in_features, page_elements)
    row_k = min(ROW_COLUMNS, layout.chunk_len)
    num_blocks = -(-group.in_features // row_k)
    programs = num_splits * len(group.modules)
    block_r = 16 if max_rank <= 16 or is_decode_shaped(num_tokens, num_segments) else 32
    if rows == 1 and programs * num_segments > TARGET_PROGRAMS:
        # Smaller blocks need fewer registers, which leaves room for more programs.
        block_r = 8
    # With few segments, divide an adapter's ranks among programs too. With many, that would only add idle programs.
    rank_blocks = min(-(-max_rank // block_r), TARGET_PROGRAMS // (programs * num_segments))
    rank_blocks = power_of_two_within(max(1, rank_blocks))
    return ShrinkPlan(
        num_programs=programs * rank_blocks,
        padded_len=layout.padded_len,
        split_len=-(-num_blocks // num_splits) * row_k,
        rank_step=rank_blocks * block_r,
        block_r=block_r,
        row_k=row_k,
        tile_k=min(TILE_COLUMNS if rows <= TILE_ROWS else TILE_COLUMNS // 2, layout.chunk_len),
        stages=STAGES if rows <= TILE_ROWS else LARGE_STAGES,
    )


def num_splits(group: ModuleGroup, page_elements: int, num_tokens: int, num_segments: int) -> int:
    """Number of planes for a batch: enough to fill the GPU, but at most one per column block and 16 in total.

    The number depends only on shapes, so a captured graph keeps its planes. `page_elements` is `E`. The maximum is 4
    instead of 16 if segments are large. An embedding needs one plane, because `lora_gather` only copies values.
    """
    if group.is_embedding:
        return 1
    row_k = min(ROW_COLUMNS, row_layout(group.in_features, page_elements).chunk_len)
    num_blocks = -(-group.in_features // row_k)
    wanted = power_of_two_within(max(1, TARGET_PROGRAMS // max(1, num_segments * len(group.modules))))
    fewest = -(-num_blocks // ROW_CHUNKS) if is_decode_shaped(num_tokens, num_segments) else 1
    # A batch with more tokens than this has segments of more than 16 rows.
    most = MAX_LARGE_SPLITS if num_tokens > TILE_ROWS * num_segments else MAX_SPLITS
    return min(most, num_blocks, max(fewest, wanted))


def lora_shrink(
    pool: PoolViews,
    x: torch.Tensor,
    call: LoraCall,
    planes: torch.Tensor,
    *,
    pdl: bool = False,
    may_start_early: bool = True,
) -> None:
    """`sum over s of planes[s, t, i, :rank] = x[t] @ A[slot, modules[i]]ᵀ` for each row `t` of each segment.

    - `pool.adapter` bfloat16, float16, float32 or FP8 codes as uint8 `[P, L, E]`, contiguous; `layout.py` describes
      how A is stored.
    - `x` bfloat16, float16 or float32 `[T, in_features]`, last axis contiguous.
    - `call.tables` on the device, contiguous; ranks are at most `max_rank`.
    - `call.segments` on the device: `slots` int32 `[num_segments]`; -1 marks a padding segment, and its `starts` and
      `rows` are not read. The host reads only the number of segments and `max_rows`, so a captured graph stays valid
      when the segments change. Rows of a segment are processed 16 at a time, 64 at a time if `max_rows` is at least
      64, or one at a time, without tensor cores, if it is 1.
    - For a group of experts, `t` indexes the pairs of a `Routing`, `call.segments.experts` is int32 `[num_segments]`,
      and `x` has a row for each pair or for each token. The number of rows of `planes` is the number of pairs.
    - `planes` float32 `[num_splits, T, len(group.modules), max_rank]`, last axis contiguous; plane `s` contains the
      contribution of A's columns `[s * split_len, (s + 1) * split_len)`. All planes of listed rows are written up to
      `rank`. No other element of `planes` is written, and none is read.
    - `pdl` lets the next kernel, which must be `lora_expand(pdl=True)` or `lora_linear(pdl=True)`, start before this
      kernel ends. In small grids, it also lets this kernel's table lookups and prefetches overlap the end of the
      previous kernel, unless `may_start_early` is False: `lora_linear` reads `x` while this kernel runs, so the kernel
      that wrote `x` must have ended. Requires compute capability 9 or later.

    Products are summed in float32. The call allocates nothing and does not wait for the device.
    """
    group, tables, segments = call.group, call.tables, call.segments
    num_planes, _, num_modules, max_rank = planes.shape
    num_segments = segments.num_segments
    if not num_segments:
        return
    assert x.stride(1) == 1
    assert planes.dtype is torch.float32
    assert planes.stride(3) == 1
    assert num_modules == len(group.modules)
    _, num_layers, page_elements = pool.adapter.shape
    rows = tile_rows(segments)
    # For experts, `planes` has a row for each pair, which determines how many pairs share a row of `x`. Otherwise, each
    # row of `planes` has its own row of `x`.
    pairs_per_row = planes.shape[1] // x.shape[0] if group.expert_stride else 1
    plan = _plan(group, page_elements, pairs_per_row * x.shape[0], num_segments, num_planes, max_rank, rows)
    # The segments of experts are written by an earlier kernel in the same step. Large grids are slower if they start
    # early.
    is_small = plan.num_programs * num_segments <= TARGET_PROGRAMS
    starts_early = pdl and may_start_early and not group.expert_stride and is_small
    launch = overlapping(starts_early)
    shrink_kernel[plan.num_programs, *segment_grid(num_segments)](
        x, planes, pool.adapter, tables.page_table, tables.off, tables.rank,
        segments.rows, segments.starts, segments.slots, expert_list(segments),
        call.layer, x.stride(0), planes.stride(0), planes.stride(1), planes.stride(2),
        MODULES=group.modules, NUM_MODULES=num_modules, L=num_layers, M=tables.rank.shape[2],
        MAX_PAGES=tables.page_table.shape[1], E=page_elements, IN=group.in_features, PADDED=plan.padded_len,
        NUM_SPLITS=num_planes, SPLIT_LEN=plan.split_len, RANK_STEP=plan.rank_step,
        ROWS=rows, BLOCK_R=plan.block_r, ROW_K=plan.row_k, TILE_K=plan.tile_k, STAGES=plan.stages,
        DOT_DTYPE=dot_dtype(x.dtype, pool.adapter.dtype),
        EXPERT_STRIDE=group.expert_stride, PAIRS_PER_ROW=pairs_per_row, PDL=pdl,
        STARTS_EARLY=starts_early, num_warps=4, enable_fp_fusion=True, **launch,
    )  # fmt: skip
