"""The choice of experts on a GPU. As in `experts.py`, launches depend only on shapes."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.sigmoid import sigmoid
from loramux.kernels.routing import Routing
from loramux.kernels.routing_spec import RoutingSpec

LOG2_E = 1.4426950408889634

PAIR_BLOCK = 1024
"""Number of pairs that a program of `_group` reads at a time."""


def route(
    logits: torch.Tensor,
    spec: RoutingSpec,
    bias: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
) -> Routing:
    """Choose the experts of each token, as `reference.routing.route` does.

    `logits` `[T, num_experts]`; its rows may be views into wider rows.
    """
    assert logits.stride(1) == 1
    assert bias is None or bias.dtype is torch.float32
    assert expert_scales is None or expert_scales.dtype is torch.float32
    num_tokens, device = logits.shape[0], logits.device
    experts = torch.empty(num_tokens, spec.top_k, dtype=torch.int32, device=device)
    weights = torch.empty(num_tokens, spec.top_k, dtype=torch.float32, device=device)
    pairs = torch.empty(num_tokens * spec.top_k, dtype=torch.int32, device=device)
    starts = torch.empty(spec.num_experts + 1, dtype=torch.int32, device=device)
    if num_tokens:
        _route[(num_tokens,)](
            logits, logits.stride(0), logits if bias is None else bias,
            logits if expert_scales is None else expert_scales, experts, weights, spec.scale, spec.min_total,
            NUM_EXPERTS=spec.num_experts, BLOCK=triton.next_power_of_2(spec.num_experts), TOP_K=spec.top_k,
            SLOTS=triton.next_power_of_2(spec.top_k), NORMALIZES=spec.normalizes, HAS_SIGMOID=spec.has_sigmoid,
            HAS_BIAS=bias is not None, HAS_SCALES=expert_scales is not None, NUM_GROUPS=spec.num_groups,
            TOP_GROUPS=spec.top_groups, GROUP_BLOCK=triton.next_power_of_2(spec.num_groups), LOG2_E=LOG2_E, num_warps=1,
        )  # fmt: skip
    _group[(spec.num_experts,)](experts, pairs, starts, experts.numel(), BLOCK=PAIR_BLOCK, num_warps=4)
    return Routing(experts, weights, pairs, starts)


@triton.jit
def _next(values: tl.tensor, index: tl.tensor, last: tl.tensor, last_value: tl.tensor, BLOCK: tl.constexpr) -> Any:
    """The index and the value after `last` in descending order. Among equal values, the lower index comes first.

    Excluded values are -inf. The caller must stop before it reaches them.
    """
    is_next = (values < last_value) | ((values == last_value) & (index > last))
    value = tl.max(tl.where(is_next, values, float("-inf")), 0)
    return tl.min(tl.where(is_next & (values == value), index, BLOCK), 0), value


@triton.jit
def _route(
    logits_ptr: tl.tensor,
    stride: tl.tensor,
    bias_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    scale: tl.tensor,
    min_total: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMALIZES: tl.constexpr,
    HAS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> None:
    """Choose the experts of one token."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    is_expert = expert < NUM_EXPERTS
    logit = tl.load(logits_ptr + row * stride + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    highest = tl.max(logit, 0)
    share = tl.where(is_expert, tl.exp2((logit - highest) * LOG2_E), 0.0)
    total = tl.sum(share, 0)
    # Also false if the total is NaN, because a logit is NaN or the highest is infinite.
    is_usable = total < float("inf")
    score = share / total
    if HAS_SIGMOID:
        score = sigmoid(logit)
    key = logit
    if HAS_BIAS:
        key = tl.where(is_expert, score + tl.load(bias_ptr + expert, mask=is_expert, other=0.0), float("-inf"))
        if TOP_GROUPS < NUM_GROUPS:
            key = _masked_groups(key, expert, NUM_EXPERTS // NUM_GROUPS, NUM_GROUPS, TOP_GROUPS, GROUP_BLOCK, BLOCK)
    chosen = slot
    weights = tl.zeros((SLOTS,), tl.float32)
    last = -1
    last_key = float("inf")
    for j in tl.static_range(TOP_K):
        last, last_key = _next(key, expert, last, last_key, BLOCK)
        chosen = tl.where(slot == j, last, chosen)
        weights = tl.where(slot == j, tl.sum(tl.where(expert == last, score, 0.0), 0), weights)
    if NORMALIZES:
        weights /= tl.maximum(tl.sum(tl.where(slot < TOP_K, weights, 0.0), 0), min_total)
    weights = tl.where(is_usable, weights * scale, float("nan"))
    chosen = tl.where(is_usable, chosen, slot)
    if HAS_SCALES:
        weights *= tl.load(scales_ptr + chosen, mask=slot < TOP_K, other=0.0)
    place = row * TOP_K + slot
    tl.store(experts_ptr + place, chosen, mask=slot < TOP_K)
    tl.store(weights_ptr + place, weights, mask=slot < TOP_K)


@triton.jit
def _masked_groups(
    key: tl.tensor,
    expert: tl.tensor,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The keys, with -inf for all groups except the TOP_GROUPS best."""
    group = tl.arange(0, GROUP_BLOCK)
    totals = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    for g in tl.range(NUM_GROUPS):
        own = tl.where(expert // SIZE == g, key, float("-inf"))
        first_expert, first = _next(own, expert, -1, float("inf"), BLOCK)
        _, second = _next(own, expert, first_expert, first, BLOCK)
        totals = tl.where(group == g, first + second, totals)
    masked = tl.full((BLOCK,), float("-inf"), tl.float32)
    last = -1
    last_total = float("inf")
    for _ in tl.static_range(TOP_GROUPS):
        last, last_total = _next(totals, group, last, last_total, GROUP_BLOCK)
        masked = tl.where(expert // SIZE == last, key, masked)
    return masked


@triton.jit(do_not_specialize=["num_pairs"])
def _group(
    experts_ptr: tl.tensor, pairs_ptr: tl.tensor, starts_ptr: tl.tensor, num_pairs: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """List the pairs of one expert, after the pairs of all experts before it."""
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    start = 0
    for begin in range(0, num_pairs, BLOCK):
        of_pair = tl.load(experts_ptr + begin + place, mask=begin + place < num_pairs, other=1 << 30)
        start += tl.sum((of_pair < expert).to(tl.int32), 0)
    tl.store(starts_ptr + expert, start)
    for begin in range(0, num_pairs, BLOCK):
        of_pair = tl.load(experts_ptr + begin + place, mask=begin + place < num_pairs, other=1 << 30)
        is_own = (of_pair == expert).to(tl.int32)
        tl.store(pairs_ptr + start + tl.cumsum(is_own, 0) - 1, begin + place, mask=is_own == 1)
        start += tl.sum(is_own, 0)
    # The program of the next expert writes the same number. This store matters only for the last expert.
    tl.store(starts_ptr + expert + 1, start)
