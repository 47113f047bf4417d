"""Launch parameters of the GPU's kernels: tile and grid sizes of the LoRA kernels, and whether launches can overlap.

A kernel with `pdl` may start when all programs of the previous kernel have ended or called `gdc_launch_dependents`
(programmatic dependent launch). Every one of its programs calls `gdc_wait`, which returns when the previous kernel has
ended. Before that, it reads only what no kernel of a step writes: weights, tables, adapter pages and the step's inputs.
So when it has ended, all earlier kernels have ended too.
"""

from __future__ import annotations

import torch
import triton.language as tl

from loramux.kernels.gpu.addresses import IS_COMPILED
from loramux.kernels.segments import LARGE_SEGMENT_ROWS, SEGMENT_ROWS
from loramux.kernels.tables import Segments

TILE_ROWS = SEGMENT_ROWS
"""Rows per tile if segments are short. Each segment is then one tile."""

TARGET_PROGRAMS = 528
"""Number of programs that fill the GPU: four on each of an H200's 132 multiprocessors."""


MAX_GRID_ROWS = 65535
"""Largest size of a grid's second and third axes (CUDA C++ Programming Guide, "Compute Capabilities")."""


def whole_grid(num_segments: int) -> int:
    """The smallest number of segments, at least `num_segments`, that `segment_grid` can divide between two axes."""
    layers = max(1, -(-num_segments // MAX_GRID_ROWS))
    return -(-num_segments // layers) * layers


def segment_grid(num_segments: int) -> tuple[int, int]:
    """The sizes of the second and third axes of a grid over segments.

    A program's segment is `program_id(1) + program_id(2) * num_programs(1)`.
    """
    layers = -(-num_segments // MAX_GRID_ROWS)
    assert num_segments % layers == 0
    return num_segments // layers, layers


def supports_pdl(device: torch.device) -> bool:
    """True if a launch on `device` may overlap the end of the previous launch (programmatic dependent launch)."""
    has_calls = IS_COMPILED and hasattr(tl.extra.cuda, "gdc_wait")
    return has_calls and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapping(pdl: bool) -> dict[str, bool]:
    """Triton's launch option with which a kernel may start before the previous one has ended."""
    return {"launch_pdl": True} if pdl else {}


def is_decode_shaped(num_tokens: int, num_segments: int) -> bool:
    """True if each row could be its own segment, as in decode.

    Segments then have few rows. This affects only speed: either kind of launch supports segments of any length.
    """
    return num_segments >= num_tokens


def tile_rows(segments: Segments) -> int:
    """Rows per tile. A and B are read once for each tile. Tiles of a single row do not use tensor cores."""
    if segments.max_rows == 1:
        return 1
    return LARGE_SEGMENT_ROWS if segments.max_rows >= LARGE_SEGMENT_ROWS else TILE_ROWS


def expert_list(segments: Segments) -> torch.Tensor:
    """The segments' experts. Without experts, the slots take their place, and the kernel ignores them."""
    return segments.slots if segments.experts is None else segments.experts


def power_of_two_within(number: int) -> int:
    """The largest power of two that is at most `number`. `number` must be at least 1.

    Compile-time parameters are rounded down with this function, so that batches of many sizes share few programs.
    """
    return 1 << (number.bit_length() - 1)
