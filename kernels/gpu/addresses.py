"""Where the rows of an adapter lie in the pages, as the GPU's LoRA kernels read them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.layout import PageGeometry, row_layout
from loramux.kernels.tables import ModuleGroup

MIN_CHUNK = 16
"""The shortest chunk that tensor cores take."""

POOL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def pick(index: tl.tensor, VALUES: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """`VALUES[index]` of a tuple of `COUNT` numbers known when the kernel is compiled."""
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
    """Where the stream elements `e` of one adapter lie in the pool; `pages` is the adapter's row of the page table.

    `e` fits 32 bits, as the offsets do; the pool may be larger than that.
    """
    page = tl.load(pages + e // E, mask=is_read, other=0).to(tl.int64)
    # Chunks are at least 16 elements and aligned to their length, so that 16 bytes can be read at a time.
    return tl.multiple_of(pool + (page * (L * E) + layer * E + e % E), 16)


IS_COMPILED = isinstance(pick, triton.JITFunction)
"""False under TRITON_INTERPRET, which multiplies bfloat16 as if its bits were integers."""


def check_geometry(geometry: PageGeometry, group: ModuleGroup, dtype: torch.dtype) -> None:
    """Refuse what the kernels do not take, when a model is loaded rather than in a launch.

    Raises ValueError for an adapter dtype other than bfloat16, float16 and float32, and for pages so small that a
    chunk is shorter than 16 elements.
    """
    if dtype not in POOL_DTYPES:
        raise ValueError(f"adapters are {dtype}; the GPU's kernels take bfloat16, float16 and float32")
    # An embedding's A is read one element at a time.
    row_lens = group.out_features if group.is_embedding else (group.in_features, *group.out_features)
    for row_len in row_lens:
        chunk_len = row_layout(row_len, geometry.adapter_elements).chunk_len
        if chunk_len < MIN_CHUNK:
            raise ValueError(
                f"pages of {geometry.adapter_elements} elements a layer cut rows of {row_len} into chunks of "
                f"{chunk_len}; the GPU's kernels need at least {MIN_CHUNK}"
            )
