"""The CPU kernels over one page pool, compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch.nn import functional

from loramux.kernels.cpu import attention as cpu_attention
from loramux.kernels.cpu import delta as cpu_delta
from loramux.kernels.cpu import fused as cpu_fused
from loramux.kernels.cpu import kv as cpu_kv
from loramux.kernels.cpu import routing as cpu_routing
from loramux.kernels.cpu.instructions.arrays import array, rows_of
from loramux.kernels.cpu.instructions.vectors import LANES
from loramux.kernels.cpu.linear import experts as cpu_experts
from loramux.kernels.cpu.linear.coded_experts import CodedExperts
from loramux.kernels.cpu.linear.experts import PackedExperts
from loramux.kernels.cpu.lora.adapters import CpuLora
from loramux.kernels.cpu.programs.tape import Buffers
from loramux.kernels.delta_spec import DeltaSpec
from loramux.kernels.routing import ExpertWeights, Routing, group_pairs
from loramux.kernels.routing_spec import RoutingSpec
from loramux.kernels.segments import build_pair_segments
from loramux.kernels.tables import AttentionBatch, AttentionSpec, LoraCall, PoolViews, Segments

NO_WINDOW = 1 << 40
"""A window wider than any context."""


class CpuKernels(CpuLora):
    """The kernels over one page pool in host memory.

    Arrays derived from a batch are cached until a different batch object is passed, so all layers of a step share them.
    Every step must pass a new batch object, without padding.
    """

    max_fused_rows = 0

    def __init__(self, pool: PoolViews) -> None:
        super().__init__(pool)
        if pool.geometry.page_tokens != cpu_kv.PAGE_TOKENS:
            raise ValueError(
                f"pages hold {pool.geometry.page_tokens} tokens; the CPU kernels support pages of {cpu_kv.PAGE_TOKENS}"
            )
        if pool.geometry.head_dim % LANES:
            raise ValueError(f"head_dim is {pool.geometry.head_dim}; the CPU kernels support multiples of {LANES}")
        if pool.kv.dtype not in (torch.float32, torch.bfloat16, torch.int8):
            raise ValueError(f"the pool holds {pool.kv.dtype}; the CPU kernels support float32, bfloat16 and int8")
        self.outer = CpuLora(pool.flat)
        self._pool = pool
        self._kv: dict[tuple[int, int], npt.NDArray[Any]] = {}
        self._scales: dict[tuple[int, int], npt.NDArray[Any] | None] = {}
        self._state = array(pool.state, torch.float32)  # [P, float32 elements]
        self._batch: AttentionBatch | None = None
        self.buffers = Buffers()

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, layer: int, batch: AttentionBatch) -> None:
        self._read_batch(batch)
        num_kv_heads, head_dim = k.shape[1:]
        pages, scales = self.kv_of(num_kv_heads, head_dim), self.scales_of(num_kv_heads, head_dim)
        rows = (*rows_of(k), *rows_of(v))
        if scales is None:
            cpu_kv.write(*rows, pages, layer, self._kv_slots, num_kv_heads, head_dim)
        else:
            cpu_kv.write_codes(*rows, pages, scales, layer, self._kv_slots, num_kv_heads, head_dim)

    def max_gathered_pages(self, spec: AttentionSpec) -> int:
        return 0

    def paged_attention(
        self,
        q: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
        spec: AttentionSpec,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._read_batch(batch)
        if sinks is not None:
            assert sinks.dtype is torch.float32
            assert sinks.is_contiguous()
        window = NO_WINDOW if spec.sliding_window is None else spec.sliding_window
        heads = spec.num_kv_heads, spec.head_dim
        cpu_attention.attend(
            torch.get_num_threads(), *rows_of(q), *rows_of(out), self.kv_of(*heads), layer,
            self._cu_q, self._seq_lens, self._kv_pages, self._page_starts,
            spec.num_heads // spec.num_kv_heads, spec.num_kv_heads, spec.head_dim,
            float(spec.scale), window, float(spec.soft_cap or 0.0), 0 if sinks is None else sinks.data_ptr(),
            *scale_words(self.scales_of(*heads)),
        )  # fmt: skip

    def multiply(self, linear: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return linear(x)

    def lora_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LoraCall, slots: torch.Tensor
    ) -> torch.Tensor:
        y = functional.linear(x, weight, bias)
        self.lora_add(x, call, y)
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert weight.dtype is torch.float32
        assert weight.is_contiguous()
        size = x.shape[-1]
        rows = x.reshape(-1, size)
        out = torch.empty(x.shape)
        cpu_fused.rms_norm(*rows_of(rows), out.data_ptr(), weight.data_ptr(), rows.shape[0], size, float(eps))
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert weight.dtype is torch.float32
        assert weight.is_contiguous()
        num_rows, size = x.shape
        out = torch.empty(num_rows, size)
        cpu_fused.add_rms_norm(
            *rows_of(x), *rows_of(residual), out.data_ptr(), weight.data_ptr(), num_rows, size, float(eps)
        )
        return out

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
    ) -> None:
        self.rotary(q, q[:, :0] if k is None else k, cos, sin)
        if k is not None and v is not None:
            self.kv_write(k, v, layer, batch)

    def rotary(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        num_rows, half = cos.shape
        for angles in (cos, sin):
            assert angles.dtype is torch.float32
            assert angles.is_contiguous()
        cpu_fused.rotary(
            *rows_of(q), q.shape[1], *rows_of(k), k.shape[1], q.shape[2], cos.data_ptr(), sin.data_ptr(), num_rows, half
        )

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_rows, size)
        cpu_fused.silu_and_mul(*rows_of(gate_up), out.data_ptr(), num_rows, size)
        return out

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_rows, size)
        cpu_fused.gelu_and_mul(*rows_of(gate_up), out.data_ptr(), num_rows, size)
        return out

    def clamped_silu_and_mul(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_rows, size)
        cpu_fused.clamped_silu_and_mul(*rows_of(gate_up), out.data_ptr(), num_rows, size, float(alpha), float(limit))
        return out

    def route(
        self,
        logits: torch.Tensor,
        spec: RoutingSpec,
        bias: torch.Tensor | None = None,
        expert_scales: torch.Tensor | None = None,
    ) -> Routing:
        num_rows = logits.shape[0]
        experts = torch.empty(num_rows, spec.top_k, dtype=torch.int32)
        weights = torch.empty(num_rows, spec.top_k)
        keys = None
        if bias is not None:
            assert bias.dtype is torch.float32
            assert bias.is_contiguous()
            keys = torch.empty(num_rows, spec.num_experts + spec.num_groups)
        cpu_routing.route(
            *rows_of(logits), *(0 if one is None else one.data_ptr() for one in (bias, keys)), experts.data_ptr(),
            weights.data_ptr(), num_rows, spec.num_experts, spec.top_k, spec.normalizes, spec.has_sigmoid,
            spec.num_groups, spec.top_groups, float(spec.scale), float(spec.min_total),
        )  # fmt: skip
        if expert_scales is not None:
            weights *= expert_scales[experts]
        return Routing(experts, weights, *group_pairs(experts, spec.num_experts))

    def adapter_pairs(self, routing: Routing, slots: torch.Tensor, segments: Segments) -> Segments:
        return build_pair_segments(routing, slots, self.segment_rows, segments.max_rank)

    def multiply_experts(self, x: torch.Tensor, experts: ExpertWeights, routing: Routing) -> torch.Tensor:
        assert isinstance(experts, PackedExperts | CodedExperts)
        return experts.multiply(x, routing)

    def sum_experts(
        self, y: torch.Tensor, routing: Routing, shared: torch.Tensor | None, shared_gate: torch.Tensor | None
    ) -> torch.Tensor:
        num_rows, top_k = routing.weights.shape
        assert y.is_contiguous()
        out = torch.empty(num_rows, y.shape[1])
        shared_rows, gate_rows = ((0, 0) if one is None else rows_of(one) for one in (shared, shared_gate))
        cpu_experts.sum_experts(
            y.data_ptr(), routing.weights.data_ptr(), top_k, shared_rows, gate_rows, out.data_ptr(), num_rows,
            y.shape[1],
        )  # fmt: skip
        return out

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, layer: int, batch: AttentionBatch, spec: DeltaSpec
    ) -> torch.Tensor:
        self._read_batch(batch)
        assert weight.dtype is torch.float32
        assert weight.is_contiguous()
        y = torch.empty(x.shape[0], spec.channels)
        cpu_delta.convolve(
            *rows_of(x), y.data_ptr(), weight.data_ptr(), spec.channels, spec.conv_len, self._state, self._cu_q,
            self._seq_lens, self._kv_pages, self._page_starts,
            layer * spec.layer_rows + spec.matrix_rows, spec.k_dim,
        )  # fmt: skip
        return y

    def delta_rule(
        self,
        qkv: torch.Tensor,
        gates: torch.Tensor,
        rates: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
        spec: DeltaSpec,
    ) -> torch.Tensor:
        self._read_batch(batch)
        assert rates.dtype is torch.float32
        assert rates.is_contiguous()
        y = torch.empty(qkv.shape[0], spec.matrix_rows)
        cpu_delta.delta_rule(
            *rows_of(qkv), *rows_of(gates), rates.data_ptr(), y.data_ptr(), spec.num_k_heads, spec.num_v_heads,
            spec.k_dim, spec.v_dim, self._state, self._cu_q, self._seq_lens, self._kv_pages, self._page_starts,
            layer * spec.layer_rows,
        )  # fmt: skip
        return y

    def kv_of(self, num_kv_heads: int, head_dim: int) -> npt.NDArray[Any]:
        """The pages of layers with these KV heads, `[num_pages, num_layers, num_elements]`."""
        heads = num_kv_heads, head_dim
        if heads not in self._kv:
            self._kv[heads] = array(self._pool.kv_of(*heads), self._pool.kv.dtype)
        return self._kv[heads]

    def scales_of(self, num_kv_heads: int, head_dim: int) -> npt.NDArray[Any] | None:
        """The scales of the codes in `kv_of`, `[num_pages, num_layers, num_scales]`, or None without codes."""
        heads = num_kv_heads, head_dim
        if heads not in self._scales:
            scales = self._pool.scales_of(*heads)
            self._scales[heads] = None if scales is None else array(scales, torch.bfloat16)
        return self._scales[heads]

    def _read_batch(self, batch: AttentionBatch) -> None:
        if batch is not self._batch:
            self._cu_q, self._seq_lens = array(batch.cu_q, torch.int32), array(batch.seq_lens, torch.int32)
            self._kv_pages = array(batch.pages, torch.int32)
            self._page_starts = array(batch.page_starts, torch.int32)
            self._kv_slots = array(batch.kv_slots, torch.int64)
            self._batch = batch


def scale_words(scales: npt.NDArray[Any] | None) -> tuple[int, int]:
    """The address of the scales of codes, and the number of scales of one page in a layer. 0 without codes."""
    return (0, 0) if scales is None else (scales.ctypes.data, scales.shape[2])
