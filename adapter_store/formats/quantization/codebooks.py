"""The values of 4-bit floats and of 8-bit exponents."""

from __future__ import annotations

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""float4_e2m1, the codes of mxfp4 and nvfp4."""

E8M0 = np.append(2.0 ** np.arange(-127, 128), np.nan).astype(np.float32)
"""float8_e8m0: powers of two with an 8-bit exponent, and NaN."""
