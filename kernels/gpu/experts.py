"""Mixtures of experts on a GPU.

Launches depend only on shapes, so a captured graph can be replayed with other tokens. Programs of experts without
tokens end immediately. Activations are float32, float16 or bfloat16 with a contiguous last axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.addresses import dot_dtype
from loramux.kernels.gpu.sigmoid import sigmoid
from loramux.kernels.routing import Routing, StackedExperts

MANY_TOKENS = 128
"""Minimum number of tokens for which products use more than 16 rows per tile, and programs look for their tile. With
fewer tokens, most experts have at most one tile, and a program's place in the grid is its tile.
"""

BLOCK_INPUTS = 64
"""Number of inputs that a tile multiplies at a time."""

SUM_BLOCK = 1024
"""Maximum number of columns that a program of `_sum` computes."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The rows and columns of a tile, and how a program computes it."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


def tiling_of(num_tokens: int, num_pairs: int, num_experts: int, itemsize: int) -> Tiling:
    """The tiling for elements of `itemsize` bytes.

    A tile of 16 rows is the smallest for tensor cores. A tile reads its weights and rows once, so large tiles ask for
    fewer bytes if experts have enough pairs to fill half of one. In float32, they would not fit into registers. Their
    stages fit into the shared memory of every supported GPU.
    """
    if num_tokens < MANY_TOKENS:
        return Tiling(16, 64, 4, 4)
    if itemsize == 4 or num_pairs < 64 * num_experts:
        return Tiling(64, 64, 4, 4)
    return Tiling(128, 256, 8, 3)


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
    if num_tokens:
        tiling = tiling_of(num_tokens, routing.num_pairs, num_experts, x.dtype.itemsize)
        is_listed = num_tokens >= MANY_TOKENS
        # A token chooses an expert at most once, so no expert has more pairs than there are tokens. Each expert has at
        # most one tile that is not full.
        tiles = (
            (min(routing.num_pairs, routing.num_pairs // tiling.rows + num_experts), 1)
            if is_listed
            else (triton.cdiv(num_tokens, tiling.rows), num_experts)
        )
        _multiply[triton.cdiv(out_features, tiling.columns), *tiles](
            x, weight, weight if bias is None else bias, y, routing.pairs, routing.starts, x.stride(0),
            HAS_BIAS=bias is not None, PAIRS_PER_ROW=routing.pairs_per_row(x), IN=in_features, OUT=out_features,
            NUM_EXPERTS=num_experts, EXPERTS=triton.next_power_of_2(num_experts), IS_LISTED=is_listed,
            ROWS=tiling.rows, BLOCK_N=tiling.columns, BLOCK_K=BLOCK_INPUTS, DOT_DTYPE=dot_dtype(x.dtype, x.dtype),
            num_warps=tiling.num_warps, num_stages=tiling.num_stages,
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
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    IS_LISTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """Multiply ROWS pairs of one expert by BLOCK_N columns.

    The grid is `(columns, tiles of pairs, experts)` or, with IS_LISTED, `(columns, tiles of all experts)`. Programs
    without pairs end immediately.
    """
    if IS_LISTED:
        expert, tile = _tile_of(tl.program_id(1), starts_ptr, NUM_EXPERTS, EXPERTS, ROWS)
        if expert >= NUM_EXPERTS:
            return
    else:
        expert = tl.program_id(2)
        tile = tl.program_id(1)
    listed = tl.load(starts_ptr + expert) + tile * ROWS + tl.arange(0, ROWS)
    end = tl.load(starts_ptr + expert + 1)
    if tl.load(starts_ptr + expert) + tile * ROWS >= end:
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


@triton.jit
def _tile_of(
    index: tl.tensor, starts_ptr: tl.tensor, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr
) -> Any:
    """The expert of the tile with this index among the tiles of all experts, and the tile's index among the expert's.

    The expert is at least NUM_EXPERTS if there are fewer tiles.
    """
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < NUM_EXPERTS
    begin = tl.load(starts_ptr + expert, mask=is_expert, other=0)
    end = tl.load(starts_ptr + expert + 1, mask=is_expert, other=0)
    num_tiles = (end - begin + ROWS - 1) // ROWS
    end_tile = tl.cumsum(num_tiles, 0)
    # Experts without pairs have no tiles, so their last tile is also that of the expert before them.
    is_before = end_tile <= index
    return tl.sum(is_before.to(tl.int32), 0), index - tl.sum(tl.where(is_before, num_tiles, 0), 0)


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
