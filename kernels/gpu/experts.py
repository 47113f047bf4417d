"""Mixtures of experts on a GPU.

Launches depend only on shapes, so a captured graph can be replayed with other tokens. Programs of experts without
tokens end immediately. Activations are float32, float16 or bfloat16 with a contiguous last axis.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.addresses import dot_dtype
from loramux.kernels.gpu.sigmoid import sigmoid
from loramux.kernels.routing import Routing, StackedExperts

SMALL_ROWS, LARGE_ROWS = 16, 64
"""Rows per tile of a product: the minimum for tensor cores, and the number for steps with many tokens."""

MANY_TOKENS = 128
"""Minimum number of tokens for which products use large tiles."""

BLOCK_COLUMNS = 64
"""Columns per tile, and number of inputs that a tile multiplies at a time."""

SUM_BLOCK = 1024
"""Maximum number of columns that a program of `_sum` computes."""


def multiply_experts(x: torch.Tensor, experts: StackedExperts, routing: Routing) -> torch.Tensor:
    """`y[p] = x[p // pairs_per_row] @ weight[e]ᵀ + bias[e]` for each pair `p`, where `e` is the pair's expert.

    `x` `[T, in_features]` or `[T * top_k, in_features]` and the experts' tensors have the same dtype. The experts'
    tensors are contiguous. Sums are float32.
    """
    weight, bias = experts.weight, experts.bias
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert bias is None or bias.is_contiguous()
    num_experts, out_features, in_features = weight.shape
    y = torch.empty(routing.num_pairs, out_features, dtype=x.dtype, device=x.device)
    num_tokens = routing.experts.shape[0]
    rows = LARGE_ROWS if num_tokens >= MANY_TOKENS else SMALL_ROWS
    if num_tokens:
        # A token chooses an expert at most once, so no expert has more pairs than there are tokens.
        _multiply[triton.cdiv(out_features, BLOCK_COLUMNS), triton.cdiv(num_tokens, rows), num_experts](
            x, weight, weight if bias is None else bias, y, routing.pairs, routing.starts, x.stride(0),
            HAS_BIAS=bias is not None, PAIRS_PER_ROW=routing.pairs_per_row(x), IN=in_features, OUT=out_features,
            ROWS=rows, BLOCK_N=BLOCK_COLUMNS, BLOCK_K=BLOCK_COLUMNS, DOT_DTYPE=dot_dtype(x.dtype, x.dtype),
            num_warps=4, num_stages=4,
        )  # fmt: skip
    return y


@triton.jit
def _multiply(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    x_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """Multiply ROWS pairs of one expert by BLOCK_N columns. The grid is `(columns, tiles of pairs, experts)`."""
    expert = tl.program_id(2)
    listed = tl.load(starts_ptr + expert) + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    end = tl.load(starts_ptr + expert + 1)
    if tl.load(starts_ptr + expert) + tl.program_id(1) * ROWS >= end:
        return
    is_row = (listed < end)[:, None]
    pair = tl.load(pairs_ptr + listed, mask=listed < end, other=0).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_row = x_ptr + (pair // PAIRS_PER_ROW * x_stride)[:, None]
    weight_row = weight_ptr + (expert.to(tl.int64) * OUT + column)[:, None] * IN
    y = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for k in tl.range(0, IN, BLOCK_K):
        is_inner = (k + inner < IN)[None, :]
        x = tl.load(x_row + (k + inner)[None, :], mask=is_row & is_inner, other=0.0)
        weight = tl.load(weight_row + (k + inner)[None, :], mask=(column < OUT)[:, None] & is_inner, other=0.0)
        y = tl.dot(x.to(DOT_DTYPE), tl.trans(weight.to(DOT_DTYPE)), y, input_precision="tf32x3")
    if HAS_BIAS:
        y += tl.load(bias_ptr + expert * OUT + column, mask=column < OUT, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + pair[:, None] * OUT + column[None, :], y, mask=is_row & (column < OUT)[None, :])


def sum_experts(
    y: torch.Tensor, routing: Routing, shared: torch.Tensor | None, shared_gate: torch.Tensor | None
) -> torch.Tensor:
    """`out[t] = sum over j of weights[t, j] * y[t * top_k + j]`, plus `sigmoid(shared_gate[t]) * shared[t]`.

    `y` `[T * top_k, n]` is contiguous. `shared` `[T, n]` and `shared_gate` `[T, 1]` may be views into wider rows, or
    None.
    """
    assert y.is_contiguous()
    num_tokens, top_k = routing.weights.shape
    size = y.shape[1]
    out = torch.empty(num_tokens, size, dtype=y.dtype, device=y.device)
    block = min(SUM_BLOCK, triton.next_power_of_2(size))
    has_shared, has_gate = shared is not None, shared_gate is not None
    # The kernel does not read the tensors that stand in for absent ones.
    shared, shared_gate = (y if one is None else one for one in (shared, shared_gate))
    if num_tokens:
        _sum[(num_tokens, triton.cdiv(size, block))](
            y, routing.weights, shared, shared_gate, out, shared.stride(0), shared_gate.stride(0),
            TOP_K=top_k, SIZE=size, BLOCK=block, HAS_SHARED=has_shared, HAS_GATE=has_gate, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _sum(
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    out_ptr: tl.tensor,
    shared_stride: tl.tensor,
    gate_stride: tl.tensor,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
) -> None:
    """Compute BLOCK columns of one token. The grid is `(T, blocks)`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_stored = column < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        y = tl.load(y_ptr + (row * TOP_K + j) * SIZE + column, mask=is_stored, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + row * TOP_K + j) * y
    if HAS_SHARED:
        shared = tl.load(shared_ptr + row * shared_stride + column, mask=is_stored, other=0.0).to(tl.float32)
        if HAS_GATE:
            shared *= sigmoid(tl.load(gate_ptr + row * gate_stride).to(tl.float32))
        total += shared
    tl.store(out_ptr + row * SIZE + column, total, mask=is_stored)
