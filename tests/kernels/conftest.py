"""A pool whose every unused element is NaN, filled with random adapters that the tests also keep dense."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch

from loramux.kernels.cpu import CpuKernels
from loramux.kernels.dispatch import Kernels
from loramux.kernels.layout import LinearShape, PageGeometry, adapter_layout, row_layout
from loramux.kernels.reference import ReferenceKernels
from loramux.kernels.tables import AdapterTables, PoolViews
from tests.kernels.interpreted import DEVICE, HAS_GPU, import_kernels, run_interpreted

MAX_INTERPRETED = 6
"""Cases of one test that the interpreter runs in full."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of a sweep to the campaign where the GPU's kernels are interpreted, a thousand times slower.

    One case in 23 stays: no axis has as many values, so a large sweep meets each value of each axis.
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


def poisoned_pool(num_pages: int, geometry: PageGeometry, dtype: torch.dtype) -> PoolViews:
    """A pool of NaN: all bits set is NaN in both dtypes."""
    raw = torch.full((num_pages, geometry.num_layers, geometry.page_bytes), 0xFF, dtype=torch.uint8)
    return PoolViews(raw=raw, kv=raw.view(dtype), adapter=raw.view(dtype), geometry=geometry)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPool:
    """Resident adapters in pages, and dense: A `[rank, in]` and Bᵀ `[rank, out]` by slot, layer and module."""

    pool: PoolViews
    tables: AdapterTables
    a: dict[tuple[int, int, int], torch.Tensor]
    b: dict[tuple[int, int, int], torch.Tensor]


def adapter_pool(
    modules: Sequence[LinearShape],
    ranks: npt.NDArray[np.int32],
    geometry: PageGeometry,
    dtype: torch.dtype,
) -> AdapterPool:
    """Fill shuffled pages with random adapters of `ranks` `[num_slots, num_layers, num_modules]`."""
    num_slots = ranks.shape[0]
    layouts = [adapter_layout(geometry, modules, slot_ranks) for slot_ranks in ranks]
    longest = max(layout.num_pages for layout in layouts) + 1
    # Unused entries of a table name the last page, which holds only NaN.
    poison = sum(layout.num_pages for layout in layouts)
    pool = poisoned_pool(poison + 1, geometry, dtype)
    free = torch.randperm(poison, dtype=torch.int32)
    page_table = torch.full((num_slots, longest), poison, dtype=torch.int32)
    a, b = {}, {}
    for slot, layout in enumerate(layouts):
        page_table[slot, : layout.num_pages], free = free[: layout.num_pages], free[layout.num_pages :]
        for layer in range(geometry.num_layers):
            for m, module in enumerate(modules):
                for half, (dense, row_len) in enumerate(((a, module.in_features), (b, module.out_features))):
                    rows = torch.randn(int(ranks[slot, layer, m]), row_len).to(dtype)
                    dense[slot, layer, m] = rows.float()
                    padded_len = row_layout(row_len, geometry.adapter_elements).padded_len
                    starts = int(layout.offsets[layer, m, half]) + torch.arange(rows.shape[0]) * padded_len
                    e = starts[:, None] + torch.arange(row_len)
                    page = page_table[slot].long()[e // geometry.adapter_elements]
                    pool.adapter[page, layer, e % geometry.adapter_elements] = rows
    tables = AdapterTables(
        page_table=page_table,
        off=torch.tensor(np.stack([layout.offsets for layout in layouts])),
        rank=torch.tensor(ranks),
        scale=torch.rand(*ranks.shape) + 0.5,
    )
    return AdapterPool(pool, tables, a, b)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers."""
    torch.manual_seed(0)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The pool's dtype."""
    return request.param


CPU_KERNELS = {"reference": ReferenceKernels, "cpu": CpuKernels}


@pytest.fixture(scope="session")
def gpu_module() -> ModuleType:
    """`loramux.kernels.gpu`, compiled where there is a GPU and interpreted where there is none."""
    return import_kernels("gpu")[0]


@pytest.fixture(params=CPU_KERNELS)
def make_cpu_kernels(request: pytest.FixtureRequest) -> Callable[[PoolViews], Kernels]:
    """Each implementation that keeps K and V as the CPU does."""
    return CPU_KERNELS[request.param]


@pytest.fixture(params=[*CPU_KERNELS, "gpu"])
def make_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[PoolViews], Kernels]]:
    """Each implementation: all must meet the tests' own oracle. A test's tensors are made on the kernels' device."""
    if request.param != "gpu":
        yield CPU_KERNELS[request.param]
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
