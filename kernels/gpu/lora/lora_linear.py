"""A linear layer with its adapters on the GPU, for few rows: `x Wᵀ + scale (x Aᵀ) Bᵀ` in one pass over the output.

The expand's product becomes further steps of the base's product: each program multiplies the rows by its columns of W,
then by its columns of each adapter's B. Rows of other adapters are 0 in those steps. B is read once for each block of
columns, however many rows use the adapter, and the output is written once and never read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.addresses import (
    IS_COMPILED,
    chunk_addresses,
    dot_dtype,
    halves_planes,
    pick,
    prefetch,
    widened,
)
from loramux.kernels.gpu.launches import overlapping, power_of_two_within
from loramux.kernels.layout import row_layout
from loramux.kernels.tables import LoraCall, ModuleGroup, PoolViews

MAX_ROWS = 128
"""Maximum number of rows. All rows are in one tile, so that W is read once."""

MAX_COLUMNS = 128
"""Maximum number of columns of a program, halved for MAX_ROWS rows. With fewer, the programs together read x more
often. With more, the sums need too many registers.
"""

MAX_COUNTERS = 1024
"""Number of counters. Each block of columns whose sum is divided among programs needs one."""

MAX_REGISTERS = 255
"""Registers per thread, so that the compiler does not spill for an occupancy that shared memory does not allow."""

MIN_SPLIT_LEN = 512
"""Minimum number of inputs per program. Shorter sums would spend more time on adding up than on reading W."""


@triton.jit
def own_planes(
    planes: tl.tensor,
    row: tl.tensor,
    ranks: tl.tensor,
    row_rank: tl.tensor,
    row_scale: tl.tensor,
    plane_stride: tl.tensor,
    plane_row_stride: tl.tensor,
    NUM_PLANES: tl.constexpr,
) -> tl.tensor:
    """`scale * x Aᵀ` for ranks `ranks` of each row's own adapter; 0 from `row_rank` on."""
    is_part = ranks[None, :] < row_rank[:, None]
    part = planes + row[:, None] * plane_row_stride + ranks[None, :]
    v = tl.load(part, mask=is_part, other=0.0)
    # Loading all planes at once would need too many registers.
    for _ in tl.range(1, NUM_PLANES, num_stages=1, loop_unroll_factor=4):
        part += plane_stride
        v += tl.load(part, mask=is_part, other=0.0)
    return v * row_scale[:, None]


@triton.jit
def listed_slot(adapter_slots: tl.tensor, listed: tl.tensor, num_adapters: tl.tensor) -> tl.tensor:
    """The slot of the adapter `listed`, or -2 past the last adapter."""
    return tl.load(adapter_slots + listed, mask=listed < num_adapters, other=-2)


