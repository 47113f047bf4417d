"""The choice of experts, compared with a loop over tokens that sorts the experts by their scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.cpu.linear.experts import PackedExperts
from loramux.kernels.layout import PageGeometry
from loramux.kernels.routing import Routing, StackedExperts
from loramux.kernels.routing_spec import RoutingSpec
from loramux.kernels.tables import PoolViews


@pytest.fixture
def kernels(make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., PoolViews]) -> Any:
    return make_kernels(make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32))


SIGMOID = {"has_sigmoid": True, "scale": 2.5}
PLAIN = {
    "one-of-three": (1, RoutingSpec(3, 1, False)),
    "two-of-eight": (7, RoutingSpec(8, 2, True)),
    "all": (7, RoutingSpec(6, 6, False, scale=0.5)),
    "no-tokens": (0, RoutingSpec(4, 2, True)),
    "sigmoid": (5, RoutingSpec(7, 3, True, **SIGMOID)),
}
BIASED = {
    "softmax": (9, RoutingSpec(6, 2, True, min_total=1e-12)),
    "sigmoid": (9, RoutingSpec(9, 4, False, **SIGMOID)),
    "best-group": (9, RoutingSpec(8, 2, True, num_groups=4, top_groups=1, **SIGMOID)),
    "uneven-blocks": (9, RoutingSpec(15, 4, True, num_groups=5, top_groups=3, **SIGMOID)),
    "all-groups": (5, RoutingSpec(8, 3, True, num_groups=2, top_groups=2, **SIGMOID)),
}


ON_ALL_THREADS = {
    "plain": (150, RoutingSpec(70, 8, True), False),
    "biased": (40, RoutingSpec(256, 8, True, num_groups=8, top_groups=4, **SIGMOID), True),
}


def assert_grouped(routing: Routing, spec: RoutingSpec) -> None:
    """The pairs are listed once each, by ascending expert and, within an expert, in ascending order."""
    experts = routing.experts.flatten().tolist()
    assert routing.pairs.tolist() == sorted(range(len(experts)), key=lambda pair: (experts[pair], pair))
    assert routing.starts.tolist() == [sum(one < e for one in experts) for e in range(spec.num_experts + 1)]


def expected_routing(
    logits: torch.Tensor, spec: RoutingSpec, bias: torch.Tensor | None
) -> tuple[list[int], torch.Tensor]:
    """One token's experts and weights, from its logits `[num_experts]`."""
    logits = logits.double()
    scores = logits.sigmoid() if spec.has_sigmoid else logits.softmax(0)
    keys = (logits if bias is None else scores + bias.double()).tolist()
    size = spec.num_experts // spec.num_groups
    members = [range(first, first + size) for first in range(0, spec.num_experts, size)]
    members.sort(key=lambda group: -sum(sorted(keys[e] for e in group)[-2:]))
    candidates = [expert for group in members[: spec.top_groups] for expert in group]
    experts = sorted(candidates, key=lambda expert: -keys[expert])[: spec.top_k]
    weights = scores[experts]
    return experts, (weights / weights.sum() if spec.normalizes else weights) * spec.scale


@pytest.mark.parametrize(("num_rows", "spec"), PLAIN.values(), ids=PLAIN)
def test_the_highest_logits_are_chosen(kernels: Any, num_rows: int, spec: RoutingSpec) -> None:
    # The rows are views, as the router of a layer with a shared expert makes them.
    logits = (torch.randn(num_rows, spec.num_experts + 1) * 4)[:, : spec.num_experts]
    routing = kernels.route(logits, spec)
    for t in range(num_rows):
        experts, weights = expected_routing(logits[t], spec, None)
        assert routing.experts[t].tolist() == experts
        torch.testing.assert_close(routing.weights[t].double(), weights, rtol=1e-5, atol=1e-7)
    assert_grouped(routing, spec)


@pytest.mark.parametrize(("num_rows", "spec"), BIASED.values(), ids=BIASED)
def test_a_bias_and_groups_change_the_choice_but_not_the_weights(
    kernels: Any, num_rows: int, spec: RoutingSpec
) -> None:
    logits, bias = torch.randn(num_rows, spec.num_experts), torch.randn(spec.num_experts) * 0.3
    routing, plain = kernels.route(logits, spec, bias), kernels.route(logits, spec)
    for t in range(num_rows):
        experts, weights = expected_routing(logits[t], spec, bias)
        assert routing.experts[t].tolist() == experts
        torch.testing.assert_close(routing.weights[t].double(), weights, rtol=1e-5, atol=1e-7)
    assert not torch.equal(routing.experts, plain.experts)
    assert_grouped(routing, spec)


