"""Float conversions in numpy, which has no bfloat16: such values are held as their upper 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

STORAGE: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""The numpy dtype that holds each safetensors dtype that adapters may use."""


def to_float32(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Values of a safetensors dtype, held as `STORAGE` says, as float32; exact."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def to_bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Finite float32 values as bfloat16 bits, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return ((bits + rounding) >> 16).astype(np.uint16)
