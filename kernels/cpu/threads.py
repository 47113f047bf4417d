"""One pool of threads for torch and numba, which both use torch's libgomp.

Start a process that runs these kernels with `OMP_WAIT_POLICY=passive` and `GOMP_SPINCOUNT=10000`: idle threads then
spin for about 0.2 ms and sleep. Without the count they sleep at once, and waking them costs each of a step's dozens of
parallel regions 0.1 ms. Without the policy they keep spinning, and where another program uses the cores, a region may
wait for a time slice of the scheduler.

Where numba finds no libgomp of the system, it falls back to slower threads: install `libgomp1`. GNU OpenMP does not
survive a fork: a process that has run a kernel must not fork and run kernels in the child. `subprocess` and the `spawn`
start method are fine.
"""

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
