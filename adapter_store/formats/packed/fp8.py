"""An adapter's A and B as FP8 codes (float8_e4m3fn), with one scale per module.

Each row of A is multiplied by a power of two so that its largest element uses the upper half of FP8's range, and the
row of B transposed of the same rank by the inverse, so the product of A and B stays the same. Then all of B is
multiplied by one power of two, which becomes part of the module's scale. No further scales are stored.

An element's relative error is at most 2**-4 unless it is smaller than `2**-14` of the range of its row of A, or of its
module's B. Smaller elements have an absolute error of at most `2**-18` of that range. The range is a power of two times
448, less than twice the largest element.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterRejected

LARGEST = 448.0
"""Largest finite value of float8_e4m3fn."""

_SMALLEST_NORMAL = 2.0**-6


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Factors:
    """Codes of A uint8 `[rank, in_features]` and of B transposed uint8 `[rank, out_features]`, and the factor, a power
    of two, by which their product has to be multiplied.
    """

    A: npt.NDArray[np.uint8]
    B: npt.NDArray[np.uint8]
    factor: float


def to_fp8_factors(A: npt.NDArray[np.float32], B: npt.NDArray[np.float32]) -> Fp8Factors:
    """Convert a module's finite A `[rank, in_features]` and B transposed `[rank, out_features]`.

    The factor can be too large for float32.
    """
    largest = _largest(A)
    exponents = _exponents(largest)
    # A row of B whose row of A is 0 has no effect, and must not determine the range of the others. float32 cannot
    # contain all products of a large A and a large B.
    exponent = _exponents(np.where(largest > 0, np.ldexp(_largest(B), exponents), 0.0).max(initial=0.0))
    codes_of_A, codes_of_B = np.zeros(A.shape, np.uint8), np.zeros(B.shape, np.uint8)
    # Row by row, because float64 copies of a head's matrices would take gigabytes.
    for r in np.flatnonzero(largest):
        codes_of_A[r] = to_fp8(np.ldexp(A[r].astype(np.float64), -exponents[r]))
        codes_of_B[r] = to_fp8(np.ldexp(B[r].astype(np.float64), exponents[r] - exponent))
    return Fp8Factors(codes_of_A, codes_of_B, float(np.ldexp(1.0, exponent)))


def _largest(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The largest absolute value of each row."""
    largest: npt.NDArray[np.float32] = np.maximum(rows.max(axis=1, initial=0.0), -rows.min(axis=1, initial=0.0))
    return largest.astype(np.float64)


def to_fp8(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Convert values within `[-448, 448]` to codes, rounding to nearest, ties to even."""
    sizes = np.abs(values)
    # The spacing of the codes around a value. A value that rounds up to the next power of two is a multiple of it too.
    _, exponents = np.frexp(np.maximum(sizes, _SMALLEST_NORMAL))
    steps = np.rint(np.ldexp(sizes, 4 - exponents)).astype(np.int32)
    # A normal value has 8 to 16 steps, and each further exponent begins 8 codes later.
    codes: npt.NDArray[np.int32] = steps + 8 * (exponents.astype(np.int32) + 5) + 128 * np.signbit(values)
    return codes.astype(np.uint8)


def not_in_fp8() -> AdapterRejected:
    """The error for adapters that change more than the products of A and B."""
    return AdapterRejected(
        "unsupported_config",
        "this server stores adapters as FP8 codes (adapter_dtype), which cannot represent DoRA, biases, trained norms, "
        "trained rows of the embedding or the head, or a classifier's head",
    )


def _exponents(largest: npt.NDArray[np.floating]) -> npt.NDArray[np.int32]:
    """The smallest exponents `k` with `largest <= 448 * 2**k`; 0 for `largest` 0."""
    fractions, exponents = np.frexp(largest)
    return np.where(largest > 0, exponents - 9 + (fractions > LARGEST / 512), 0).astype(np.int32)
