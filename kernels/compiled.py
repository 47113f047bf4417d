"""How the CPU's kernels are compiled by numba."""

from __future__ import annotations

from typing import Any

import numba
from numba.core import extending

from loramux.kernels import threads as _threads  # noqa: F401  the threading layer is chosen before anything compiles

_FLAGS = {"contract", "reassoc", "nsz", "arcp"}
"""Sums may be reordered, but NaN and infinity keep their meaning: a row that is not finite is found by its logits."""

helper: Any = numba.njit(fastmath=_FLAGS, error_model="numpy")
"""Decorates a function that kernels call."""

kernel: Any = numba.njit(parallel=True, cache=True, fastmath=_FLAGS, error_model="numpy", nogil=True)
"""Decorates a function that Python calls. Compiled code is kept on disk, keyed by the file of the kernel alone: after a
change to a helper in another file, remove `__pycache__`."""

exact: Any = numba.njit(fastmath={"contract", "nsz"}, error_model="numpy")
"""Decorates a helper whose sums must stay in their order."""

intrinsic: Any = extending.intrinsic
"""Decorates a function that types a call and returns what generates its LLVM code."""
