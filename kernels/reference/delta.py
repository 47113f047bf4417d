"""The causal convolution and the gated delta rule of hybrid decoders, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from loramux.kernels.delta_spec import DeltaSpec
from loramux.kernels.tables import AttentionBatch, PoolViews

L2_EPS = 1e-6
"""Added to the squared lengths of q and k before each is divided by its length."""


def convolve(
    x: torch.Tensor, weight: torch.Tensor, pool: PoolViews, layer: int, batch: AttentionBatch, spec: DeltaSpec
) -> torch.Tensor:
    """`y[t, c] = silu(sum over j of weight[j, c] * x[t - conv_len + 1 + j, c])` over the positions of `t`'s sequence.

    `x` `[T, channels]`, `weight` float32 `[conv_len, channels]`. Inputs before the step come from the tail in the
    sequence's state, and inputs before the sequence are 0. Afterwards, the tail contains the last inputs. `layer` is an
    index into the layers of `spec`. Rows that belong to no sequence become 0.
    """
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for begin, end, state, is_first in _states(pool, layer, batch, spec):
        tail = state[spec.matrix_rows :].view(spec.conv_len - 1, -1)
        known = torch.zeros_like(tail) if is_first else tail
        inputs = torch.cat([known[:, : spec.channels], x[begin:end].float()])
        windows = inputs.unfold(0, spec.conv_len, 1)  # [rows, channels, conv_len]
        y[begin:end] = functional.silu((windows * weight.T).sum(-1)).to(y.dtype)
        tail[:, : spec.channels] = inputs[end - begin :]
    return y


def delta_rule(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    rates: torch.Tensor,
    pool: PoolViews,
    layer: int,
    batch: AttentionBatch,
    spec: DeltaSpec,
) -> torch.Tensor:
    """The gated delta rule (Yang et al., 2024), one position after another: `S` is the matrix of a value head.

        S := exp(rate * softplus(gate_a + bias)) * S
        S := S + sigmoid(gate_b) * (v - S k) kᵀ
        y := S q / sqrt(k_dim)

    q and k are divided by their lengths first. `qkv` is `[T, channels]`. `gates` is `[T, 2 * num_v_heads]`: `gate_b` of
    all heads, then `gate_a`. `rates` is float32 `[2, num_v_heads]`: the negative rate of each head, then the biases.
    Returns y, `[T, num_v_heads * v_dim]`. `S` is 0 before a sequence's first position. Arithmetic and `S` are float32.
    Rows that belong to no sequence become 0.
    """
    num_v, group_size = spec.num_v_heads, spec.num_v_heads // spec.num_k_heads
    key_size = spec.num_k_heads * spec.k_dim
    q, k = (
        _unit(part.float().unflatten(1, (-1, spec.k_dim))).repeat_interleave(group_size, 1)
        for part in (qkv[:, :key_size], qkv[:, key_size : 2 * key_size])
    )  # [T, num_v_heads, k_dim]
    v = qkv[:, 2 * key_size :].float().unflatten(1, (num_v, spec.v_dim))
    strength = gates[:, :num_v].float().sigmoid()
    decay = (rates[0] * functional.softplus(gates[:, num_v:].float() + rates[1])).exp()
    y = torch.zeros_like(v)
    for begin, end, state, is_first in _states(pool, layer, batch, spec):
        matrices = state[: spec.matrix_rows].view(num_v, spec.v_dim, spec.k_dim)
        if is_first:
            matrices.zero_()
        for t in range(begin, end):
            matrices *= decay[t, :, None, None]
            error = v[t] - torch.einsum("hvk,hk->hv", matrices, k[t])
            matrices += (strength[t, :, None] * error)[..., None] * k[t, :, None]
            y[t] = torch.einsum("hvk,hk->hv", matrices, q[t]) * spec.k_dim**-0.5
    return y.flatten(1).to(qkv.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def _states(
    pool: PoolViews, layer: int, batch: AttentionBatch, spec: DeltaSpec
) -> Iterator[tuple[int, int, torch.Tensor, bool]]:
    """For each sequence in the step, yield its first row, its end row, its state in this layer, and `is_first`.

    The caller may change the state, which is then stored. `is_first` is True if the sequence begins with this step, so
    its state has no content yet.
    """
    per_page = spec.rows_per_page(pool.geometry)
    stored = pool.state[:, : per_page * spec.k_dim].unflatten(1, (per_page, spec.k_dim))
    row = layer * spec.layer_rows + torch.arange(spec.layer_rows)
    for i, length in enumerate(batch.seq_lens.tolist()):
        begin, end = int(batch.cu_q[i]), int(batch.cu_q[i + 1])
        if begin < end:
            page = batch.pages[int(batch.page_starts[i]) + row // per_page].long()
            state = stored[page, row % per_page]
            yield begin, end, state, length == end - begin
            stored[page, row % per_page] = state