@pytest.mark.parametrize(("num_rows", "spec", "has_bias"), ON_ALL_THREADS.values(), ids=ON_ALL_THREADS)
def test_many_tokens_are_routed_on_all_threads(
    make_poisoned_pool: Callable[..., PoolViews], num_rows: int, spec: RoutingSpec, has_bias: bool
) -> None:
    kernels = CpuKernels(make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32))
    logits, bias = torch.randn(num_rows, spec.num_experts), torch.randn(spec.num_experts) if has_bias else None
    routing = kernels.route(logits, spec, bias)
    for t in range(num_rows):
        experts, weights = expected_routing(logits[t], spec, bias)
        assert routing.experts[t].tolist() == experts
        torch.testing.assert_close(routing.weights[t].double(), weights, rtol=1e-5, atol=1e-7)
    assert_grouped(routing, spec)


def test_the_weights_are_multiplied_by_the_scales_of_the_chosen_experts(kernels: Any) -> None:
    spec = RoutingSpec(7, 3, True)
    logits, scales = torch.randn(5, 7), torch.randn(7)
    logits[3, 2] = torch.nan
    plain, routing = kernels.route(logits, spec), kernels.route(logits, spec, None, scales)
    assert torch.equal(routing.experts, plain.experts)
    torch.testing.assert_close(routing.weights, plain.weights * scales[plain.experts], equal_nan=True)


def test_a_large_negative_bias_excludes_an_expert_whose_score_is_1(kernels: Any) -> None:
    bias = torch.tensor([-5.0, 0.0, 0.0, -1e30])
    routing = kernels.route(torch.tensor([[60.0, -2.0, -1.0, 60.0]]), RoutingSpec(4, 3, False, has_sigmoid=True), bias)
    assert routing.experts.tolist() == [[2, 1, 0]]
    torch.testing.assert_close(routing.weights, torch.tensor([[-1.0, -2.0, 60.0]]).sigmoid())


def test_equal_experts_are_chosen_in_order(kernels: Any) -> None:
    spec = RoutingSpec(8, 3, True, num_groups=4, top_groups=2, has_sigmoid=True)
    routing = kernels.route(torch.zeros(2, 8), spec, torch.zeros(8))
    assert routing.experts.tolist() == [[0, 1, 2]] * 2


def test_scores_that_vanish_give_weights_0(kernels: Any) -> None:
    """The weights are divided by `min_total`, not by their sum."""
    routing = kernels.route(torch.full((1, 4), -80.0), RoutingSpec(4, 2, True, has_sigmoid=True), torch.zeros(4))
    torch.testing.assert_close(routing.weights, torch.zeros(1, 2), rtol=0, atol=1e-12)


def test_distant_and_infinitely_low_logits_are_routed(kernels: Any) -> None:
    low = -torch.inf
    logits = torch.tensor([[200.0, -300.0, low, 0.0], [low, low, low, -7.0], [1e30, -1e30, 0.0, 1.0]])
    routing = kernels.route(logits, RoutingSpec(4, 2, True))
    assert routing.experts[0].tolist() == [0, 3]
    assert routing.experts[1, 0] == 3
    assert routing.experts[2].tolist() == [0, 3]
    torch.testing.assert_close(routing.weights, torch.tensor([[1.0, 0.0]] * 3))


SPECS = [
    RoutingSpec(4, 2, True),
    RoutingSpec(4, 2, True, num_groups=2, top_groups=1, **SIGMOID),
]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("spec", SPECS, ids=["softmax", "groups"])
@pytest.mark.parametrize(
    "row",
    [[1.0, torch.nan, 2.0, 3.0], [torch.inf, 0.0, 1.0, 2.0], [-torch.inf] * 4],
    ids=["nan", "infinity", "only-minus-infinity"],
)
def test_a_row_without_a_softmax_gets_weights_nan_and_affects_no_other(
    kernels: Any, row: list[float], spec: RoutingSpec
) -> None:
    logits = torch.randn(5, 4)
    bias = torch.randn(4) if spec.num_groups > 1 else None
    usable = kernels.route(logits, spec, bias)
    logits[2] = torch.tensor(row)
    routing = kernels.route(logits, spec, bias)
    assert routing.experts[2].tolist() == [0, 1]
    assert routing.weights[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(routing.experts[others], usable.experts[others])
    assert torch.equal(routing.weights[others], usable.weights[others])
    assert_grouped(routing, spec)

    weight, x = torch.randn(4, 24, 16), torch.randn(5, 16)
    packed: Any = PackedExperts(weight) if isinstance(kernels, CpuKernels) else StackedExperts(weight)
    outs = [kernels.sum_experts(kernels.multiply_experts(x, packed, one), one, None, None) for one in (usable, routing)]
    assert outs[1][2].isnan().all()
    torch.testing.assert_close(outs[1][others], outs[0][others])
