"""Checks whether this installation can use the machine's GPU, without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from loramux.kernels.gpu.capability import capability_problem

DRIVER = "libcuda.so.1"

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""The environment variable that restricts a process to some GPUs and renumbers them from 0."""

CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""Device attributes, numbered as in `CUdevice_attribute` of cuda.h."""

COMPILERS_PATHS = ("CPATH", "C_INCLUDE_PATH")
"""Environment variables that name further directories of headers."""


def missing_for_cuda(gpus: Iterable[int] = (0,)) -> str | None:
    """Explain in one sentence why `--device cuda` cannot work and how to fix it. Return None if it can work.

    `gpus` are the numbers of the GPUs that engines would use.
    """
    if count_gpus() == 0:
        return "the device 'cuda' needs an NVIDIA GPU and its driver, but no usable GPU was found: use --device cpu"
    if not torch_has_cuda():
        return (
            "the device 'cuda' needs a PyTorch built for CUDA, but the installed one is for CPUs only: "
            "create the virtual environment with CONSTRAINTS=constraints-cuda.txt, or use --device cpu"
        )
    capabilities = ((gpu, capability_of(gpu)) for gpu in gpus)
    problems = (capability_problem(found, gpu) for gpu, found in capabilities if found is not None)
    return next(filter(None, problems), None)


def missing_for_triton() -> str | None:
    """Explain in one sentence why Triton cannot build the C extension with which it loads programs. Return None if it
    can.
    """
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    if any(cache.glob("*/cuda_utils*")):
        # Triton has built it already.
        return None
    install = f"install gcc, libc6-dev and python{sys.version_info.major}.{sys.version_info.minor}-dev"
    remedy = f"{install} (their names on Debian and Ubuntu), or use --device cpu"
    chosen = os.environ.get("CC")
    if not any(map(shutil.which, ("gcc", "clang") if chosen is None else shlex.split(chosen)[:1])):
        return f"the device 'cuda' needs a C compiler, because Triton builds a C extension: {remedy}"
    # The same choice as in `triton.runtime.build`.
    scheme = sysconfig.get_default_scheme()
    headers = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    if not (headers / "Python.h").exists() and not any(name in os.environ for name in COMPILERS_PATHS):
        return f"the device 'cuda' needs Python's C headers, but {headers} has no Python.h: {remedy}"
    return None


def count_gpus() -> int:
    driver = _opened_driver()
    count = ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def visible_gpus(indices: Iterable[int], environment: Mapping[str, str]) -> str:
    """Return the value of VISIBLE_GPUS with which another process sees only the GPUs that have these indices here."""
    inherited = environment.get(VISIBLE_GPUS)
    names = None if inherited is None else inherited.split(",")
    return ",".join(str(index) if names is None else names[index].strip() for index in indices)


def capability_of(gpu: int) -> tuple[int, int] | None:
    """Compute capability (major, minor) of the GPU with this number, or None if the driver does not report it."""
    driver = _opened_driver()
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), gpu) != 0:
        return None
    for value, attribute in ((major, CAPABILITY_MAJOR), (minor, CAPABILITY_MINOR)):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0:
            return None
    return major.value, minor.value


def _opened_driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def torch_has_cuda() -> bool:
    """True if the installed torch was built for CUDA, according to its `version.py`."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return False
    return states_cuda(text)


def states_cuda(version_file: str) -> bool:
    """True if the text of torch's `version.py` names a CUDA version, as `cuda: Optional[str] = '13.0'` does."""
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", version_file, re.MULTILINE) is not None
