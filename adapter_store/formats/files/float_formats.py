"""Float conversions in numpy, which has no bfloat16: bfloat16 values are stored as the upper 16 bits of float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.kernels.quantized import E4M3

STORAGE: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""The numpy dtype that stores values of each safetensors dtype that a base's floats may use."""

ADAPTER_STORAGE: dict[str, np.dtype[Any]] = {
    **STORAGE,
    "F64": np.dtype("<f8"),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2"), np.dtype("u1")),
}
"""The numpy dtype that stores values of each safetensors dtype that an adapter may use."""

_BLOCK_ELEMENTS = 1 << 20


def to_float32(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Convert values stored in `ADAPTER_STORAGE[dtype]` to float32, exactly, except that F64 is rounded.

    May return `values` itself.
    """
    if dtype == "BF16":
        bits = values.astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    if dtype == "F8_E4M3":
        return np.asarray(E4M3[values], np.float32)
    if dtype == "F8_E5M2":
        # These are the upper 8 bits of float16.
        half = values.astype(np.uint16)
        half <<= np.uint16(8)
        return half.view(np.float16).astype(np.float32)
    if dtype == "F64":
        with np.errstate(over="ignore"):
            return values.astype(np.float32)
    return values.astype(np.float32, copy=False)


def to_bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Convert finite float32 values to bfloat16 bits, rounding to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = np.empty(bits.shape, np.uint16)
    into, source = rounded.reshape(-1), bits.reshape(-1)
    # Work in blocks, because a head can take hundreds of megabytes, and the conversion makes several copies.
    for begin in range(0, source.size, _BLOCK_ELEMENTS):
        block = source[begin : begin + _BLOCK_ELEMENTS]
        rounding = np.uint32(0x7FFF) + ((block >> 16) & 1)
        into[begin : begin + _BLOCK_ELEMENTS] = (block + rounding) >> 16
    return rounded


def to_pool_dtype(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Convert finite float32 values to a pool's `dtype`: `float32`, or the bits of `bfloat16`."""
    return values if dtype == "float32" else to_bfloat16_bits(values)
