"""The block types of GGUF files, decoded to codes and scales. Their values equal those of llama.cpp in float32.

Each row consists of blocks of 32 or 256 values. A block of 256 has scales, and for some types minima, of 8 or 16 groups
in fewer bits, in units of one or two float16 values of the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.files.float_formats import STORAGE
from loramux.adapter_store.formats.quantization.codebooks import E2M1, E8M0
from loramux.kernels.quantized import INT4, INT8, UINT4, QuantizedWeight

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The codebook of IQ4_NL and IQ4_XS."""

_CHUNK_ELEMENTS = 1 << 22
"""Number of values that are decoded at a time, so that the intermediate arrays stay small."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Blocks as codes `[blocks, bytes]`, with scales and perhaps minima `[blocks, groups]`."""

    codes: Bytes
    scales: Floats
    minima: Floats | None = None


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type with `size` values in `num_bytes` bytes. Its codes index `codebook`; `group` values share a scale."""

    size: int
    num_bytes: int
    codebook: npt.NDArray[np.float32]
    group: int
    decode: Callable[[Bytes], Decoded]

    @property
    def code_bits(self) -> int:
        return 4 if self.codebook.size == 16 else 8


def _float16(data: Bytes) -> Floats:
    """Float16 values in bytes `[blocks, 2 * n]`, as float32 `[blocks, n]`."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _paired(nibbles: Bytes, num_halves: int) -> Bytes:
    """Repack bytes whose lower and upper four bits are codes of two consecutive runs of values.

    `nibbles` `[blocks, num_halves, n]`: the lower bits of n bytes are n consecutive codes, and the upper bits are the
    next n. In the result, each byte has two neighbours, the first in the lower bits.
    """
    words = np.ascontiguousarray(nibbles).view("<u2").reshape(len(nibbles), num_halves, -1)
    packed = np.empty((len(nibbles), num_halves, 2, words.shape[2]), np.uint8)
    packed[:, :, 0] = (words & 0x0F) | (words >> 4 & 0xF0)
    packed[:, :, 1] = (words >> 4 & 0x0F) | (words >> 8 & 0xF0)
    return packed.reshape(len(nibbles), -1)


def _runs(nibbles: Bytes, num_halves: int) -> Bytes:
    """Unpack the bytes that `_paired` describes into one code per byte."""
    parts = nibbles.reshape(len(nibbles), num_halves, 1, -1) >> np.array([0, 4], np.uint8)[:, None]
    codes: Bytes = (parts & np.uint8(15)).reshape(len(nibbles), -1)
    return codes


def _bits(data: Bytes, width: int) -> Bytes:
    """Fields of `width` bits `[blocks, 8 / width, bytes]`: field k of all bytes before field k + 1."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (data[:, None, :] >> shifts) & np.uint8((1 << width) - 1)


def _fifth_bits(data: Bytes) -> Bytes:
    """32 bits, lowest first, in four bytes, each as the fifth bit of a code."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(block: Bytes) -> Decoded:
    return Decoded(_paired(block[:, None, 2:], 1), _float16(block[:, :2]))


def _q4_1(block: Bytes) -> Decoded:
    return Decoded(_paired(block[:, None, 4:], 1), _float16(block[:, :2]), _float16(block[:, 2:4]))


def _q5_0(block: Bytes) -> Decoded:
    codes = _runs(block[:, 6:], 1) | _fifth_bits(block[:, 2:6])
    # A code is the byte of the value in two's complement.
    return Decoded(codes - np.uint8(16), _float16(block[:, :2]))


def _q5_1(block: Bytes) -> Decoded:
    codes = _runs(block[:, 8:], 1) | _fifth_bits(block[:, 4:8])
    return Decoded(codes, _float16(block[:, :2]), _float16(block[:, 2:4]))


def _q8_0(block: Bytes) -> Decoded:
    return Decoded(block[:, 2:], _float16(block[:, :2]))


def _q2_k(block: Bytes) -> Decoded:
    factors, codes, units = block[:, :16], block[:, 16:80], _float16(block[:, 80:84])
    scales, minima = units[:, :1] * (factors & 15), units[:, 1:] * (factors >> 4)
    # Each half of the block has 32 bytes, and each byte has codes of four values that are 32 apart.
    fields = _bits(codes.reshape(-1, 32), 2).reshape(len(block), -1)
    return Decoded(_neighbours(fields), scales.astype(np.float32), -minima.astype(np.float32))


def _q3_k(block: Bytes) -> Decoded:
    high, low, packed, unit = block[:, :32], block[:, 32:96], block[:, 96:108], _float16(block[:, 108:])
    scales = _runs(packed[:, :8], 1) | _bits(packed[:, 8:], 2).reshape(len(block), -1) << np.uint8(4)
    fields = _bits(low.reshape(-1, 32), 2).reshape(len(block), -1)
    is_high = _bits(high, 1).reshape(len(block), -1)
    # The value is the field, or 4 less where the high bit is 0. A code of INT4 is the value plus 8.
    codes = fields + np.uint8(4) + (is_high << np.uint8(2))
    return Decoded(_neighbours(codes), unit * (scales.astype(np.float32) - 32))


