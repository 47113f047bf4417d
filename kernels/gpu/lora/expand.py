"""LoRA's expand on the GPU: reads B directly from pages and adds `v Bᵀ` to the base's output in place.

In large steps, it writes `v Bᵀ` first, and the base's product adds to it. The expand then does not read the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.addresses import IS_COMPILED, chunk_addresses, halves_planes, pick, prefetch, widened
from loramux.kernels.gpu.launches import (
    TARGET_PROGRAMS,
    TILE_ROWS,
    expert_list,
    is_decode_shaped,
    overlapping,
    segment_grid,
    tile_rows,
    whole_grid,
)
from loramux.kernels.layout import row_layout
from loramux.kernels.tables import LoraCall, ModuleGroup, PoolViews

ZERO_ROWS = 256
"""Number of rows whose zeros one program writes. In a prefill, most of these programs find only rows with adapters."""


@triton.jit
def read_b(
    pool: tl.tensor,
    pages: tl.tensor,
    offset: tl.tensor,
    layer: tl.tensor,
    padded_len: tl.tensor,
    ranks: tl.tensor,
    rank: tl.tensor,
    is_column: tl.tensor,
    L: tl.constexpr,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Rows `ranks` of B transposed, BLOCK_N columns from `offset` on. Values from row `rank` on and past the last
    column are 0. FP8 codes become float32.
    """
    is_rank = ranks < rank
    chunk = chunk_addresses(pool, pages, offset + ranks * padded_len, layer, is_rank, L, E)
    elements = tl.load(
        chunk[:, None] + tl.arange(0, BLOCK_N)[None, :], mask=is_rank[:, None] & is_column[None, :], other=0
    )
    return widened(elements)


