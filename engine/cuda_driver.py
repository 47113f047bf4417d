"""Whether this installation can use a GPU of this machine, asked without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

DRIVER = "libcuda.so.1"


def missing_for_cuda() -> str | None:
    """What keeps `--device cuda` from working, as a sentence with the remedy; None where nothing is missing."""
    if count_gpus() == 0:
        return "the device 'cuda' needs an NVIDIA GPU and its driver, and none was found: use --device cpu"
    if not torch_has_cuda():
        return (
            "the device 'cuda' needs a PyTorch built for CUDA, and the installed one is for CPUs: "
            "make the virtual environment with CONSTRAINTS=constraints-cuda.txt, or use --device cpu"
        )
    return None


def count_gpus() -> int:
    """The GPUs that NVIDIA's driver shows to this process; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, by the file that says so."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return False
    return states_cuda(text)


def states_cuda(version_file: str) -> bool:
    """Whether the text of torch's `version.py` names a CUDA version, as `cuda: Optional[str] = '13.0'` does."""
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", version_file, re.MULTILINE) is not None
