"""The choice of experts on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loramux.kernels.cpu.instructions.compiled import helper, kernel
from loramux.kernels.cpu.instructions.vectors import exponential, floats_at, integers_at

SERIAL_LOGITS = 10_000
"""Number of logits below which waking other threads costs more than it saves."""


@helper
def _next(values: Any, num_values: int, last: int) -> int:
    """The index after `last` in descending order of values, or the first index if `last` is -1.

    Among equal values, the lower index comes first.
    """
    best = -1
    for i in range(num_values):
        is_next = last < 0 or values[i] < values[last] or (values[i] == values[last] and i > last)
        if is_next and (best < 0 or values[i] > values[best]):
            best = i
    return best


@helper
def _mask_groups(keys: Any, totals: Any, num_experts: int, num_groups: int, top_groups: int) -> None:
    """Set the keys of all but the `top_groups` best groups to -inf. `totals` is scratch for one float32 per group."""
    size = num_experts // num_groups
    for g in range(num_groups):
        first, second = -np.float32(np.inf), -np.float32(np.inf)
        for e in range(g * size, (g + 1) * size):
            if keys[e] > first:
                first, second = keys[e], first
            elif keys[e] > second:
                second = keys[e]
        totals[g] = first + second
    group = -1
    for place in range(num_groups):
        group = _next(totals, num_groups, group)
        if place >= top_groups:
            for e in range(group * size, (group + 1) * size):
                keys[e] = -np.float32(np.inf)


@helper
def _route_row(
    logits_address: int,
    bias_address: int,
    keys_address: int,
    experts_address: int,
    weights_address: int,
    num_experts: int,
    top_k: int,
    normalizes: bool,
    has_sigmoid: bool,
    num_groups: int,
    top_groups: int,
    scale: Any,
    min_total: Any,
) -> None:
    logits, experts, weights = floats_at(logits_address), integers_at(experts_address), floats_at(weights_address)
    highest = logits[0]
    for e in range(1, num_experts):
        highest = max(highest, logits[e])
    total = np.float32(0)
    for e in range(num_experts):
        # The difference is NaN if a logit is NaN or if the highest is infinite.
        total += exponential(logits[e] - highest)
    if not np.isfinite(total):
        for j in range(top_k):
            experts[j], weights[j] = j, np.float32(np.nan)
        return
    keys = logits
    if bias_address != 0:
        bias = floats_at(bias_address)
        keys = floats_at(keys_address)
        for e in range(num_experts):
            if has_sigmoid:
                keys[e] = np.float32(1) / (np.float32(1) + exponential(-logits[e])) + bias[e]
            else:
                keys[e] = exponential(logits[e] - highest) / total + bias[e]
        if top_groups < num_groups:
            _mask_groups(keys, floats_at(keys_address + 4 * num_experts), num_experts, num_groups, top_groups)
    chosen = np.float32(0)
    expert = -1
    for j in range(top_k):
        expert = _next(keys, num_experts, expert)
        experts[j] = expert
        if has_sigmoid:
            weights[j] = np.float32(1) / (np.float32(1) + exponential(-logits[expert]))
        else:
            weights[j] = exponential(logits[expert] - highest) / total
        chosen += weights[j]
    factor = np.float32(scale)
    if normalizes:
        factor /= max(chosen, np.float32(min_total))
    for j in range(top_k):
        weights[j] *= factor


@kernel
def route(
    logits_address: int,
    logits_stride: int,
    bias_address: int,
    keys_address: int,
    experts_address: int,
    weights_address: int,
    num_rows: int,
    num_experts: int,
    top_k: int,
    normalizes: bool,
    has_sigmoid: bool,
    num_groups: int,
    top_groups: int,
    scale: Any,
    min_total: Any,
) -> None:
    """Compute `experts` int32 and `weights` float32 `[num_rows, top_k]` of `reference.routing.route`, both contiguous.

    `keys` is scratch, float32 `[num_rows, num_experts + num_groups]`. The addresses of `bias` and `keys` are 0 if there
    is no bias.
    """
    width = num_experts + num_groups
    if num_rows * num_experts < SERIAL_LOGITS:
        for t in range(num_rows):
            _route_row(
                logits_address + 4 * t * logits_stride, bias_address, keys_address + 4 * t * width,
                experts_address + 4 * t * top_k, weights_address + 4 * t * top_k, num_experts, top_k, normalizes,
                has_sigmoid, num_groups, top_groups, scale, min_total,
            )  # fmt: skip
    else:
        for t in prange(num_rows):
            _route_row(
                logits_address + 4 * t * logits_stride, bias_address, keys_address + 4 * t * width,
                experts_address + 4 * t * top_k, weights_address + 4 * t * top_k, num_experts, top_k, normalizes,
                has_sigmoid, num_groups, top_groups, scale, min_total,
            )  # fmt: skip
