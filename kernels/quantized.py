"""A quantised weight: codes of 4 or 8 bits, a codebook, and a scale, and perhaps a minimum, per group of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

INT8 = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
"""Codebook of int8. A code is the value as a byte in two's complement."""

UINT8 = np.arange(256, dtype=np.float32)
"""Codebook of unsigned 8-bit values, with zero points."""

INT4 = np.arange(16, dtype=np.float32) - 8
"""Codebook of int4. A code is the value plus 8."""

UINT4 = np.arange(16, dtype=np.float32)
"""Codebook of unsigned 4-bit values, with zero points."""


def _e4m3() -> npt.NDArray[np.float32]:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value[code & 127 == 127] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


E4M3 = _e4m3()
"""float8_e4m3fn: a sign, 4 bits of exponent with bias 7 and 3 bits of mantissa; `0x7f` and `0xff` are NaN."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedWeight:
    """`weight[o, i] = (codebook[code[o, i]] - zeros[o, i // group]) * scales[o, i // group] + minima[o, i // group]`,
    computed in float32.

    `codes` uint8 contains `[out, in]` codes of 8 bits, or `[out, in / 2]` pairs of codes of 4 bits, with the even input
    in the lower four bits. `codebook` float32 has 256 or 16 values, which are finite for all codes in use. `scales`
    float32 `[out, in / group]` are finite. With a scale per channel, one group covers all inputs. `zeros` int16 has the
    shape of `scales`, in units of the codebook, or is None if all are 0. `minima` float32 has the shape of `scales` and
    is finite, or is None if all are 0. A weight has zero points or minima, not both: with minima, a group's values need
    not include 0. Raises ValueError if shapes disagree.
    """

    codes: npt.NDArray[np.uint8]
    codebook: npt.NDArray[np.float32]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.int16] | None = None
    minima: npt.NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if self.codebook.shape not in ((16,), (256,)):
            raise ValueError(f"a codebook has 16 or 256 values, not {self.codebook.size}")
        if self.codes.ndim != 2 or self.scales.ndim != 2 or self.scales.shape[0] != self.out_features:
            raise ValueError(f"scales {list(self.scales.shape)} do not fit codes {list(self.codes.shape)}")
        if not self.scales.shape[1] or self.in_features % self.scales.shape[1]:
            raise ValueError(f"{self.scales.shape[1]} groups do not divide {self.in_features} inputs")
        if self.bits == 4 and self.group % 2:
            raise ValueError(f"groups of {self.group} inputs split a pair of 4-bit codes")
        if self.zeros is not None and self.zeros.shape != self.scales.shape:
            raise ValueError(f"zero points {list(self.zeros.shape)} do not fit scales {list(self.scales.shape)}")
        if self.minima is not None and self.minima.shape != self.scales.shape:
            raise ValueError(f"minima {list(self.minima.shape)} do not fit scales {list(self.scales.shape)}")
        if self.zeros is not None and self.minima is not None:
            raise ValueError("a weight has zero points or minima, not both")

    @property
    def bits(self) -> int:
        return 4 if self.codebook.size == 16 else 8

    @property
    def shape(self) -> tuple[int, ...]:
        return self.out_features, self.in_features

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.in_features // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        shifts = sum(0 if shift is None else shift.nbytes for shift in (self.zeros, self.minima))
        return self.codes.nbytes + self.scales.nbytes + shifts

    def outputs(self, indices: npt.NDArray[np.intp]) -> QuantizedWeight:
        """The weight of some outputs, in the order of `indices`."""
        return replace(
            self,
            codes=self.codes[indices],
            scales=self.scales[indices],
            zeros=None if self.zeros is None else self.zeros[indices],
            minima=None if self.minima is None else self.minima[indices],
        )

    def inputs(self, begin: int, end: int) -> QuantizedWeight:
        """The weight of inputs `[begin, end)`. A group that covers all inputs covers these.

        Raises ValueError if the inputs are not whole groups otherwise, or if they split a pair of 4-bit codes.
        """
        has_one_group = self.scales.shape[1] == 1
        unit = 8 // self.bits if has_one_group else self.group
        if begin % unit or end % unit:
            raise ValueError(f"inputs {begin} to {end} are not whole groups of {unit}")
        groups = slice(None) if has_one_group else slice(begin // unit, end // unit)
        return replace(
            self,
            codes=np.ascontiguousarray(self.codes[:, begin * self.bits // 8 : end * self.bits // 8]),
            scales=np.ascontiguousarray(self.scales[:, groups]),
            zeros=None if self.zeros is None else np.ascontiguousarray(self.zeros[:, groups]),
            minima=None if self.minima is None else np.ascontiguousarray(self.minima[:, groups]),
        )

    def dequantize(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.float32]:
        """The float32 weights of outputs `[begin, end)`. They define the result of every product with the weight."""
        codes, scales = self.codes[begin:end], self.scales[begin:end]
        if self.bits == 4:
            # Look up both codes of a byte at once: a complex64 has the bytes of two float32 values.
            pairs = np.stack([np.tile(self.codebook, 16), np.repeat(self.codebook, 16)], axis=1)
            values = pairs.view(np.complex64).reshape(-1).take(codes).view(np.float32)
        else:
            values = self.codebook.take(codes)
        grouped = values.reshape(*scales.shape, self.group)
        if self.zeros is not None:
            grouped -= self.zeros[begin:end, :, None]
        grouped *= scales[:, :, None]
        if self.minima is not None:
            grouped += self.minima[begin:end, :, None]
        return values


def is_float16(values: npt.NDArray[np.float32]) -> bool:
    """True if float16 represents all values exactly."""
    with np.errstate(over="ignore"):
        return np.array_equal(values.astype(np.float16).astype(np.float32), values)


def is_same_codebook(first: QuantizedWeight, second: QuantizedWeight) -> bool:
    return np.array_equal(first.codebook, second.codebook, equal_nan=True)


class CodeKind(Enum):
    """How codes become values: by arithmetic on integers or on the bits of a float, or with a table."""

    INTEGERS = "integers"
    E4M3 = "e4m3"
    TABLE = "table"


def code_kind(codebook: npt.NDArray[np.float32]) -> CodeKind | None:
    """The kind of a codebook, or None if the kernels do not support it.

    8-bit codebooks other than integers and E4M3 are not supported, nor are 4-bit codebooks with a non-finite value.
    """
    if any(np.array_equal(codebook, integers) for integers in (INT8, UINT8, INT4, UINT4)):
        return CodeKind.INTEGERS
    if codebook.size == 16:
        return CodeKind.TABLE if np.isfinite(codebook).all() else None
    return CodeKind.E4M3 if np.array_equal(codebook, E4M3, equal_nan=True) else None


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Concatenate the outputs of all parts into one weight.

    Returns None if their codebooks or groups differ, or if some have zero points and others minima.
    """
    first = parts[0]
    if any(part.group != first.group or not is_same_codebook(part, first) for part in parts):
        return None
    if len(parts) == 1:
        return first
    zeros = minima = None
    if any(part.zeros is not None for part in parts):
        zeros = np.concatenate([np.zeros_like(p.scales, np.int16) if p.zeros is None else p.zeros for p in parts])
    if any(part.minima is not None for part in parts):
        minima = np.concatenate([np.zeros_like(p.scales) if p.minima is None else p.minima for p in parts])
    if zeros is not None and minima is not None:
        return None
    return QuantizedWeight(
        codes=np.concatenate([part.codes for part in parts]),
        codebook=first.codebook,
        scales=np.concatenate([part.scales for part in parts]),
        zeros=zeros,
        minima=minima,
    )
