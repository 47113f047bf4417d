"""The sigmoid function, for kernels in several files."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    # The exponential of a negative number cannot overflow.
    decay = tl.exp2(tl.abs(x) * -1.4426950408889634)
    return tl.where(x < 0, decay, 1.0) / (1 + decay)
