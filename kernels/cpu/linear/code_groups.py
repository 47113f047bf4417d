"""A quantised weight in the terms of the CPU kernels: integers, and a scale and perhaps a minimum for each group.

Nothing here imports numba, so that a plan of the memory does not have to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.kernels.quantized import QuantizedWeight, is_float16

LARGEST_CODE = 8191
"""Largest integer of a 4-bit codebook whose values are not multiples of one unit. The error of an NF4 value is at most
`1 / 16382` of the group's largest weight.
"""


@dataclass(frozen=True, slots=True)
class CodeGroups:
    """`weight[o, i] = integers[code[o, i]] * scales[o, i // group] + minima[o, i // group]`.

    `scales` and `minima` `[out, groups]` are each float16 if that is exact for all values, otherwise float32. If all
    minima are 0, `minima` is None.
    """

    integers: npt.NDArray[np.int16]
    scales: npt.NDArray[Any]
    minima: npt.NDArray[Any] | None

    @property
    def nbytes(self) -> int:
        return self.scales.nbytes + (0 if self.minima is None else self.minima.nbytes)


def groups_of(weight: QuantizedWeight) -> CodeGroups | None:
    """The integers, scales and minima of a weight, or None if no integers represent its codebook."""
    found = _integers_of(weight.codebook)
    if found is None:
        return None
    integers, unit = found
    exact_scales = weight.scales.astype(np.float64)
    scales, minima = (exact_scales * unit).astype(np.float32), weight.minima
    if weight.zeros is not None:
        minima = (exact_scales * -weight.zeros.astype(np.float64)).astype(np.float32)
    if weight.bits == 8 and integers.max() > 127:
        # Move the integers from [0, 255] to int8.
        integers = integers - 128
        moved = scales.astype(np.float64) * 128
        minima = (moved if minima is None else moved + minima).astype(np.float32)
    return CodeGroups(integers, _narrowed(scales), None if minima is None else _narrowed(minima))


def _narrowed(values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    return values.astype(np.float16) if is_float16(values) else values


def _integers_of(codebook: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int16], float] | None:
    """Integers and a unit whose products are the values of a codebook (approximately, for 4 bits), or None."""
    values = codebook.astype(np.float64)
    if not np.isfinite(values).all() or not values.any():
        return None
    unit = float(np.abs(values[values != 0]).min())
    multiples = (values / unit).round()
    is_exact = np.allclose(multiples * unit, values, rtol=1e-6, atol=0)
    if codebook.size == 256:
        in_int8, in_uint8 = (multiples.min() >= low and multiples.max() <= low + 255 for low in (-128, 0))
        return (multiples.astype(np.int16), unit) if is_exact and (in_int8 or in_uint8) else None
    if not is_exact or np.abs(multiples).max() > LARGEST_CODE:
        unit = float(np.abs(values).max()) / LARGEST_CODE
        multiples = (values / unit).round()
    return multiples.astype(np.int16), unit
