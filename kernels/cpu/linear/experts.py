"""Mixtures of experts on a CPU: the products with the experts' weights, and the sum of the experts' outputs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numba import prange

from loramux.kernels.cpu.instructions.avx512_bf16 import Avx512Bf16Panels
from loramux.kernels.cpu.instructions.compiled import helper, kernel
from loramux.kernels.cpu.instructions.vectors import exponential, floats_at
from loramux.kernels.cpu.linear.expert_panels import ExpertPanels
from loramux.kernels.cpu.linear.linear import FloatPanels, PackedLinear, product_of
from loramux.kernels.routing import Routing

SERIAL_WORK = 30_000
"""Number of elements to sum below which waking other threads costs more than it saves."""


class ExpertProducts(Protocol):
    def multiply(self, x: torch.Tensor, routing: Routing) -> torch.Tensor: ...


class PackedExperts:
    """One linear layer of each expert, laid out for this CPU.

    A step reads the weights of each chosen expert once. As in `PackedLinear`, a row's result is bitwise independent of
    the other rows, except with oneDNN.
    """

    def __init__(self, weights: Iterable[torch.Tensor], bias: torch.Tensor | None = None) -> None:
        """Each of `weights` is `[out_features, in_features]`, and `bias` is `[num_experts, out_features]`."""
        weights = iter(weights)
        first = next(weights)
        product, all_weights = product_of(first.dtype), chain([first], weights)
        self._products: ExpertProducts = (
            ExpertPanels(all_weights, bias, has_pairs=product is Avx512Bf16Panels)
            if product in (Avx512Bf16Panels, FloatPanels)
            else SeparateExperts(all_weights, bias)
        )

    def multiply(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Compute `reference.experts.multiply_experts`."""
        return self._products.multiply(x, routing)


class SeparateExperts:
    """Multiplies by one expert at a time, for layouts that `ExpertPanels` does not support."""

    def __init__(self, weights: Iterable[torch.Tensor], bias: torch.Tensor | None) -> None:
        self._experts = [
            PackedLinear(weight, None if bias is None else bias[expert]) for expert, weight in enumerate(weights)
        ]

    def multiply(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        pairs = routing.pairs.long()
        rows = pairs // routing.pairs_per_row(x)
        y = torch.empty(routing.num_pairs, self._experts[0].out_features)
        starts = routing.starts.tolist()
        for expert, begin, end in zip(self._experts, starts[:-1], starts[1:], strict=True):
            if begin < end:
                y[pairs[begin:end]] = expert(x[rows[begin:end]])
        return y


@helper
def _sum_row(
    t: int, y_address: int, weights_address: int, top_k: int, shared: Any, gate: Any, out_address: int, size: int
) -> None:
    weights, out = floats_at(weights_address + 4 * t * top_k), floats_at(out_address + 4 * t * size)
    for i in range(size):
        out[i] = np.float32(0)
    for j in range(top_k):
        y, weight = floats_at(y_address + 4 * (t * top_k + j) * size), weights[j]
        for i in range(size):
            out[i] += weight * y[i]
    if shared[0] != 0:
        shared_row, factor = floats_at(shared[0] + 4 * t * shared[1]), np.float32(1)
        if gate[0] != 0:
            factor /= np.float32(1) + exponential(-floats_at(gate[0] + 4 * t * gate[1])[0])
        for i in range(size):
            out[i] += factor * shared_row[i]


@kernel
def sum_experts(
    y_address: int,
    weights_address: int,
    top_k: int,
    shared: tuple[int, int],
    gate: tuple[int, int],
    out_address: int,
    num_rows: int,
    size: int,
) -> None:
    """Compute `out` of `reference.experts.sum_experts`. `y`, `weights` and `out` are contiguous.

    `shared` and `gate` are each an address and a row stride. Address 0 means that there is no shared expert or no gate.
    """
    if num_rows * top_k * size < SERIAL_WORK:
        for t in range(num_rows):
            _sum_row(t, y_address, weights_address, top_k, shared, gate, out_address, size)
    else:
        for t in prange(num_rows):
            _sum_row(np.int64(t), y_address, weights_address, top_k, shared, gate, out_address, size)
