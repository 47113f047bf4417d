"""How the CPU's kernels are compiled by numba.

numba compiles a kernel for each combination of argument types. `CpuKernels` refuses other dtypes and layouts, since
they would compile in the middle of a step. `python -m loramux.kernels.cpu.warm` compiles everything beforehand, in
about 65 s, and later processes load the result from `__pycache__`. Where neither that folder nor the home directory can
be written, set `NUMBA_CACHE_DIR`.

numba applies its fast-math flags to the code of intrinsics too, unless that code sets its own. A function whose order
must hold, like `exponentials`, is therefore called from one that is `exact`; `emit_multiply_add` keeps it everywhere.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numba
from numba.core import codegen, extending

from loramux.kernels.cpu import threads as _threads  # noqa: F401  the threading layer is chosen before anything compiles

FOLDER = Path(__file__).parent


def cache_directory() -> Path:
    """Where compiled code is kept: named after the sources of all kernels, since numba itself only looks at one file.

    A kernel whose helper changed in another file is therefore compiled again.
    """
    hashed = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.py"), FOLDER.parent / "layout.py"]):
        hashed.update(path.read_bytes())
    return FOLDER / "__pycache__" / f"numba-{hashed.hexdigest()[:16]}"


_config: Any = numba.config


def cpu_features() -> frozenset[str]:
    """What numba compiles for, by LLVM's names: what this CPU has, or what `NUMBA_CPU_FEATURES` says."""
    said = _config.CPU_FEATURES
    features = codegen.get_host_cpu_features() if said is None else said
    return frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))


# Where the folder cannot be written, numba falls back to its own places.
_config.CACHE_DIR = _config.CACHE_DIR or str(cache_directory())

_FLAGS = {"contract", "reassoc", "nsz", "arcp"}
"""Sums may be reordered, but NaN and infinity keep their meaning: a row that is not finite is found by its logits."""

helper: Any = numba.njit(fastmath=_FLAGS, error_model="numpy")
"""Decorates a function that kernels call."""

kernel: Any = numba.njit(parallel=True, cache=True, fastmath=_FLAGS, error_model="numpy", nogil=True)
"""Decorates a function that Python calls, or that has parallel loops; compiled code is kept on disk."""

exact: Any = numba.njit(fastmath={"contract", "nsz"}, error_model="numpy")
"""Decorates a helper whose sums must stay in their order."""

intrinsic: Any = extending.intrinsic
"""Decorates a function that types a call and returns what generates its LLVM code."""
