"""Which quantised weights the GPU kernels support, and how many bytes the weights take. Nothing here needs torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loramux.kernels.quantized import CodeKind, QuantizedWeight, code_kind, is_float16

MAX_STEPS = {4: 64, 8: 128}
"""Maximum number of inputs that a program multiplies at a time, by the size of a code in bits."""

MIN_STEP = 16
"""Minimum number of inputs that tensor cores multiply at a time."""

E4M3_FACTOR = 256
"""The bits of an E4M3 number, used as the sign and the upper bits of a float16, represent the number divided by this
factor.
"""

_MAX_ZEROS = {4: 2**7, 8: 2**15 - 1}
"""Largest zero point that the kernels subtract exactly, by the size of a code in bits."""


def can_place(weight: QuantizedWeight) -> bool:
    """True if the kernels can multiply by the codes of a weight.

    They cannot if the codebook has no `code_kind`, if there are several groups whose size is not a multiple of 16
    inputs, or if there are zero points and either the codebook does not consist of integers or a zero point exceeds
    `_MAX_ZEROS`.
    """
    kind = code_kind(weight.codebook)
    if kind is None or step_of(weight) < MIN_STEP:
        return False
    if weight.zeros is None:
        return True
    largest = int(np.abs(weight.zeros.astype(np.int32)).max()) + zero_of(weight)
    return kind is CodeKind.INTEGERS and largest <= _MAX_ZEROS[weight.bits]


def step_of(weight: QuantizedWeight) -> int:
    """The largest power of two within `MAX_STEPS` that divides the group size.

    With one group for all inputs, the last step may be partial.
    """
    most = MAX_STEPS[weight.bits]
    return most if weight.scales.shape[1] == 1 else min(most, weight.group & -weight.group)


def zero_of(weight: QuantizedWeight) -> int:
    """The offset that makes a codebook of integers non-negative. It is added to the weight's own zero points."""
    return -min(0, int(weight.codebook.min())) if code_kind(weight.codebook) is CodeKind.INTEGERS else 0


def placed_scales(weight: QuantizedWeight) -> npt.NDArray[np.float32]:
    factor = E4M3_FACTOR if code_kind(weight.codebook) is CodeKind.E4M3 else 1
    scaled: npt.NDArray[np.float32] = weight.scales * np.float32(factor)
    return scaled


def is_bfloat16(values: npt.NDArray[np.float32]) -> bool:
    """True if bfloat16 represents all values exactly."""
    return not (values.view(np.uint32) & 0xFFFF).any()


def placed_bytes(weight: QuantizedWeight) -> int:
    """Size in bytes of a weight on a GPU, without the padding of its rows."""
    floats = [placed_scales(weight), *([] if weight.minima is None else [weight.minima])]
    zeros = 0 if weight.zeros is None else weight.zeros.nbytes
    return weight.codes.nbytes + zeros + sum(values.size * _bytes_each(values) for values in floats)


def _bytes_each(values: npt.NDArray[np.float32]) -> int:
    return 2 if is_bfloat16(values) or is_float16(values) else 4
