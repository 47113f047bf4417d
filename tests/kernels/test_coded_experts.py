"""Products with quantised experts on each device, compared with products with the dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from loramux.kernels.cpu.instructions.integer_blocks import IS_SUPPORTED
from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.cpu.linear.coded_experts import make_coded_experts
from loramux.kernels.gpu.linear.coded_weights import place_codes
from loramux.kernels.layout import PageGeometry
from loramux.kernels.quantized import INT4, INT8, UINT4, QuantizedWeight
from loramux.kernels.reference.experts import multiply_experts
from loramux.kernels.routing import StackedExperts
from loramux.kernels.routing_spec import RoutingSpec
from loramux.kernels.tables import PoolViews
from tests.kernels.cpu.codebooks import MXFP4, NF4, Shift, random_weight

needs_codes = pytest.mark.skipif(not IS_SUPPORTED, reason="this CPU has no kernels for quantised weights")
CODEBOOKS: dict[str, tuple[np.ndarray, Shift | None]] = {
    "int8": (INT8, None),
    "uint4-zeros": (UINT4, "zeros"),
    "uint4-halves": (UINT4, "halves"),
    "mxfp4": (MXFP4, None),
    "nf4": (NF4, None),
}


@pytest.fixture
def kernels(make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., PoolViews]) -> Any:
    made = make_kernels(make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32))
    if isinstance(made, CpuKernels) and not IS_SUPPORTED:
        pytest.skip("this CPU has no kernels for quantised weights")
    return made


def random_experts(name: str, num_experts: int, *shape: int) -> list[QuantizedWeight]:
    return [random_weight(*CODEBOOKS[name], *shape) for _ in range(num_experts)]


def multiply(
    kernels: Any, weights: list[QuantizedWeight], bias: torch.Tensor, x: torch.Tensor, spec: RoutingSpec
) -> Any:
    """The product with the codes, and the product with the dequantised weights."""
    routing = kernels.route(torch.randn(len(x), spec.num_experts), spec)
    if isinstance(kernels, CpuKernels):
        experts: Any = make_coded_experts(len(weights), weights, bias)
    else:
        experts = place_codes(weights, len(weights), bias, x.device)
    dequantized = torch.stack([torch.from_numpy(weight.dequantize()).to(x.device) for weight in weights])
    return kernels.multiply_experts(x, experts, routing), multiply_experts(
        x, StackedExperts(dequantized, bias), routing
    )


@pytest.mark.parametrize("make_kernels", ["cpu", "gpu"], indirect=True)
@pytest.mark.parametrize("name", CODEBOOKS)
@pytest.mark.parametrize(
    ("num_rows", "spec", "shape"),
    [
        pytest.param(1, RoutingSpec(4, 2, True), (40, 64, 32), id="one-row"),
        pytest.param(23, RoutingSpec(5, 3, True), (70, 96, 32), id="more-rows-than-a-tile"),
        pytest.param(130, RoutingSpec(3, 2, True), (33, 80, 80), id="large-tiles"),
        pytest.param(0, RoutingSpec(4, 2, True), (16, 64, 64), id="no-rows"),
    ],
)
def test_each_pair_is_multiplied_by_its_expert(
    name: str, num_rows: int, spec: RoutingSpec, shape: tuple[int, int, int], kernels: Any
) -> None:
    weights = random_experts(name, spec.num_experts, *shape)
    x = torch.randn(num_rows, shape[1] + 8)[:, :-8]
    y, expected = multiply(kernels, weights, torch.randn(spec.num_experts, shape[0]), x, spec)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=2e-4 * max(1.0, float(np.abs(CODEBOOKS[name][0]).max())))


@needs_codes
def test_a_row_does_not_depend_on_the_other_rows(make_poisoned_pool: Callable[..., PoolViews]) -> None:
    """This holds on a CPU. On a GPU, it holds only among batches of the same shape."""
    kernels = CpuKernels(make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32))
    spec = RoutingSpec(8, 3, True)
    first = make_coded_experts(8, random_experts("int8", 8, 96, 64, 32), None)
    second = make_coded_experts(8, random_experts("mxfp4", 8, 64, 96, 32), torch.randn(8, 64))
    assert first is not None
    assert second is not None
    x, logits = torch.randn(60, 64), torch.randn(60, 8)

    def run(rows: slice) -> torch.Tensor:
        routing = kernels.route(logits[rows], spec)
        y = kernels.multiply_experts(kernels.multiply_experts(x[rows], first, routing), second, routing)
        return kernels.sum_experts(y, routing, None, None)

    whole = run(slice(0, 60))
    for row in range(60):
        assert torch.equal(run(slice(row, row + 1))[0], whole[row])


TINY_SCALE = np.float32(2.0**-127)
"""What MXFP4 stores for a block of zeros. float16 does not represent it."""


@needs_codes
@pytest.mark.parametrize("wide", [0, 1, 2])
@pytest.mark.parametrize("name", ["int8", "uint4-halves", "mxfp4"])
def test_scales_and_minima_of_one_expert_can_need_32_bits(
    name: str, wide: int, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    kernels = CpuKernels(make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32))
    weights = random_experts(name, 3, 40, 64, 32)
    for weight in weights:
        weight.scales[:] = weight.scales.astype(np.float16)
    weights[wide].scales[0, 0] = TINY_SCALE
    if wide == 1 and weights[2].minima is not None:
        weights[2].minima[:] += 1e-7
    y, expected = multiply(kernels, weights, torch.randn(3, 40), torch.randn(5, 64), RoutingSpec(3, 3, True))
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=2e-4)


@needs_codes
def test_some_experts_can_have_minima(make_poisoned_pool: Callable[..., PoolViews]) -> None:
    kernels = CpuKernels(make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32))
    shifted = random_experts("uint4-zeros", 3, 40, 64, 32)
    weights = [shifted[0], replace(shifted[1], zeros=None), shifted[2]]
    y, expected = multiply(kernels, weights, torch.randn(3, 40), torch.randn(5, 64), RoutingSpec(3, 3, True))
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=2e-4)


@needs_codes
@pytest.mark.parametrize(
    "other",
    [random_weight(UINT4, "zeros", 4, 64, 32), random_weight(INT4, None, 4, 64, 16), torch.zeros(4, 64)],
    ids=["other-codebook", "other-groups", "floats"],
)
def test_experts_that_differ_have_no_product(other: QuantizedWeight | torch.Tensor) -> None:
    assert make_coded_experts(2, [random_weight(INT4, None, 4, 64, 32), other], None) is None
