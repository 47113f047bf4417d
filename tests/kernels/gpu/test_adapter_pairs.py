from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.kernels.gpu.interpreted import DEVICE, HAS_GPU, import_kernels, run_interpreted
from tests.kernels.test_expert_adapters import SLOTS
from tests.kernels.test_expert_adapters import test_each_pair_gets_the_adapter_of_its_row_and_expert as check

launches, adapter_pairs, kernels = import_kernels("launches", "adapter_pairs", "kernels")


@pytest.mark.parametrize(("num_segments", "grid"), [(1, (1, 1)), (65535, (65535, 1)), (65536, (32768, 2))])
def test_a_grid_has_a_place_for_each_segment(num_segments: int, grid: tuple[int, int]) -> None:
    assert launches.segment_grid(launches.whole_grid(num_segments)) == grid


def test_segments_beyond_the_limit_of_a_grid_are_computed(
    monkeypatch: pytest.MonkeyPatch, make_adapter_pool: Callable[..., Any]
) -> None:
    """As in a step of 8,192 tokens with eight experts each."""
    monkeypatch.setattr(launches, "MAX_GRID_ROWS", 4)
    if not HAS_GPU:
        run_interpreted(monkeypatch)
    with DEVICE:
        check(SLOTS["mixed"], kernels.GpuKernels, make_adapter_pool)
