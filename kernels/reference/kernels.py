"""The specification as an implementation of the interface in `dispatch.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from loramux.kernels.delta_spec import DeltaSpec
from loramux.kernels.reference import attention, delta, experts, fused, routing
from loramux.kernels.reference.lora import ReferenceLora
from loramux.kernels.routing import ExpertWeights, Routing, StackedExperts
from loramux.kernels.segments import build_pair_segments
from loramux.kernels.tables import AttentionBatch, AttentionSpec, LoraCall, Segments


class ReferenceKernels(ReferenceLora):
    """The kernels over one page pool, written for clarity. The function that a method calls is its specification."""

    max_fused_rows = 0
    rms_norm = staticmethod(fused.rms_norm)
    add_rms_norm = staticmethod(fused.add_rms_norm)
    rotary = staticmethod(fused.rotary)
    silu_and_mul = staticmethod(fused.silu_and_mul)
    gelu_and_mul = staticmethod(fused.gelu_and_mul)
    clamped_silu_and_mul = staticmethod(fused.clamped_silu_and_mul)
    route = staticmethod(routing.route)
    sum_experts = staticmethod(experts.sum_experts)

    @property
    def outer(self) -> ReferenceLora:
        return ReferenceLora(self._pool.flat)

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, layer: int, batch: AttentionBatch) -> None:
        attention.kv_write(k, v, self._pool, layer, batch)

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
        attention.paged_attention(q, self._pool, layer, batch, spec, out, sinks)

    def multiply(self, linear: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return linear(x)

    def lora_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LoraCall, slots: torch.Tensor
    ) -> torch.Tensor:
        y = functional.linear(x, weight, bias)
        self.lora_add(x, call, y)
        return y

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
        """`rotary`, then `kv_write`. A device may fuse the two."""
        self.rotary(q, q[:, :0] if k is None else k, cos, sin)
        if k is not None and v is not None:
            self.kv_write(k, v, layer, batch)

    def adapter_pairs(self, routing: Routing, slots: torch.Tensor, segments: Segments) -> Segments:
        return build_pair_segments(routing, slots, self.segment_rows, segments.max_rank)

    def multiply_experts(self, x: torch.Tensor, weights: ExpertWeights, routing: Routing) -> torch.Tensor:
        assert isinstance(weights, StackedExperts)
        return experts.multiply_experts(x, weights, routing)

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, layer: int, batch: AttentionBatch, spec: DeltaSpec
    ) -> torch.Tensor:
        return delta.convolve(x, weight, self._pool, layer, batch, spec)

    def delta_rule(
        self,
        qkv: torch.Tensor,
        gates: torch.Tensor,
        rates: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
        spec: DeltaSpec,
    ) -> torch.Tensor:
        return delta.delta_rule(qkv, gates, rates, self._pool, layer, batch, spec)
