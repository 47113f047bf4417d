"""Vectors as bytes, in the number formats and byte orders of vLLM's `embed_dtype` and `endianness`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.files.float_formats import to_bfloat16_bits, to_float32

NumberFormat: TypeAlias = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
ByteOrder: TypeAlias = Literal["native", "little", "big"]

_ORDERS: dict[ByteOrder, Literal["=", "<", ">"]] = {"native": "=", "little": "<", "big": ">"}
_LARGEST_FLOAT16 = float(np.finfo(np.float16).max)
_LARGEST_BFLOAT16 = float(to_float32(np.array([0x7F7F], np.uint16), "BF16")[0])


def _magnitudes(dtype: str, num_codes: int) -> npt.NDArray[np.float32]:
    """Return the finite values of a format of 8 bits that are not negative, in the order of their codes."""
    return to_float32(np.arange(num_codes, dtype=np.uint8), dtype)


_E4M3 = _magnitudes("F8_E4M3", 127)
_E5M2 = _magnitudes("F8_E5M2", 124)


def vector_bytes(vector: npt.NDArray[Any], number_format: NumberFormat, byte_order: ByteOrder) -> bytes:
    """Encode a vector of finite numbers, one after the other. `native` is the byte order of the server's machine.

    Numbers are rounded to nearest, ties to even. A number beyond the format's range becomes the largest of the range.
    """
    values = vector.astype(np.float32)
    encoded: npt.NDArray[Any]
    match number_format:
        case "float32":
            encoded = values
        case "float16":
            encoded = values.clip(-_LARGEST_FLOAT16, _LARGEST_FLOAT16).astype(np.float16)
        case "bfloat16":
            encoded = to_bfloat16_bits(values.clip(-_LARGEST_BFLOAT16, _LARGEST_BFLOAT16))
        case "fp8_e4m3":
            encoded = _codes(values, _E4M3)
        case "fp8_e5m2":
            encoded = _codes(values, _E5M2)
    return encoded.astype(encoded.dtype.newbyteorder(_ORDERS[byte_order])).tobytes()


def _codes(values: npt.NDArray[np.float32], magnitudes: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return the code of the nearest value: a sign, and the position in `magnitudes`."""
    # Halfway between two neighbours is exact in float64.
    halfway = (magnitudes[:-1].astype(np.float64) + magnitudes[1:]) / 2
    sizes = np.abs(values).astype(np.float64)
    codes = np.searchsorted(halfway, sizes)
    is_tie = sizes == halfway[codes.clip(max=len(halfway) - 1)]
    codes += is_tie & (codes % 2 == 1)
    signed: npt.NDArray[np.uint8] = (codes + 128 * np.signbit(values)).astype(np.uint8)
    return signed
