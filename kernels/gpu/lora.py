"""What shrink and expand on the GPU share: device helpers, and what a launch may rely on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.layout import PageGeometry, row_layout
from loramux.kernels.segments import LARGE_SEGMENT_ROWS, SEGMENT_ROWS
from loramux.kernels.tables import ModuleGroup, Segments

TILE_ROWS = SEGMENT_ROWS
"""Rows of a tile where segments are short: each segment is one."""

MIN_CHUNK = 16
"""The shortest chunk that tensor cores take."""

TARGET_PROGRAMS = 528
"""Programs that fill the card: four on each of an H200's 132 multiprocessors."""

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


def supports_pdl(device: torch.device) -> bool:
    """Whether a launch on `device` may overlap the end of the one before (programmatic dependent launch)."""
    has_calls = IS_COMPILED and hasattr(tl.extra.cuda, "gdc_wait")
    return has_calls and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def is_decode_shaped(num_tokens: int, num_segments: int) -> bool:
    """Whether segments of one row are worth their own code: there is room for a segment a row, as in decodes.

    It decides speed only; launches of either shape serve segments of any length.
    """
    return num_segments >= num_tokens


def tile_rows(segments: Segments) -> int:
    """Rows of a tile: A and B are read once for each."""
    return LARGE_SEGMENT_ROWS if segments.max_rows >= LARGE_SEGMENT_ROWS else TILE_ROWS


def power_of_two_within(number: int) -> int:
    """The largest power of two up to `number`, which is at least 1.

    What launches are compiled for is rounded to these, so that batches of many sizes share few programs.
    """
    return 1 << (number.bit_length() - 1)
