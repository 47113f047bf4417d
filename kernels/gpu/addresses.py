"""Locates and reads an adapter's rows in the pages, for the GPU's LoRA kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.layout import PageGeometry, row_layout
from loramux.kernels.tables import ModuleGroup

MIN_CHUNK = 16
"""Shortest chunk that tensor cores support, in elements."""

POOL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
"""The dtypes of a pool's adapters. uint8 elements are FP8 codes (float8_e4m3fn)."""


@triton.jit
def pick(index: tl.tensor, VALUES: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """`VALUES[index]` for a tuple of `COUNT` compile-time constants."""
    picked = index * 0 + VALUES[0]
    for i in tl.static_range(1, COUNT):
        picked = tl.where(index == i, VALUES[i], picked)
    return picked


@triton.jit
def chunk_addresses(
    pool: tl.tensor,
    pages: tl.tensor,
    e: tl.tensor,
    layer: tl.tensor,
    is_read: tl.tensor,
    L: tl.constexpr,
    E: tl.constexpr,
) -> tl.tensor:
    """Pool addresses of elements `e` of one adapter's stream. `pages` is the adapter's row of the page table.

    `e` fits in 32 bits, like the offsets. Indices into the pool may need 64 bits.
    """
    page = tl.load(pages + e // E, mask=is_read, other=0).to(tl.int64)
    # Chunks have at least 16 elements and are aligned to their length, so 16 bytes can be read at a time.
    return tl.multiple_of(pool + (page * (L * E) + layer * E + e % E), 16)


@triton.jit
def widened(elements: tl.tensor) -> tl.tensor:
    """Elements of an adapter as values: FP8 codes as float32, exactly, and other dtypes unchanged."""
    values = elements
    if elements.dtype == tl.uint8:
        code = elements.to(tl.int32)
        # A float32 with these bits is 2**-120 times the value. No GPU before compute capability 8.9 converts FP8.
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        FACTOR: tl.constexpr = 2.0**120
        values = bits.to(tl.float32, bitcast=True) * FACTOR
    return values


@triton.jit
def read_a(
    pool: tl.tensor,
    pages: tl.tensor,
    offset: tl.tensor,
    layer: tl.tensor,
    ranks: tl.tensor,
    rank: tl.tensor,
    begin: tl.tensor,
    IN: tl.constexpr,
    PADDED: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Rows `ranks` of A, columns `[begin, begin + BLOCK_K)`. Rows from `rank` on and columns from `IN` on are 0.

    FP8 codes become float32.
    """
    is_read = ranks < tl.where(begin < IN, rank, 0)
    chunk = chunk_addresses(pool, pages, offset + ranks * PADDED + begin, layer, is_read, L, E)
    column = tl.arange(0, BLOCK_K)
    is_column = begin + column < IN
    elements = tl.load(chunk[:, None] + column[None, :], mask=is_read[:, None] & is_column[None, :], other=0)
    return widened(elements)


@triton.jit
def prefetch(chunks: tl.tensor, LENGTH: tl.constexpr) -> None:
    """Prefetch the first `LENGTH` elements of each chunk into the L2 cache."""
    # A cache line has 1,024 bits. This is no global constant, because Triton's key of a program contains the globals of
    # a function that it calls only if another program called it before, so the key would depend on the process.
    CACHE_LINE: tl.constexpr = 1024 // chunks.dtype.element_ty.primitive_bitwidth
    LINE: tl.constexpr = CACHE_LINE if CACHE_LINE < LENGTH else LENGTH
    line = chunks[:, None] + LINE * tl.arange(0, LENGTH // LINE)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


IS_COMPILED = isinstance(pick, triton.JITFunction)
"""False in Triton's interpreter (TRITON_INTERPRET), which multiplies bfloat16 values as if their bits were integers."""


def dot_dtype(x: torch.dtype, weights: torch.dtype) -> tl.dtype:
    """The dtype of operands on tensor cores: a 16-bit dtype if both have it, otherwise float32 (as three tf32
    products). Weights in FP8, whose codes are uint8, take the dtype of `x`, which contains their values.
    """
    if weights is torch.uint8:
        weights = x
    if x is not weights or not IS_COMPILED:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(x, tl.float32)


def halves_planes(pool: torch.dtype, y: torch.dtype) -> bool:
    """Whether a product with B divides planes into two bfloat16 values, because B's values are exact in bfloat16."""
    return pool in (torch.bfloat16, torch.uint8) and y is not torch.float32


def check_geometry(geometry: PageGeometry, group: ModuleGroup, dtype: torch.dtype) -> None:
    """Reject unsupported geometry when a model is loaded rather than at a launch.

    Raises ValueError for an adapter dtype other than bfloat16, float16, float32 or FP8, or for pages so small that a
    chunk is shorter than 16 elements.
    """
    if dtype not in POOL_DTYPES:
        raise ValueError(f"adapters are {dtype}; the GPU kernels support bfloat16, float16, float32 and FP8")
    # An embedding's A is read one element at a time.
    row_lens = group.out_features if group.is_embedding else (group.in_features, *group.out_features)
    for row_len in row_lens:
        chunk_len = row_layout(row_len, geometry.adapter_elements).chunk_len
        if chunk_len < MIN_CHUNK:
            raise ValueError(
                f"pages of {geometry.adapter_elements} elements per layer split rows of {row_len} into chunks of "
                f"{chunk_len}; the GPU kernels need at least {MIN_CHUNK}"
            )