def _q4_k(block: Bytes) -> Decoded:
    scales, minima = _scales_and_minima(block[:, :16])
    return Decoded(_paired(block[:, 16:].reshape(-1, 4, 32), 4), scales, minima)


def _q5_k(block: Bytes) -> Decoded:
    scales, minima = _scales_and_minima(block[:, :16])
    fifth = _bits(block[:, 16:48], 1).reshape(len(block), -1) << np.uint8(4)
    return Decoded(_runs(block[:, 48:], 4) | fifth, scales, minima)


def _q6_k(block: Bytes) -> Decoded:
    low, high, factors, unit = block[:, :128], block[:, 128:192], block[:, 192:208], _float16(block[:, 208:])
    codes = _runs(low, 2) | _bits(high.reshape(-1, 32), 2).reshape(len(block), -1) << np.uint8(4)
    return Decoded(codes - np.uint8(32), unit * np.ascontiguousarray(factors).view(np.int8))


def _iq4_xs(block: Bytes) -> Decoded:
    high = np.ascontiguousarray(block[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = (block[:, 4:8, None] >> np.array([0, 4], np.uint8)) & 15
    scales = low.reshape(len(block), 8) | (high.astype(np.uint8) & 3) << np.uint8(4)
    return Decoded(
        _paired(block[:, 8:].reshape(-1, 8, 16), 8), _float16(block[:, :2]) * (scales.astype(np.float32) - 32)
    )


def _mxfp4(block: Bytes) -> Decoded:
    return Decoded(_paired(block[:, None, 1:], 1), E8M0.take(block[:, :1]))


def _scales_and_minima(start: Bytes) -> tuple[Floats, Floats]:
    """The scales and minima of Q4_K and Q5_K: two float16 units, then eight pairs of 6-bit factors in 12 bytes."""
    units = _float16(start[:, :4])
    first, second, rest = start[:, 4:8], start[:, 8:12], start[:, 12:16]
    scales = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=1)
    minima = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=1)
    return units[:, :1] * scales.astype(np.float32), -(units[:, 1:] * minima.astype(np.float32))


def _neighbours(codes: Bytes) -> Bytes:
    packed: Bytes = codes[:, 1::2] << np.uint8(4)
    packed |= codes[:, ::2]
    return packed


BLOCK_TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType(32, 18, INT4, 32, _q4_0),
    "Q4_1": BlockType(32, 20, UINT4, 32, _q4_1),
    "Q5_0": BlockType(32, 22, INT8, 32, _q5_0),
    "Q5_1": BlockType(32, 24, INT8, 32, _q5_1),
    "Q8_0": BlockType(32, 34, INT8, 32, _q8_0),
    "Q2_K": BlockType(256, 84, UINT4, 16, _q2_k),
    "Q3_K": BlockType(256, 110, INT4, 16, _q3_k),
    "Q4_K": BlockType(256, 144, UINT4, 32, _q4_k),
    "Q5_K": BlockType(256, 176, INT8, 32, _q5_k),
    "Q6_K": BlockType(256, 210, INT8, 16, _q6_k),
    "IQ4_NL": BlockType(32, 18, IQ4, 32, _q4_0),
    "IQ4_XS": BlockType(256, 136, IQ4, 32, _iq4_xs),
    "MXFP4": BlockType(32, 17, E2M1, 32, _mxfp4),
}
"""The supported types of quantised tensors. Codes with 5 and 6 bits become bytes."""


def can_store(dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether the blocks of a supported type divide the rows of a tensor."""
    return dtype in STORAGE or (bool(shape) and shape[-1] % BLOCK_TYPES[dtype].size == 0)


def stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    if dtype in STORAGE:
        return math.prod(shape) * STORAGE[dtype].itemsize
    block = BLOCK_TYPES[dtype]
    return math.prod(shape) // block.size * block.num_bytes


def read_blocks(dtype: str, stored: Bytes, rows: int, columns: int) -> QuantizedWeight:
    """Decode a matrix of `rows` rows. Raises ValueError for a scale or minimum that is not finite."""
    kind = BLOCK_TYPES[dtype]
    blocks = stored.reshape(rows, columns // kind.size, kind.num_bytes)
    codes = np.empty((rows, columns * kind.code_bits // 8), np.uint8)
    scales = np.empty((rows, columns // kind.group), np.float32)
    minima: Floats | None = None
    chunk = max(1, _CHUNK_ELEMENTS // columns)
    for begin in range(0, rows, chunk):
        end = min(begin + chunk, rows)
        with np.errstate(invalid="ignore", over="ignore"):
            # Products with a unit that is not finite are found below.
            found = kind.decode(blocks[begin:end].reshape(-1, kind.num_bytes))
        codes[begin:end] = found.codes.reshape(end - begin, -1)
        scales[begin:end] = found.scales.reshape(end - begin, -1)
        if found.minima is not None:
            minima = np.empty_like(scales) if minima is None else minima
            minima[begin:end] = found.minima.reshape(end - begin, -1)
    if not np.isfinite(scales).all() or not (minima is None or np.isfinite(minima).all()):
        raise ValueError("a block has a scale that is not finite")
    if minima is None:
        return QuantizedWeight(codes=codes, codebook=kind.codebook, scales=scales)
    return QuantizedWeight(codes=codes, codebook=kind.codebook, scales=scales, minima=minima)
