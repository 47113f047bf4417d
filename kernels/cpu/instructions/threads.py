"""A single thread pool for torch and numba, which both use torch's libgomp.

Start a process that runs these kernels with `OMP_WAIT_POLICY=passive` and `GOMP_SPINCOUNT=10000`: idle threads then
spin for about 0.2 ms before they sleep. Without the spin count, they sleep immediately, and waking them adds 0.1 ms to
each of a step's dozens of parallel regions. Without the policy, they keep spinning, and if another program uses the
cores, a region may have to wait for a time slice.

Install `libgomp1`: without the system's libgomp, numba falls back to a slower threading layer. GNU OpenMP does not
survive a fork: a process that has run a kernel must not fork and run kernels in the child. `subprocess` and the `spawn`
start method are fine.
"""

from __future__ import annotations

from typing import Any

import numba
import torch

_config: Any = numba.config

# torch is imported before numba starts its threads. The OpenMP layer therefore finds torch's libgomp already loaded,
# and both share one pool. Other threading layers would create a second pool, with idle threads that compete with the
# first.
_config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def set_num_threads(num_threads: int) -> None:
    """Use `num_threads` threads in torch and in the kernels, for calls from this thread.

    Raises ValueError if the number is not in `[1, cores that numba may use]`.
    """
    most = _config.NUMBA_NUM_THREADS
    if not 1 <= num_threads <= most:
        raise ValueError(f"the number of threads must be in [1, {most}], got {num_threads}")
    # Call numba first: its first call starts its threads and sets OpenMP's thread count, and thus torch's, to all
    # cores.
    numba.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)
