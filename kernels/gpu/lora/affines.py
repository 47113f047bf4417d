"""Gains and shifts of adapters on the GPU, without a product of A and B."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.launches import segment_grid
from loramux.kernels.gpu.lora.expand import with_affine
from loramux.kernels.layout import row_layout
from loramux.kernels.tables import LoraCall, PoolViews


@triton.jit(do_not_specialize=["layer", "module"])
def affine_kernel(
    y: tl.tensor,
    pool: tl.tensor,
    page_table: tl.tensor,
    off: tl.tensor,
    segment_rows: tl.tensor,
    segment_starts: tl.tensor,
    segment_slots: tl.tensor,
    layer: tl.tensor,
    module: tl.tensor,
    y_stride: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    L: tl.constexpr,
    M: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program handles one segment and BLOCK_N columns."""
    begin = tl.program_id(0) * BLOCK_N
    segment = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    slot = tl.load(segment_slots + segment).to(tl.int64)
    if slot < 0:
        return
    affine = tl.load(off + ((slot * L + layer) * M + module) * 3 + 2)
    if affine < 0:
        return
    affine += begin
    pages = page_table + slot * MAX_PAGES
    column = begin + tl.arange(0, BLOCK_N)
    is_column = column < WIDTH
    row = tl.load(segment_starts + segment)
    end = tl.load(segment_starts + segment + 1)
    # A tensor, as all callers of `with_affine` pass.
    padded_len = begin * 0 + PADDED
    while row < end:
        at = y + tl.load(segment_rows + row).to(tl.int64) * y_stride + column
        total = tl.load(at, mask=is_column).to(tl.float32)
        total = with_affine(total, pool, pages, affine, layer, padded_len, is_column, L, E, BLOCK_N)
        tl.store(at, total.to(y.dtype.element_ty), mask=is_column)
        row += 1


def lora_affine(pool: PoolViews, call: LoraCall, y: torch.Tensor) -> None:
    """`y[t] = y[t] + gain * y[t] + shift` for each row `t` of each segment whose adapter has an affine of the module.

    - `pool.adapter` bfloat16, float16 or float32 `[P, L, E]`, contiguous; `layout.py` describes an affine.
    - `call` as for `lora_shrink`, with a group of one module.
    - `y` bfloat16, float16 or float32 `[T, group.total_out]`, last axis contiguous: read, summed in float32 and rounded
      once. Other rows keep their bits.

    The call allocates nothing and does not wait for the device. One program serves all layers and modules of a width.
    """
    tables, segments = call.tables, call.segments
    if not segments.num_segments:
        return
    assert y.stride(1) == 1
    (width,), (module,) = call.group.out_features, call.group.modules
    _, num_layers, page_elements = pool.adapter.shape
    layout = row_layout(width, page_elements)
    affine_kernel[-(-width // layout.chunk_len), *segment_grid(segments.num_segments)](
        y, pool.adapter, tables.page_table, tables.off,
        segments.rows, segments.starts, segments.slots, call.layer, module, y.stride(0),
        WIDTH=width, PADDED=layout.padded_len, L=num_layers, M=tables.off.shape[2],
        MAX_PAGES=tables.page_table.shape[1], E=page_elements, BLOCK_N=layout.chunk_len, num_warps=4,
    )  # fmt: skip
