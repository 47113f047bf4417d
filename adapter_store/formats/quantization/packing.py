"""Packs and unpacks 4-bit codes, and changes their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def unpack(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Unpack codes along the last axis, the lower four bits of each byte first."""
    codes = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0])
    np.right_shift(packed, 4, out=codes[..., 1])
    return codes.reshape(*packed.shape[:-1], -1)


def pack(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pack codes along the last axis, the inverse of `unpack`."""
    packed: npt.NDArray[np.uint8] = codes[..., 1::2] << np.uint8(4)
    packed |= codes[..., ::2]
    return packed


def swap_pairs(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Exchange the two codes of each byte."""
    swapped: npt.NDArray[np.uint8] = packed << np.uint8(4)
    swapped |= packed >> np.uint8(4)
    return swapped


def words_as_codes(words: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """Unpack int32 words along the last axis into codes of 4 or 8 bits, lowest bits first, one code per byte."""
    as_bytes = np.ascontiguousarray(words).view(np.uint8)
    return unpack(as_bytes) if bits == 4 else as_bytes
