"""Compilation of the CPU kernels by numba.

numba compiles a kernel once for each combination of argument types. `CpuKernels` rejects unexpected dtypes and layouts,
because they would trigger a compilation in the middle of a step. `loramux.kernels.cpu.warm` compiles everything before
the first engine starts, in one or two minutes, and later processes load the result from `__pycache__`. If that folder
is not writable, they use `~/.cache/loramux` (or `loramux` below `XDG_CACHE_HOME`). `NUMBA_CACHE_DIR` chooses another.

Helpers are compiled for each combination of types, too, and a large one takes seconds. A literal such as 0 has a type
of its own, and the index of a parallel loop is unsigned. Large helpers therefore receive `np.int64(0)` and
`np.int64(index)`.

numba applies its fast-math flags to the code of intrinsics too, unless that code sets its own flags. A function that
depends on the order of its operations, such as `exponentials`, must therefore be called from an `exact` function.
`emit_multiply_add` keeps its order everywhere.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding  # type: ignore[import-untyped]
from numba.core import codegen, extending

from loramux.kernels.cpu.instructions import threads as _threads  # noqa: F401  the threading layer is chosen first

FOLDER = Path(__file__).parents[1]
"""The folder of all CPU kernels."""


def cache_directory() -> Path:
    """Directory of the compiled code. Its name includes a hash of the sources of all CPU kernels.

    A kernel is therefore recompiled even if only a helper in another file changes. numba itself checks only the
    kernel's own file.
    """
    hashed = hashlib.sha256()
    for path in _sources():
        hashed.update(path.read_bytes())
    return FOLDER / "__pycache__" / f"numba-{hashed.hexdigest()[:16]}"


def _sources() -> list[Path]:
    return sorted([*FOLDER.rglob("*.py"), FOLDER.parent / "layout.py"])


_config: Any = numba.config


def cpu_features() -> frozenset[str]:
    """LLVM's names for the CPU features that numba targets: `NUMBA_CPU_FEATURES` or, by default, this CPU's."""
    said = _config.CPU_FEATURES
    features = codegen.get_host_cpu_features() if said is None else said
    return frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))


def completion_mark(permits_tiles: bool) -> Path:
    """The file that exists once every kernel is compiled for this CPU, Python and numba.

    Its name contains a hash of everything that numba looks code up by, such as the time of each source file, and
    whether Linux permits AMX (`has_amx`). Without permission, as in some sandboxes, products with tiles are not
    compiled.
    """
    sources = [(str(path), os.stat(path).st_mtime_ns) for path in _sources()]
    cpu = (_config.CPU_NAME or binding.get_host_cpu_name(), sorted(cpu_features()))
    known = repr((sys.implementation.cache_tag, numba.__version__, cpu, permits_tiles, sources))
    return Path(_config.CACHE_DIR) / f"complete-{hashlib.sha256(known.encode()).hexdigest()[:16]}"


def code_directory(own: Path, chosen: str | None, caches: Path) -> Path:
    """Directory of the compiled code, which always has the name of `own`, the directory in the package.

    `chosen` is the value of NUMBA_CACHE_DIR, which may end in that name. `caches` is used if `own` is not writable:
    numba's own choice would be a directory whose code of earlier versions it would load.
    """
    if chosen:
        return Path(chosen) if Path(chosen).name == own.name else Path(chosen) / own.name
    try:
        own.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=own).close()
    except OSError:
        return caches / own.name
    return own


_caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
_config.CACHE_DIR = str(code_directory(cache_directory(), _config.CACHE_DIR, Path(_caches) / "loramux"))

_FLAGS = {"contract", "reassoc", "nsz", "arcp"}
"""Sums may be reordered, but NaN and infinity keep their meaning, so that non-finite rows show up in the logits."""

helper: Any = numba.njit(fastmath=_FLAGS, error_model="numpy")
"""Decorates a function that kernels call."""

kernel: Any = numba.njit(parallel=True, cache=True, fastmath=_FLAGS, error_model="numpy", nogil=True)
"""Decorates a function that Python calls, or that has parallel loops. Its compiled code is cached on disk."""

operation: Any = numba.cfunc(
    numba.types.void(numba.types.int64, numba.types.int64, numba.types.int64),
    cache=True,
    fastmath=_FLAGS,
    error_model="numpy",
)
"""Compiles a function of three int64 values, which kernels call by its `address`."""

exact: Any = numba.njit(fastmath={"contract", "nsz"}, error_model="numpy")
"""Decorates a helper whose sums must keep their order."""

intrinsic: Any = extending.intrinsic
"""Decorates a function that types a call and returns the generator of the call's LLVM code."""
