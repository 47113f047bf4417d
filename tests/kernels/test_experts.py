"""The products of experts and the sum of their outputs, compared with plain loops over tokens and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.cpu.linear.experts import PackedExperts
from loramux.kernels.layout import PageGeometry
from loramux.kernels.routing import StackedExperts
from loramux.kernels.routing_spec import RoutingSpec
from loramux.kernels.tables import PoolViews


@pytest.fixture
def kernels(make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., PoolViews]) -> Any:
    return make_kernels(make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32))


def in_layout(kernels: Any, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """The weights of all experts in the layout of the kernels' device."""
    return PackedExperts(weight, bias) if isinstance(kernels, CpuKernels) else StackedExperts(weight, bias)


@pytest.mark.parametrize(
    ("num_rows", "spec", "size"),
    [
        pytest.param(1, RoutingSpec(4, 2, True), 40, id="one-row"),
        pytest.param(7, RoutingSpec(1, 1, True), 33, id="one-expert"),
        pytest.param(23, RoutingSpec(5, 3, True), 70, id="more-rows-than-a-tile"),
        pytest.param(130, RoutingSpec(3, 2, True), 48, id="large-tiles"),
        pytest.param(130, RoutingSpec(11, 3, True), 48, id="listed-tiles"),
        pytest.param(0, RoutingSpec(4, 2, True), 16, id="no-rows"),
    ],
)
def test_each_pair_is_multiplied_by_its_expert(kernels: Any, num_rows: int, spec: RoutingSpec, size: int) -> None:
    routing = kernels.route(torch.randn(num_rows, spec.num_experts), spec)
    first, second = torch.randn(spec.num_experts, 50, size), torch.randn(spec.num_experts, size, 50)
    x = torch.randn(num_rows, size + 8)[:, :size]
    inner = kernels.multiply_experts(x, in_layout(kernels, first), routing)
    y = kernels.multiply_experts(inner, in_layout(kernels, second), routing)
    assert y.shape == (num_rows * spec.top_k, size)
    for pair in range(num_rows * spec.top_k):
        expert, token = routing.experts.flatten()[pair], pair // spec.top_k
        expected = first[expert].double() @ x[token].double()
        torch.testing.assert_close(inner[pair].double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(y[pair].double(), second[expert].double() @ expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("chosen", [[4], [0, 8], [1, 2, 7]], ids=["one", "first-and-last", "three"])
def test_experts_without_pairs_have_no_tiles(kernels: Any, chosen: list[int]) -> None:
    """All rows choose among a few of nine experts. The tiles of a large step belong to these experts alone."""
    spec = RoutingSpec(9, 1, True)
    logits = torch.full((131, 9), -10.0)
    logits[torch.arange(131), torch.tensor(chosen)[torch.arange(131) % len(chosen)]] = 10.0
    routing = kernels.route(logits, spec)
    weight, x = torch.randn(9, 70, 40), torch.randn(131, 40)
    y = kernels.multiply_experts(x, in_layout(kernels, weight), routing)
    expected = torch.einsum("th,toh->to", x.double(), weight[routing.experts[:, 0].long()].double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("num_rows", [9, 195], ids=["small-tiles", "large-tiles"])
def test_products_in_half_precision(kernels: Any, num_rows: int, dtype: torch.dtype) -> None:
    spec = RoutingSpec(4, 2, True)
    if isinstance(kernels, CpuKernels) and dtype is torch.float16:
        pytest.skip("the CPU has no float16 kernels")
    is_gpu = type(kernels).__name__ == "GpuKernels"
    weight, x = torch.randn(4, 48, 64).to(dtype), torch.randn(num_rows, 64).to(dtype)
    routing = kernels.route(torch.randn(num_rows, 4), spec)
    y = kernels.multiply_experts(x if is_gpu else x.float(), in_layout(kernels, weight), routing)
    rows = x.double().repeat_interleave(2, 0)
    expected = torch.einsum("pi,poi->po", rows, weight.double()[routing.experts.flatten().long()])
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=2e-1)


@pytest.mark.parametrize(("has_shared", "has_gate"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("num_rows", "size"), [(0, 16), (1, 33), (6, 1027), (90, 200)])
def test_outputs_are_summed_by_weight(kernels: Any, num_rows: int, size: int, has_shared: bool, has_gate: bool) -> None:
    routing = kernels.route(torch.randn(num_rows, 5), RoutingSpec(5, 3, False))
    y = torch.randn(num_rows * 3, size)
    shared = gate = None
    expected = (y.double().view(num_rows, 3, size) * routing.weights.double()[..., None]).sum(1)
    if has_shared:
        shared = torch.randn(num_rows, size + 8)[:, 4 : size + 4]
        gate = (torch.randn(num_rows, 6) * 30)[:, 5:] if has_gate else None
        expected += shared.double() * (1 if gate is None else gate.double().sigmoid())
    out = kernels.sum_experts(y, routing, shared, gate)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_the_other_rows(make_poisoned_pool: Callable[..., PoolViews]) -> None:
    """This holds on a CPU. On a GPU, it holds only among batches of the same shape."""
    kernels = CpuKernels(make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32))
    spec = RoutingSpec(8, 3, True)
    first, second = PackedExperts(torch.randn(8, 96, 64)), PackedExperts(torch.randn(8, 64, 48))
    x, router, shared, gate = torch.randn(60, 64), torch.randn(64, 8), torch.randn(60, 64), torch.randn(60, 1)
    logits = x @ router

    def run(rows: slice) -> torch.Tensor:
        routing = kernels.route(logits[rows], spec)
        inner = kernels.silu_and_mul(kernels.multiply_experts(x[rows], first, routing))
        y = kernels.multiply_experts(inner, second, routing)
        return kernels.sum_experts(y, routing, shared[rows], gate[rows])

    whole = run(slice(0, 60))
    for row in range(60):
        assert torch.equal(run(slice(row, row + 1))[0], whole[row])


def test_each_pair_gets_the_bias_of_its_expert(kernels: Any) -> None:
    weight, bias, x = torch.randn(5, 70, 24), torch.randn(5, 70), torch.randn(9, 24)
    routing = kernels.route(torch.randn(9, 5), RoutingSpec(5, 2, True))
    plain = kernels.multiply_experts(x, in_layout(kernels, weight), routing)
    y = kernels.multiply_experts(x, in_layout(kernels, weight, bias), routing)
    torch.testing.assert_close(y, plain + bias[routing.experts.flatten().long()], rtol=1e-5, atol=1e-5)
