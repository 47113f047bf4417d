"""The GPU kernels, all in Triton, implementing the interface in `dispatch.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

import torch

from loramux.kernels.delta_spec import DeltaSpec
from loramux.kernels.gpu.addresses import check_geometry
from loramux.kernels.gpu.attention import paged_attention
from loramux.kernels.gpu.attention_plan import AttentionPlan, attention_plan, check_attention
from loramux.kernels.gpu.contiguous_attention import (
    ContiguousAttention,
    flash_attention,
    gather_pages,
    has_flash_attention,
    is_gathering_worthwhile,
    max_gathered_pages,
)
from loramux.kernels.gpu.delta import check_delta, convolve, delta_rule
from loramux.kernels.gpu.experts import multiply_experts, sum_experts
from loramux.kernels.gpu.fused import add_rms_norm, clamped_silu_and_mul, gelu_and_mul, rms_norm, silu_and_mul
from loramux.kernels.gpu.launches import TILE_ROWS, supports_pdl
from loramux.kernels.gpu.linear.coded_products import multiply_coded_experts
from loramux.kernels.gpu.linear.coded_weights import CodedWeights
from loramux.kernels.gpu.lora.adapter_pairs import adapter_pairs
from loramux.kernels.gpu.lora.affines import lora_affine
from loramux.kernels.gpu.lora.expand import lora_expand
from loramux.kernels.gpu.lora.gather import lora_gather
from loramux.kernels.gpu.lora.lora_linear import MAX_COUNTERS, MAX_ROWS, linear_plan, lora_linear
from loramux.kernels.gpu.lora.shrink import lora_shrink, num_splits
from loramux.kernels.gpu.lora.trained_rows import replace_columns, replace_rows
from loramux.kernels.gpu.rotate_and_store import rotate_and_store
from loramux.kernels.gpu.routing import route
from loramux.kernels.routing import ExpertWeights, Routing, StackedExperts
from loramux.kernels.tables import (
    AttentionBatch,
    AttentionSpec,
    ContiguousKeys,
    LoraCall,
    ModuleGroup,
    PoolViews,
)

MIN_COUNTERS = 1 << 16
"""Number of attention's counters that are allocated at the start: enough for 4,096 tiles of query rows and 16 KV heads.
"""

KV_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)


def check_shapes(
    pool: PoolViews,
    groups: Iterable[ModuleGroup],
    attention: Iterable[AttentionSpec],
    outer_groups: Iterable[ModuleGroup] = (),
    delta: DeltaSpec | None = None,
) -> None:
    """Raise ValueError, naming the limit, for unsupported dtypes or shapes, so that no launch has to check them."""
    if pool.kv.dtype not in KV_DTYPES:
        raise ValueError(f"K and V are {pool.kv.dtype}; the GPU kernels support bfloat16, float16, float32 and int8")
    adapters = pool.of_adapters
    for group in groups:
        check_geometry(adapters.geometry, group, adapters.adapter.dtype)
    for group in outer_groups:
        check_geometry(pool.geometry.flat, group, pool.adapter.dtype)
    for spec in set(attention):
        check_attention(spec, pool.geometry)
    if delta is not None:
        check_delta(delta, pool)


class GpuLora:
    """The LoRA kernels over one page pool in GPU memory. See `GpuKernels`."""

    segment_rows = TILE_ROWS

    def __init__(self, pool: PoolViews, *, pdl: bool = False) -> None:
        self._adapters = pool.of_adapters
        self._pdl = pdl and supports_pdl(pool.raw.device)

    def lora_planes(self, call: LoraCall, num_tokens: int) -> torch.Tensor:
        """float32 `[num_splits, num_tokens, len(group.modules), segments.max_rank]`."""
        group, segments = call.group, call.segments
        splits = num_splits(group, self._adapters.geometry.adapter_elements, num_tokens, segments.num_segments)
        shape = (splits, num_tokens, len(group.modules), segments.max_rank)
        return torch.empty(shape, dtype=torch.float32, device=self._adapters.raw.device)

    def lora_shrink(self, x: torch.Tensor, call: LoraCall, planes: torch.Tensor) -> None:
        lora_shrink(self._adapters, x, call, planes, pdl=self._pdl)

    def lora_gather(self, tokens: torch.Tensor, call: LoraCall, planes: torch.Tensor) -> None:
        lora_gather(self._adapters, tokens, call, planes)

    def replace_rows(self, tokens: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        replace_rows(self._adapters, tokens, call, y)

    def replace_columns(self, x: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        replace_columns(self._adapters, x, call, y)

    def lora_expand(self, planes: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        # An embedding's gather, unlike a shrink, does not let the next kernel start early.
        pdl = self._pdl and not call.group.is_embedding
        lora_expand(self._adapters, planes, call, y, pdl=pdl)

    def lora_delta(self, x: torch.Tensor, call: LoraCall, slots: torch.Tensor, y: torch.Tensor) -> None:
        planes = self.lora_planes(call, y.shape[0])
        self.lora_shrink(x, call, planes)
        lora_expand(self._adapters, planes, call, y, row_slots=slots, pdl=self._pdl)

    def lora_affine(self, call: LoraCall, y: torch.Tensor) -> None:
        lora_affine(self._adapters, call, y)

    def lora_add(self, x: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        planes = self.lora_planes(call, y.shape[0])
        self.lora_shrink(x, call, planes)
        self.lora_expand(planes, call, y)


class GpuKernels(GpuLora):
    """The kernels over one page pool in GPU memory.

    A launch depends only on the shapes of its arguments, `Segments.max_rank`, `Segments.max_rows` and
    `AttentionBatch.max_q`, so a captured graph stays valid when the contents of its tensors change. Scratch memory
    comes from torch's allocator, which makes no driver calls after the first steps and keeps the memory of captured
    graphs separate. Launches are planned for `num_processors` multiprocessors, by default as many as the pool's GPU
    has. `contiguous_attention` computes prefills from contiguous K and V. By default, it is `flash_attention` if torch
    has it. Without it, prefills read pages. If K and V are int8 codes, it reads the K and V of earlier tokens in
    bfloat16, and its own before they are rounded to codes. With `fuses`, linear layers and their adapters are
    multiplied together in steps of up to MAX_ROWS rows.
    """

    route = staticmethod(route)
    adapter_pairs = staticmethod(adapter_pairs)
    sum_experts = staticmethod(sum_experts)

    def __init__(
        self,
        pool: PoolViews,
        *,
        pdl: bool = False,
        num_processors: int | None = None,
        fuses: bool = False,
        contiguous_attention: ContiguousAttention | None = None,
    ) -> None:
        super().__init__(pool, pdl=pdl)
        self._pool = pool
        # The dtype of contiguous K and V.
        self._rows_dtype = torch.bfloat16 if pool.kv.dtype is torch.int8 else pool.kv.dtype
        if contiguous_attention is None and has_flash_attention(pool.raw.device, self._rows_dtype):
            contiguous_attention = flash_attention
        self._contiguous_attention = contiguous_attention
        self._attention_counters = [torch.zeros(MIN_COUNTERS, dtype=torch.int32, device=pool.raw.device)]
        self.outer = GpuLora(pool.flat, pdl=pdl)
        if num_processors is None:
            # Triton's interpreter runs one program after another.
            num_processors = 1
            if pool.raw.device.type == "cuda":
                num_processors = torch.cuda.get_device_properties(pool.raw.device).multi_processor_count
        self._num_processors = num_processors
        self.max_fused_rows = MAX_ROWS if fuses else 0
        # Launches use the counters one after another, and leave them at 0.
        self._fused_counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=pool.raw.device)

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
        rotates_k = batch.contiguous is not None and batch.contiguous.pages is None
        rotate_and_store(q, k, v, cos, sin, self._pool, layer, batch, rotates_k=rotates_k, pdl=self._pdl)

    def max_gathered_pages(self, spec: AttentionSpec) -> int:
        return 0 if self._contiguous_attention is None else max_gathered_pages(spec, self._rows_dtype)

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
        plan, elements, num_counters = _planned(
            q.shape[0], batch.seq_lens.shape[0], spec, q.dtype.itemsize, batch.max_q <= 1, self._num_processors,
            self._pool.kv_scales is not None,
        )  # fmt: skip
        keys = batch.contiguous
        if keys is not None and sinks is None and q.dtype is self._rows_dtype:
            rows = self._contiguous_kv(layer, keys, spec, kv)
            if rows is not None and self._contiguous_attention is not None:
                self._contiguous_attention(q, *rows, keys, spec, out)
                if not keys.has_decodes:
                    return
                plan = replace(plan, long=None)
        workspace = torch.empty(elements, dtype=torch.float32, device=q.device)
        counters = self._counters_of(num_counters)
        paged_attention(q, self._pool, layer, batch, spec, plan, workspace, counters, out, sinks, pdl=self._pdl)

    def _counters_of(self, count: int) -> torch.Tensor:
        """At least `count` counters, all zero between launches. A captured graph keeps using the ones of its capture,
        so smaller ones are kept. Steps warm up with the largest shape, and before they are captured.
        """
        if self._attention_counters[-1].numel() < count:
            self._attention_counters.append(torch.zeros(count, dtype=torch.int32, device=self._pool.raw.device))
        return self._attention_counters[-1]

    def _contiguous_kv(
        self,
        layer: int,
        keys: ContiguousKeys,
        spec: AttentionSpec,
        kv: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V as `keys` describes them, or None if this layer has to read pages."""
        max_pages = self.max_gathered_pages(spec)
        if keys.pages is None:
            return kv if max_pages else None
        if keys.pages.shape[0] > max_pages or not is_gathering_worthwhile(keys, spec):
            return None
        return gather_pages(self._pool, layer, keys.pages, spec, self._rows_dtype)

    def multiply(self, linear: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return linear(x)

    def lora_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LoraCall, slots: torch.Tensor
    ) -> torch.Tensor:
        elements = self._adapters.geometry.adapter_elements
        plan = linear_plan(call.group, elements, x.shape[0], x.dtype.itemsize, self._num_processors)
        planes = self.lora_planes(call, x.shape[0])
        pool = self._adapters
        lora_shrink(pool, x, call, planes, pdl=self._pdl, may_start_early=False)
        return lora_linear(pool, x, weight, bias, planes, call, slots, plan, self._fused_counters, pdl=self._pdl)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps, pdl=self._pdl)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return add_rms_norm(x, residual, weight, eps, pdl=self._pdl)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(gate_up, pdl=self._pdl)

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gelu_and_mul(gate_up, pdl=self._pdl)

    def clamped_silu_and_mul(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        return clamped_silu_and_mul(gate_up, alpha, limit, pdl=self._pdl)

    def multiply_experts(self, x: torch.Tensor, experts: ExpertWeights, routing: Routing) -> torch.Tensor:
        if isinstance(experts, CodedWeights):
            return multiply_coded_experts(x, experts, routing)
        assert isinstance(experts, StackedExperts)
        return multiply_experts(x, experts, routing)

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, layer: int, batch: AttentionBatch, spec: DeltaSpec
    ) -> torch.Tensor:
        return convolve(x, weight, self._pool, layer, batch, spec)

    def delta_rule(
        self,
        qkv: torch.Tensor,
        gates: torch.Tensor,
        rates: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
        spec: DeltaSpec,
    ) -> torch.Tensor:
        return delta_rule(qkv, gates, rates, self._pool, layer, batch, spec)


@lru_cache(maxsize=4096)
def _planned(
    num_tokens: int,
    num_sequences: int,
    spec: AttentionSpec,
    itemsize: int,
    all_short: bool,
    num_processors: int,
    has_codes: bool,
) -> tuple[AttentionPlan, int, int]:
    """Plan a batch's launches, and the sizes of its workspace and counters.

    Layers with the same `spec` share a plan, and the next step often needs it again.
    """
    plan = attention_plan(
        num_tokens, num_sequences, spec, itemsize, all_short=all_short, num_processors=num_processors,
        has_codes=has_codes,
    )  # fmt: skip
    sizes = (num_tokens, num_sequences, spec)
    return plan, plan.workspace_elements(*sizes), plan.num_counters(*sizes)