@triton.jit
def entry_of(
    off: tl.tensor,
    rank_table: tl.tensor,
    slot: tl.tensor,
    layer: tl.tensor,
    module: tl.tensor,
    L: tl.constexpr,
    M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The rank and the offset of B of a slot, both 0 for a negative slot."""
    entry = (slot.to(tl.int64) * L + layer) * M + module
    rank = tl.load(rank_table + entry, mask=slot >= 0, other=0)
    return rank, tl.load(off + entry * 3 + 1, mask=slot >= 0, other=0)


@triton.jit
def chunks_of(
    pool: tl.tensor,
    page_table: tl.tensor,
    slot: tl.tensor,
    e: tl.tensor,
    layer: tl.tensor,
    is_read: tl.tensor,
    L: tl.constexpr,
    E: tl.constexpr,
    MAX_PAGES: tl.constexpr,
) -> tl.tensor:
    """Pool addresses of elements `e` of each slot's stream, or the pool's first address where `is_read` is False."""
    pages = page_table + slot.to(tl.int64) * MAX_PAGES
    return chunk_addresses(pool, pages, tl.where(is_read, e, 0), layer, is_read, L, E)


@triton.jit
def rows_of_b(
    pool: tl.tensor,
    page_table: tl.tensor,
    slot: tl.tensor,
    offset: tl.tensor,
    layer: tl.tensor,
    padded_len: tl.tensor,
    ranks: tl.tensor,
    rank: tl.tensor,
    L: tl.constexpr,
    E: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Rows `ranks` of a slot's B transposed, BLOCK_N columns from `offset` on; 0 from row `rank` on.

    FP8 codes stay codes. Columns past the module's last are in the padding of the rows, and may have any value.
    """
    is_read = ranks < rank
    chunk = chunks_of(pool, page_table, slot, offset + ranks * padded_len, layer, is_read, L, E, MAX_PAGES)
    return tl.load(chunk[:, None] + tl.arange(0, BLOCK_N)[None, :], mask=is_read[:, None], other=0)


@triton.jit(do_not_specialize=["layer", "num_rows", "num_listed"])
def lora_linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    sums: tl.tensor,
    counters: tl.tensor,
    planes: tl.tensor,
    pool: tl.tensor,
    page_table: tl.tensor,
    off: tl.tensor,
    rank_table: tl.tensor,
    scale_table: tl.tensor,
    row_slots: tl.tensor,
    adapter_slots: tl.tensor,
    layer: tl.tensor,
    num_rows: tl.tensor,
    num_listed: tl.tensor,
    x_stride: tl.tensor,
    plane_stride: tl.tensor,
    plane_row_stride: tl.tensor,
    plane_module_stride: tl.tensor,
    MODULES: tl.constexpr,
    FIRST_BLOCKS: tl.constexpr,
    OUT: tl.constexpr,
    OUT_OFFSETS: tl.constexpr,
    PADDED: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    TOTAL_OUT: tl.constexpr,
    OUT_ALIGNMENT: tl.constexpr,
    IN: tl.constexpr,
    L: tl.constexpr,
    M: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    E: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ADAPTERS: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    HALVES_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program handles BLOCK_N columns of one module: inputs `[split * SPLIT_LEN, (split + 1) * SPLIT_LEN)` of W,
    and every SPLITS-th adapter. The last of a block's programs adds up their sums.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    i = block * 0
    for j in tl.static_range(1, NUM_MODULES):
        i += (block >= FIRST_BLOCKS[j]).to(tl.int32)
    begin = (block - pick(i, FIRST_BLOCKS, NUM_MODULES)) * BLOCK_N
    width = pick(i, OUT, NUM_MODULES)
    module = pick(i, MODULES, NUM_MODULES)
    padded_len = pick(i, PADDED, NUM_MODULES)
    column = begin + tl.arange(0, BLOCK_N)
    is_column = column < width
    out_begin = tl.multiple_of(pick(i, OUT_OFFSETS, NUM_MODULES) + begin, OUT_ALIGNMENT)
    out_column = out_begin + tl.arange(0, BLOCK_N)
    # Columns past the module's last read its last column again, and are not stored.
    read_column = out_begin + tl.minimum(tl.arange(0, BLOCK_N), width - 1 - begin)
    row = tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    read_row = tl.minimum(row, num_rows - 1).to(tl.int64)

    all_slots = listed_slot(adapter_slots, tl.arange(0, ADAPTERS), num_listed)
    num_adapters = tl.sum((all_slots >= 0).to(tl.int32), 0)
    if PDL:
        # Tables and adapter pages are fixed within a step, and the shrink started after the kernel that wrote x. So
        # prefetch B and multiply by W while the shrink runs.
        for listed in tl.range(split, num_adapters, SPLITS):
            slot = listed_slot(adapter_slots, listed, num_adapters)
            rank, offset = entry_of(off, rank_table, slot, layer, module, L, M)
            ranks = tl.arange(0, BLOCK_R)
            e = offset + ranks * padded_len + begin
            prefetch(chunks_of(pool, page_table, slot, e, layer, ranks < rank, L, E, MAX_PAGES), BLOCK_N)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    inner = tl.arange(0, BLOCK_K)
    x_part = x + read_row[:, None] * x_stride + (split * SPLIT_LEN + inner)[None, :]
    w_part = weight + read_column[:, None].to(tl.int64) * IN + (split * SPLIT_LEN + inner)[None, :]
    for k in tl.range(0, SPLIT_LEN, BLOCK_K, num_stages=STAGES):
        if SPLIT_LEN * SPLITS == IN:
            values = tl.load(x_part)
            w = tl.load(w_part)
        else:
            is_input = (split * SPLIT_LEN + k + inner < IN)[None, :]
            values = tl.load(x_part, mask=is_input, other=0.0)
            w = tl.load(w_part, mask=is_input, other=0.0)
        total = tl.dot(values.to(DOT_DTYPE), tl.trans(w.to(DOT_DTYPE)), total, input_precision="tf32x3")
        x_part += BLOCK_K
        w_part += BLOCK_K

    row_slot = tl.load(row_slots + row, mask=is_row, other=-1)
    has_adapter = row_slot >= 0
    row_entry = (row_slot.to(tl.int64) * L + layer) * M + module
    row_rank = tl.load(rank_table + row_entry, mask=has_adapter, other=0)
    row_scale = tl.load(scale_table + row_entry, mask=row_rank > 0, other=0.0)
    max_rank = tl.max(row_rank, 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v_part = planes + i * plane_module_stride
    for first_rank in tl.range(0, max_rank, BLOCK_R, num_stages=1):
        ranks = first_rank + tl.arange(0, BLOCK_R)
        v = own_planes(v_part, read_row, ranks, row_rank, row_scale, plane_stride, plane_row_stride, NUM_PLANES)
        if HALVES_V:
            # One bfloat16 contains 8 bits of v. A second one contains the next 8.
            high = v.to(tl.bfloat16)
            low = (v - high.to(tl.float32)).to(tl.bfloat16).to(B_DTYPE)
            high = high.to(B_DTYPE)
        else:
            high = v
            low = v
        # Each step loads B for the next step. An address takes three dependent lookups, so the slot and its offset are
        # read in still earlier steps.
        slot = listed_slot(adapter_slots, split, num_adapters)
        next_slot = listed_slot(adapter_slots, split + SPLITS, num_adapters)
        third_slot = listed_slot(adapter_slots, split + 2 * SPLITS, num_adapters)
        rank, offset = entry_of(off, rank_table, slot, layer, module, L, M)
        b = rows_of_b(pool, page_table, slot, offset + begin, layer, padded_len, ranks, rank, L, E, MAX_PAGES, BLOCK_N)
        rank, offset = entry_of(off, rank_table, next_slot, layer, module, L, M)
        for listed in tl.range(split, num_adapters, SPLITS, num_stages=1):
            next_b = rows_of_b(
                pool, page_table, next_slot, offset + begin, layer, padded_len, ranks, rank, L, E, MAX_PAGES, BLOCK_N
            )
            is_own = (row_slot == slot)[:, None]
            factors = widened(b).to(high.dtype)
            total = tl.dot(tl.where(is_own, high, 0.0), factors, total, input_precision="tf32x3")
            if HALVES_V:
                total = tl.dot(tl.where(is_own, low, 0.0), factors, total, input_precision="tf32x3")
            b = next_b
            rank, offset = entry_of(off, rank_table, third_slot, layer, module, L, M)
            slot = next_slot
            next_slot = third_slot
            third_slot = listed_slot(adapter_slots, listed + 3 * SPLITS, num_adapters)

    is_out = is_row[:, None] & is_column[None, :]
    at = row[:, None] * TOTAL_OUT + out_column[None, :]
    is_last = split == 0
    if SPLITS > 1:
        tl.store(sums + split * num_rows * TOTAL_OUT + at, total, mask=is_out)
        # All threads have stored their part before one of them counts the program.
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            # Add in a fixed order, so that the output does not depend on which program is last. Other programs wrote
            # most of these sums, so they are read from the L2 cache.
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for s in tl.range(0, SPLITS, num_stages=1):
                total += tl.load(sums + s * num_rows * TOTAL_OUT + at, mask=is_out, other=0.0, cache_modifier=".cg")
            # The next launch counts from 0 again.
            tl.store(counters + block, 0)
        if HAS_BIAS:
            total += tl.load(bias + out_column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        affine = tl.load(off + row_entry * 3 + 2, mask=row_rank > 0, other=-1)
        if tl.max(affine, 0) >= 0:
            has_affine = affine >= 0
            # First the gain, then the shift.
            for part in tl.range(0, 2, num_stages=1):
                e = affine + part * padded_len + begin
                chunk = chunks_of(pool, page_table, row_slot, e, layer, has_affine, L, E, MAX_PAGES)
                values = tl.load(chunk[:, None] + tl.arange(0, BLOCK_N)[None, :], mask=has_affine[:, None], other=0)
                values = widened(values).to(tl.float32)
                factor = tl.where(part == 0, total, 1.0)
                total += tl.where(has_affine[:, None], values * factor, 0.0)
        tl.store(y + at, total.to(y.dtype.element_ty), mask=is_out)


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """Compile-time parameters of a launch. The grid is `num_blocks` blocks of columns by `num_splits`.

    `first_blocks[i]` is the first block of module `i`, and `padded_lens[i]` is the length of its rows of B in the
    stream.
    """

    num_blocks: int
    first_blocks: tuple[int, ...]
    padded_lens: tuple[int, ...]
    num_splits: int
    split_len: int
    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int


@lru_cache(maxsize=4096)
def linear_plan(
    group: ModuleGroup, page_elements: int, num_rows: int, itemsize: int, num_processors: int, num_splits: int = 0
) -> LinearPlan:
    """Plan a launch for `num_rows` rows of `itemsize` bytes per element, on `num_processors` multiprocessors.

    By default, blocks of columns are divided into a power of two of sums so that there are at most 1.5 programs per
    multiprocessor.
    """
    layouts = [row_layout(out_features, page_elements) for out_features in group.out_features]
    block_m = max(16, triton.next_power_of_2(num_rows))
    widest = MAX_COLUMNS // 2 if block_m == MAX_ROWS else MAX_COLUMNS
    block_n = min(widest, *(layout.chunk_len for layout in layouts))
    first_blocks, num_blocks = [], 0
    for layout in layouts:
        first_blocks.append(num_blocks)
        num_blocks += -(-layout.row_len // block_n)
    if not num_splits:
        most = min(num_processors * 3 // 2 // num_blocks, group.in_features // MIN_SPLIT_LEN)
        num_splits = power_of_two_within(max(1, most)) if num_blocks <= MAX_COUNTERS else 1
    # Rows of 128 bytes, and at most 96 KiB of shared memory, which every supported GPU has.
    block_k = 128 // itemsize
    stages = 3 if block_m == MAX_ROWS else 4
    return LinearPlan(
        num_blocks=num_blocks,
        first_blocks=tuple(first_blocks),
        padded_lens=tuple(layout.padded_len for layout in layouts),
        num_splits=num_splits,
        split_len=-(-group.in_features // (num_splits * block_k)) * block_k,
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        stages=stages,
        num_warps=8 if block_m >= 64 else 4,
    )


def lora_linear(
    pool: PoolViews,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    planes: torch.Tensor,
    call: LoraCall,
    slots: torch.Tensor,
    plan: LinearPlan,
    counters: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """`y[t] = x[t] @ weightᵀ + bias`, then `y[t, columns of i] += scale * v[t, i] @ B[slot, modules[i]]ᵀ` with
    `v = planes.sum(0)[..., :rank]`, then the adapter's affines, as `lora_expand` does.

    Everything is summed in float32 and rounded once.

    - `x` `[T, in_features]` with `1 <= T <= MAX_ROWS`, last axis contiguous; `weight` `[total_out, in_features]`,
      contiguous; `bias` `[total_out]` or None; all in bfloat16, float16 or float32. The result `[T, total_out]` has the
      dtype of `x`.
    - `pool`, `planes` and `call` as for `lora_expand`. The group's modules cover all columns, and it is not a group of
      experts. B is finite: each row is multiplied with every B of the batch, but with factors of 0 except its own.
    - `call.segments.adapters` int32 `[N]` with N of at most MAX_ROWS: each slot of the batch once, then -1.
    - `slots` int32 `[T]`: each row's slot, or -1 for rows without an adapter.
    - `counters` int32 `[MAX_COUNTERS]`: 0, and 0 again after the launch. Launches that share it must not overlap.
    - `pdl` overlaps the launch with the previous kernel, which must be `lora_shrink(pdl=True, may_start_early=False)`
      with the same `x`; requires compute capability 9 or later.

    Nothing waits for the device.
    """
    group, tables, adapters = call.group, call.tables, call.segments.adapters
    num_rows, num_planes = x.shape[0], planes.shape[0]
    total_out = group.total_out
    assert adapters is not None
    assert num_rows <= MAX_ROWS
    assert adapters.shape[0] <= MAX_ROWS
    assert x.stride(1) == planes.stride(3) == 1
    assert weight.is_contiguous()
    assert weight.shape == (total_out, group.in_features)
    assert not group.expert_stride
    _, num_layers, page_elements = pool.adapter.shape
    y = torch.empty(num_rows, total_out, dtype=x.dtype, device=x.device)
    sums = y
    if plan.num_splits > 1:
        sums = torch.empty(plan.num_splits, num_rows, total_out, dtype=torch.float32, device=x.device)
    halves_v = halves_planes(pool.adapter.dtype, x.dtype)
    launch = overlapping(pdl)
    lora_linear_kernel[plan.num_blocks, plan.num_splits](
        x, weight, weight if bias is None else bias, y, sums, counters, planes,
        pool.adapter, tables.page_table, tables.off, tables.rank, tables.scale, slots, adapters,
        call.layer, num_rows, adapters.shape[0], x.stride(0), planes.stride(0), planes.stride(1), planes.stride(2),
        MODULES=group.modules, FIRST_BLOCKS=plan.first_blocks, OUT=group.out_features, OUT_OFFSETS=group.out_offsets,
        PADDED=plan.padded_lens, NUM_MODULES=len(group.modules), TOTAL_OUT=total_out,
        OUT_ALIGNMENT=math.gcd(plan.block_n, *group.out_offsets), IN=group.in_features,
        L=num_layers, M=tables.rank.shape[2], MAX_PAGES=tables.page_table.shape[1], E=page_elements,
        NUM_PLANES=num_planes, SPLITS=plan.num_splits, SPLIT_LEN=plan.split_len,
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
        BLOCK_R=16 if planes.shape[3] <= 16 else 32, ADAPTERS=MAX_ROWS,
        STAGES=plan.stages, DOT_DTYPE=dot_dtype(x.dtype, weight.dtype),
        B_DTYPE=tl.bfloat16 if IS_COMPILED else tl.float32, HALVES_V=halves_v, HAS_BIAS=bias is not None, PDL=pdl,
        num_warps=plan.num_warps, maxnreg=MAX_REGISTERS, enable_fp_fusion=True, **launch,
    )  # fmt: skip
    return y
