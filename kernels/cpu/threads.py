"""One pool of threads for torch and numba."""

from __future__ import annotations

from typing import Any

import numba
import torch

_config: Any = numba.config

# torch is imported before numba starts its threads, so the OpenMP layer finds torch's libgomp already loaded and both
# share one pool; the other layers would make a second pool whose idle threads spin against the first.
_config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def set_num_threads(num_threads: int) -> None:
    """Use `num_threads` threads in torch and in the kernels, for calls from this thread.

    Raises ValueError when the number is not in `[1, cores numba may use]`.
    """
    most = _config.NUMBA_NUM_THREADS
    if not 1 <= num_threads <= most:
        raise ValueError(f"the number of threads must lie in [1, {most}], got {num_threads}")
    # The first call starts numba's threads, which sets OpenMP's number, and so torch's, to all cores.
    numba.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)