@triton.jit
def prefetch_b(
    pool: tl.tensor,
    pages: tl.tensor,
    offset: tl.tensor,
    layer: tl.tensor,
    padded_len: tl.tensor,
    rank: tl.tensor,
    L: tl.constexpr,
    E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Prefetch into the L2 cache the block that `read_b` reads first.

    Keeping the block in registers until the shrink has ended would leave room for fewer programs.
    """
    ranks = tl.minimum(tl.arange(0, BLOCK_R), rank - 1)
    prefetch(chunk_addresses(pool, pages, offset + ranks * padded_len, layer, ranks >= 0, L, E), BLOCK_N)


@triton.jit
def with_affine(
    total: tl.tensor,
    pool: tl.tensor,
    pages: tl.tensor,
    offset: tl.tensor,
    layer: tl.tensor,
    padded_len: tl.tensor,
    is_column: tl.tensor,
    L: tl.constexpr,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """`total + gain * total + shift` for the last axis of `total`. Gain and shift start at `offset` of the stream."""
    row = tl.arange(0, 2)
    chunk = chunk_addresses(pool, pages, offset + row * padded_len, layer, row >= 0, L, E)
    both = tl.load(chunk[:, None] + tl.arange(0, BLOCK_N)[None, :], mask=is_column[None, :], other=0)
    both = widened(both).to(tl.float32)
    gain = tl.sum(tl.where((row == 0)[:, None], both, 0.0), 0)
    shift = tl.sum(tl.where((row == 1)[:, None], both, 0.0), 0)
    return total + gain * total + shift


@triton.jit
def expand_row(
    planes: tl.tensor,
    out: tl.tensor,
    pool: tl.tensor,
    pages: tl.tensor,
    offset: tl.tensor,
    affine: tl.tensor,
    layer: tl.tensor,
    padded_len: tl.tensor,
    plane_stride: tl.tensor,
    rank: tl.tensor,
    scale: tl.tensor,
    is_column: tl.tensor,
    L: tl.constexpr,
    E: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WRITES: tl.constexpr,
) -> None:
    """Expand one row: products stay in registers, with one reduction at the end and no tensor cores."""
    split = tl.arange(0, SPLITS)
    products = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    r = 0
    while r < rank:
        ranks = r + tl.arange(0, BLOCK_R)
        b = read_b(pool, pages, offset, layer, padded_len, ranks, rank, is_column, L, E, BLOCK_N)
        parts = tl.load(
            planes + split[:, None].to(tl.int64) * plane_stride + ranks[None, :],
            mask=(split < NUM_SPLITS)[:, None] & (ranks < rank)[None, :],
            other=0.0,
        )
        products += tl.sum(parts, 0)[:, None] * b.to(tl.float32)
        r += BLOCK_R
    total = scale * tl.sum(products, 0)
    if not WRITES:
        total += tl.load(out, mask=is_column).to(tl.float32)
        if affine >= 0:
            total = with_affine(total, pool, pages, affine, layer, padded_len, is_column, L, E, BLOCK_N)
    tl.store(out, total.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def expand_tiles(
    planes: tl.tensor,
    out: tl.tensor,
    pool: tl.tensor,
    pages: tl.tensor,
    offset: tl.tensor,
    affine: tl.tensor,
    layer: tl.tensor,
    padded_len: tl.tensor,
    segment_rows: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    plane_stride: tl.tensor,
    plane_row_stride: tl.tensor,
    y_stride: tl.tensor,
    rank: tl.tensor,
    scale: tl.tensor,
    is_column: tl.tensor,
    L: tl.constexpr,
    E: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALVES_V: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    WRITES: tl.constexpr,
) -> None:
    """Expand ROWS rows at a time on tensor cores."""
    while first < end:
        listed = first + tl.arange(0, ROWS)
        is_row = listed < end
        row = tl.load(segment_rows + listed, mask=is_row, other=0).to(tl.int64)
        delta = tl.zeros((ROWS, BLOCK_N), tl.float32)
        r = 0
        while r < rank:
            ranks = r + tl.arange(0, BLOCK_R)
            b = read_b(pool, pages, offset, layer, padded_len, ranks, rank, is_column, L, E, BLOCK_N).to(DOT_DTYPE)
            is_part = is_row[:, None] & (ranks < rank)[None, :]
            part = planes + row[:, None] * plane_row_stride + ranks[None, :]
            v = tl.load(part, mask=is_part, other=0.0)
            for _ in tl.static_range(1, NUM_SPLITS):
                part += plane_stride
                v += tl.load(part, mask=is_part, other=0.0)
            if HALVES_V:
                # One bfloat16 contains 8 bits of v. A second one contains the next 8.
                high = v.to(tl.bfloat16)
                low = (v - high.to(tl.float32)).to(tl.bfloat16)
                delta = tl.dot(high.to(DOT_DTYPE), b, delta, input_precision="tf32x3")
                delta = tl.dot(low.to(DOT_DTYPE), b, delta, input_precision="tf32x3")
            else:
                delta = tl.dot(v, b, delta, input_precision="tf32x3")
            r += BLOCK_R
        at = out[None, :] + row[:, None] * y_stride
        is_out = is_row[:, None] & is_column[None, :]
        total = scale * delta
        if not WRITES:
            total += tl.load(at, mask=is_out).to(tl.float32)
            if affine >= 0:
                total = with_affine(total, pool, pages, affine, layer, padded_len, is_column, L, E, BLOCK_N)
        tl.store(at, total.to(out.dtype.element_ty), mask=is_out)
        first += ROWS


@triton.jit
def zero_base_rows(
    out: tl.tensor,
    row_slots: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    y_stride: tl.tensor,
    is_column: tl.tensor,
    ZERO_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """Write zeros to those of the rows `[first, first + ZERO_ROWS)` that have no adapter."""
    end = tl.minimum(first + ZERO_ROWS, num_rows)
    while first < end:
        row = first + tl.arange(0, BLOCK_ROWS)
        is_base = (tl.load(row_slots + row, mask=row < end, other=0) < 0)[:, None]
        at = out[None, :] + row.to(tl.int64)[:, None] * y_stride
        tl.store(at, tl.zeros(at.shape, out.dtype.element_ty), mask=is_base & is_column[None, :])
        first += BLOCK_ROWS


@triton.jit(do_not_specialize=["layer", "num_segments", "num_rows"])
def expand_kernel(
    planes: tl.tensor,
    y: tl.tensor,
    pool: tl.tensor,
    page_table: tl.tensor,
    off: tl.tensor,
    rank_table: tl.tensor,
    scale_table: tl.tensor,
    segment_rows: tl.tensor,
    segment_starts: tl.tensor,
    segment_slots: tl.tensor,
    segment_experts: tl.tensor,
    row_slots: tl.tensor,
    layer: tl.tensor,
    num_segments: tl.tensor,
    num_rows: tl.tensor,
    plane_stride: tl.tensor,
    plane_row_stride: tl.tensor,
    plane_module_stride: tl.tensor,
    y_stride: tl.tensor,
    MODULES: tl.constexpr,
    FIRST_BLOCKS: tl.constexpr,
    OUT: tl.constexpr,
    OUT_OFFSETS: tl.constexpr,
    PADDED: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    L: tl.constexpr,
    M: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    E: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALVES_V: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
    WRITES: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
) -> None:
    """One program handles one segment and BLOCK_N columns of one module's output.

    With WRITES, programs after the last segment handle ZERO_ROWS rows each.
    """
    block = tl.program_id(0)
    segment = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    i = block * 0
    for j in tl.static_range(1, NUM_MODULES):
        i += (block >= FIRST_BLOCKS[j]).to(tl.int32)
    begin = (block - pick(i, FIRST_BLOCKS, NUM_MODULES)) * BLOCK_N
    column = begin + tl.arange(0, BLOCK_N)
    is_column = column < pick(i, OUT, NUM_MODULES)
    out = y + pick(i, OUT_OFFSETS, NUM_MODULES) + column
    if WRITES:  # noqa: SIM102  one condition is known when compiling, the other only on the device
        if segment >= num_segments:
            if PDL:
                tl.extra.cuda.gdc_wait()
            zero_base_rows(
                out, row_slots, (segment - num_segments) * ZERO_ROWS, num_rows, y_stride, is_column, ZERO_ROWS, 16
            )
            return

    slot = tl.load(segment_slots + segment).to(tl.int64)
    if slot < 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    entry = (slot * L + layer) * M + pick(i, MODULES, NUM_MODULES)
    if EXPERT_STRIDE:
        entry += tl.load(segment_experts + segment) * EXPERT_STRIDE
    rank = tl.load(rank_table + entry)
    if not WRITES:  # noqa: SIM102
        if rank == 0:
            if PDL:
                tl.extra.cuda.gdc_wait()
            return
    offset = tl.load(off + entry * 3 + 1) + begin
    affine = tl.load(off + entry * 3 + 2)
    affine = tl.where(affine >= 0, affine + begin, affine)
    scale = tl.load(scale_table + entry)
    if WRITES:
        # The scale of a module that the adapter does not change is undefined.
        scale = tl.where(rank > 0, scale, 0.0)
    first = tl.load(segment_starts + segment)
    end = tl.load(segment_starts + segment + 1)
    pages = page_table + slot * MAX_PAGES
    padded_len = pick(i, PADDED, NUM_MODULES)
    parts = planes + i * plane_module_stride
    if PDL:
        # Prefetch before waiting: earlier kernels write planes and y, but tables and adapter pages are fixed within a
        # step.
        if rank > 0:
            prefetch_b(pool, pages, offset, layer, padded_len, rank, L, E, BLOCK_R, BLOCK_N)
        tl.extra.cuda.gdc_wait()

    if ROWS == 1:
        row = tl.load(segment_rows + first).to(tl.int64)
        expand_row(
            parts + row * plane_row_stride, out + row * y_stride, pool, pages, offset, affine, layer, padded_len,
            plane_stride, rank, scale, is_column, L, E, NUM_SPLITS, SPLITS, BLOCK_R, BLOCK_N, WRITES,
        )  # fmt: skip
    else:
        expand_tiles(
            parts, out, pool, pages, offset, affine, layer, padded_len, segment_rows, first, end,
            plane_stride, plane_row_stride, y_stride, rank, scale, is_column,
            L, E, NUM_SPLITS, ROWS, BLOCK_R, BLOCK_N, HALVES_V, DOT_DTYPE, WRITES,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpandPlan:
    """Compile-time parameters of an expand launch, and the size of its grid's first axis.

    `first_blocks[i]` is the first column block of module `i`, and `padded_lens[i]` is the length of its rows in the
    stream.
    """

    num_blocks: int
    first_blocks: tuple[int, ...]
    padded_lens: tuple[int, ...]
    block_r: int
    block_n: int
    num_warps: int


@lru_cache(maxsize=4096)
def _plan(
    group: ModuleGroup, page_elements: int, num_tokens: int, num_segments: int, max_rank: int, rows: int
) -> ExpandPlan:
    layouts = [row_layout(out_features, page_elements) for out_features in group.out_features]
    num_warps = 4
    if not is_decode_shaped(num_tokens, num_segments):
        widest, block_r = 128, 16 if max_rank <= 16 else 32
        if rows <= TILE_ROWS and max_rank <= 16:
            num_warps = 2
    elif num_segments * group.total_out >= 512 * TARGET_PROGRAMS // 2:
        widest, block_r, num_warps = (512, 8, 2) if rows == 1 else (256, 16, 4)
    elif rows == 1 and max_rank <= 16:
        # With only a few segments, narrow blocks use more multiprocessors.
        widest, block_r, num_warps = 128, 16, 1
    else:
        # Reading more ranks at a time saves round trips to memory.
        widest, block_r = 128, max(16, min(64, triton.next_power_of_2(max_rank)))
    block_n = min(widest, *(layout.chunk_len for layout in layouts))
    first_blocks, num_blocks = [], 0
    for layout in layouts:
        first_blocks.append(num_blocks)
        num_blocks += -(-layout.row_len // block_n)
    return ExpandPlan(
        num_blocks=num_blocks,
        first_blocks=tuple(first_blocks),
        padded_lens=tuple(layout.padded_len for layout in layouts),
        block_r=block_r,
        block_n=block_n,
        num_warps=num_warps,
    )


def lora_expand(
    pool: PoolViews,
    planes: torch.Tensor,
    call: LoraCall,
    y: torch.Tensor,
    *,
    row_slots: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """`y[t, columns of i] += scale * v[t, i] @ B[slot, modules[i]]ᵀ` with `v = planes.sum(0)[..., :rank]`.

    If the adapter has affines, each sum `y` then becomes `y + gain * y + shift`.

    - `pool.adapter` bfloat16, float16, float32 or FP8 codes as uint8 `[P, L, E]`, contiguous; `layout.py` describes
      how B transposed is stored.
    - `planes` float32 `[num_splits, T, len(group.modules), max_rank]` as `lora_shrink` wrote them. Only entries
      below `rank` of rows that a segment lists are read.
    - `call` as for `lora_shrink`.
    - `y` bfloat16, float16 or float32 `[T, group.total_out]`, last axis contiguous: read, summed in float32 and rounded
      once. Rows that no segment lists, and columns of a module of rank 0, keep their bits.
    - `row_slots` int32 `[T]` is the slot of each row, which is -1 for exactly those rows that no segment lists. If it
      is given, `y` is not read: the products are written instead of added, and all other elements of the modules'
      columns become 0. No listed adapter has affines then, and the group is not one of experts.
    - `pdl` lets the table lookups and the prefetch of the first block of B overlap the end of the previous kernel,
      which must be `lora_shrink(pdl=True)`; requires compute capability 9 or later.

    The call allocates nothing and does not wait for the device.
    """
    group, tables, segments = call.group, call.tables, call.segments
    num_planes, _, num_modules, max_rank = planes.shape
    num_segments, num_rows = segments.num_segments, y.shape[0]
    writes = row_slots is not None
    num_columns = num_segments
    if writes:
        assert not group.expert_stride
        num_columns = whole_grid(num_segments + -(-num_rows // ZERO_ROWS))
    if not num_columns:
        return
    assert y.stride(1) == 1
    assert planes.dtype is torch.float32
    assert planes.stride(3) == 1
    assert num_modules == len(group.modules)
    _, num_layers, page_elements = pool.adapter.shape
    rows = tile_rows(segments)
    plan = _plan(group, page_elements, num_rows, num_segments, max_rank, rows)
    halves_v = halves_planes(pool.adapter.dtype, y.dtype)
    launch = overlapping(pdl)
    expand_kernel[plan.num_blocks, *segment_grid(num_columns)](
        planes, y, pool.adapter, tables.page_table, tables.off, tables.rank, tables.scale,
        segments.rows, segments.starts, segments.slots, expert_list(segments),
        segments.slots if row_slots is None else row_slots,
        call.layer, num_segments, num_rows, planes.stride(0), planes.stride(1), planes.stride(2), y.stride(0),
        MODULES=group.modules, FIRST_BLOCKS=plan.first_blocks, OUT=group.out_features, OUT_OFFSETS=group.out_offsets,
        PADDED=plan.padded_lens, NUM_MODULES=num_modules, L=num_layers, M=tables.rank.shape[2],
        MAX_PAGES=tables.page_table.shape[1], E=page_elements,
        NUM_SPLITS=num_planes, SPLITS=triton.next_power_of_2(num_planes),
        ROWS=rows, BLOCK_R=plan.block_r, BLOCK_N=plan.block_n,
        HALVES_V=halves_v, DOT_DTYPE=tl.bfloat16 if halves_v and IS_COMPILED else tl.float32,
        EXPERT_STRIDE=group.expert_stride, PDL=pdl, WRITES=writes, ZERO_ROWS=ZERO_ROWS,
        num_warps=plan.num_warps, enable_fp_fusion=True, **launch,
    )  # fmt: skip
