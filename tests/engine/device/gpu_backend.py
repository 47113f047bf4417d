from __future__ import annotations

import pytest

from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend, DenseLinear, open_backend
from tests.kernels.gpu.interpreted import HAS_GPU, import_kernels, run_interpreted


def gpu_backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Open the GPU backend or, without a GPU, its substitute, which interprets the kernels in host memory."""
    if HAS_GPU:
        return open_backend("cuda")
    run_interpreted(monkeypatch)
    gpu, sampling = import_kernels("kernels", "sampling")
    return Backend(
        accelerator=HostAccelerator(),
        make_kernels=lambda pool, shapes: gpu.GpuKernels(pool),
        make_linear=DenseLinear,
        activation_dtype=None,
        sample_tokens=sampling.sample_tokens,
    )
