"""Fixtures for every implementation of the kernels, with pools whose unused elements are NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from loramux.kernels.dispatch import Kernels
from loramux.kernels.tables import PoolViews
from tests.kernels.gpu.interpreted import DEVICE, HAS_GPU, import_kernels, run_interpreted
from tests.kernels.implementations import CPU_KERNELS, cpu_kernels
from tests.kernels.pools import AdapterPool, adapter_pool, poisoned_pool

MAX_INTERPRETED = 6


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of a sweep to the campaign if GPU kernels are interpreted.

    Interpreted kernels are a thousand times slower. One case in 23 still runs. Every axis has fewer than 23 values, so
    a large sweep still covers all values of each axis.
    """
    if HAS_GPU:
        return
    sweeps: dict[str, list[pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("make_kernels") == "gpu":
            sweeps.setdefault(item.nodeid.split("[")[0], []).append(item)
    for sweep in sweeps.values():
        if len(sweep) > MAX_INTERPRETED:
            for index, item in enumerate(sweep):
                if index % 23 != 5:
                    item.add_marker(pytest.mark.campaign)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed torch, so that every run of a test draws the same random numbers."""
    if HAS_GPU:
        torch.manual_seed(0)
    else:
        # For devices that are not there, torch would keep the whole stack each time.
        torch.default_generator.manual_seed(0)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.uint8], ids=["float32", "bfloat16", "fp8"])
def adapter_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtype of a pool's adapters. uint8 elements are FP8 codes."""
    return request.param


@pytest.fixture(scope="session")
def gpu_module() -> ModuleType:
    """The module `loramux.kernels.gpu.kernels`, compiled if there is a GPU and interpreted otherwise."""
    return import_kernels("kernels")[0]


@pytest.fixture(params=CPU_KERNELS)
def make_cpu_kernels(request: pytest.FixtureRequest) -> Callable[[PoolViews], Kernels]:
    """Creates kernels over a pool. Tests run once per implementation that stores K and V in the CPU's layout."""
    return cpu_kernels(request.param)


@pytest.fixture(params=[*CPU_KERNELS, "gpu"])
def make_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[PoolViews], Kernels]]:
    """Creates kernels over a pool. Tests run once per implementation, with new tensors on the kernels' device."""
    if request.param != "gpu":
        yield cpu_kernels(request.param)
        return
    module = request.getfixturevalue("gpu_module")
    if not HAS_GPU:
        run_interpreted(monkeypatch)
    with DEVICE:
        yield module.GpuKernels


@pytest.fixture
def make_adapter_pool() -> Callable[..., AdapterPool]:
    return adapter_pool


@pytest.fixture
def make_poisoned_pool() -> Callable[..., PoolViews]:
    return poisoned_pool
