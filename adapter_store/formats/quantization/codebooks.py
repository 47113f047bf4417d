"""The values of 4-bit and 8-bit floats."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def _e4m3() -> npt.NDArray[np.float32]:
    """float8_e4m3fn: a sign, 4 bits of exponent with bias 7 and 3 bits of mantissa; `0x7f` and `0xff` are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value[code & 127 == 127] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


E4M3 = _e4m3()

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""float4_e2m1, the codes of mxfp4 and nvfp4."""


E8M0 = np.append(2.0 ** np.arange(-127, 128), np.nan).astype(np.float32)
"""float8_e8m0: powers of two, with 8 bits of exponent."""
