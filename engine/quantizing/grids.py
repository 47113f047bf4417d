"""Finds the scale and the minimum with which 4-bit codes represent a group of weights best.

Each group gets 16 evenly spaced values. Spreading them from its smallest to its largest weight is seldom the best: a
narrower grid rounds most weights less, at the cost of the few at its ends. Several grids are tried. Each is refined by
least squares: given the codes, the best scale and minimum are the solution of two linear equations.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import prange

from loramux.kernels.cpu.instructions.compiled import helper, kernel
from loramux.kernels.cpu.instructions.vectors import float_bits, float_of_bits

Floats = npt.NDArray[np.float32]

LARGEST = np.float32(15)
"""Largest code."""

SPREADS = np.array([15, 15.7, 16.4, 17.2], np.float32)
"""Numbers of steps into which a group's range is divided at first. Codes beyond the grid are clipped."""

_SMALLEST_NORMAL = np.float32(2.0**-14)
_SUBNORMAL_STEPS = np.float32(2.0**24)


def encode_groups(groups: Floats) -> tuple[npt.NDArray[np.uint8], Floats, Floats]:
    """Encode groups `[num_groups, group]` as `code * scale + minimum`. Return the codes, the scales and the minima.

    Scales and minima are numbers that float16 represents, or too large for it if the weights are. No scale is 0. The
    importance of a weight's squared error is the weight's magnitude plus the root mean square of its group.
    """
    codes = np.empty(groups.shape, np.uint8)
    grids = np.empty((len(groups), 2), np.float32)
    _encode_groups(np.ascontiguousarray(groups), SPREADS, codes, grids)
    return codes, grids[:, 0], grids[:, 1]


@kernel
def _encode_groups(groups: Floats, spreads: Floats, codes: npt.NDArray[np.uint8], grids: Floats) -> None:
    for g in prange(len(groups)):
        weights = groups[g]
        low, high, squares = weights[0], weights[0], np.float32(0)
        for weight in weights:
            low, high = min(low, weight), max(high, weight)
            squares += weight * weight
        base = np.sqrt(squares / np.float32(len(weights)))
        scale, minimum = _nonzero(_half((high - low) / LARGEST)), _half(low)
        least = _error(weights, base, scale, minimum)
        for spread in spreads:
            step = _nonzero((high - low) / spread)
            fitted, shift = _fit(weights, base, step, (low + high - step * LARGEST) / np.float32(2))
            fitted, shift = _nonzero(_half(fitted)), _half(shift)
            error = _error(weights, base, fitted, shift)
            if error < least:
                least, scale, minimum = error, fitted, shift
        for i in range(len(weights)):
            codes[g, i] = np.uint8(_code(weights[i], scale, minimum))
        grids[g, 0], grids[g, 1] = scale, minimum


@helper
def _code(weight: np.float32, scale: np.float32, minimum: np.float32) -> np.float32:
    return min(max(np.rint((weight - minimum) / scale), np.float32(0)), LARGEST)


@helper
def _error(weights: Floats, base: np.float32, scale: np.float32, minimum: np.float32) -> np.float32:
    """The squared error of a grid, weighted by importance."""
    total = np.float32(0)
    for weight in weights:
        error = _code(weight, scale, minimum) * scale + minimum - weight
        total += (base + abs(weight)) * error * error
    return total


@helper
def _fit(weights: Floats, base: np.float32, scale: np.float32, minimum: np.float32) -> tuple[np.float32, np.float32]:
    """The scale and minimum with the smallest weighted squared error for the codes that a grid gives the weights."""
    total, codes, squares, values, products = 0.0, 0.0, 0.0, 0.0, 0.0
    for weight in weights:
        value, code = np.float64(weight), np.float64(_code(weight, scale, minimum))
        importance = np.float64(base) + abs(value)
        total += importance
        codes += importance * code
        squares += importance * code * code
        values += importance * value
        products += importance * code * value
    determinant = total * squares - codes * codes
    # All weights have one code, or are 0.
    if not determinant > 1e-12 * total * squares:
        return scale, minimum
    fitted = (total * products - codes * values) / determinant
    return np.float32(fitted), np.float32((values - fitted * codes) / total)


@helper
def _half(value: np.float32) -> np.float32:
    """The nearest value that float16 represents, ties to even. Large values are only rounded to its precision."""
    if abs(value) < _SMALLEST_NORMAL:
        return np.float32(np.rint(value * _SUBNORMAL_STEPS) / _SUBNORMAL_STEPS)
    bits = float_bits(value)
    return float_of_bits((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF)


@helper
def _nonzero(scale: np.float32) -> np.float32:
    """A scale of 0, from a group of equal weights, becomes 1."""
    return np.float32(1) if scale == 0 else scale
