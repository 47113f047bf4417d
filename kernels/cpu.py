"""The kernels of the CPU: numba for what touches pages, torch for dense attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loramux.kernels import cpu_attention, cpu_fused, cpu_kv, cpu_lora
from loramux.kernels.cpu_prefill import GatheredAttention
from loramux.kernels.cpu_vectors import LANES
from loramux.kernels.tables import AdapterTables, AttentionBatch, AttentionSpec, ModuleGroup, PoolViews, Segments

SEGMENT_ROWS = 64
"""Rows of a segment: a chunk of so many rows stays in the second-level cache while an adapter piece passes over it."""

NO_WINDOW = 1 << 40
"""A window wider than any context."""


class CpuKernels:
    """The kernels over one page pool in host memory.

    What is derived from tables, a batch or segments is kept for as long as the same object comes again, which is all
    layers of a step. Arrays share memory with the tensors, so tables may be rewritten between steps; a batch and its
    segments are new objects each step, and are not padded.
    """

    segment_rows = SEGMENT_ROWS

    def __init__(self, pool: PoolViews) -> None:
        if pool.geometry.page_tokens != cpu_kv.PAGE_TOKENS:
            raise ValueError(
                f"pages hold {pool.geometry.page_tokens} tokens; the CPU's kernels take {cpu_kv.PAGE_TOKENS}"
            )
        if pool.geometry.head_dim % LANES:
            raise ValueError(f"head_dim is {pool.geometry.head_dim}; the CPU's kernels take multiples of {LANES}")
        for dtype in (pool.kv.dtype, pool.adapter.dtype):
            if dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"the pool holds {dtype}; the CPU's kernels take float32 and bfloat16")
        self._geometry = pool.geometry
        self._kv = _array(pool.kv, pool.kv.dtype)  # [P, L, kv elements]
        self._adapter = _array(pool.adapter, pool.adapter.dtype)  # [P, L, E]
        self._gathered = GatheredAttention(self._kv)
        self._plans: dict[ModuleGroup, npt.NDArray[np.int64]] = {}
        self._scratch = torch.empty(0)
        self._tables: AdapterTables | None = None
        self._segments: Segments | None = None
        self._batch: AttentionBatch | None = None

    def lora_planes(self, group: ModuleGroup, num_tokens: int, segments: Segments) -> torch.Tensor:
        shape = (num_tokens, len(group.modules), segments.max_rank)
        size = shape[0] * shape[1] * shape[2]
        # Fresh memory would cost a page fault each 4 KiB, in every linear of every layer.
        if self._scratch.shape[0] < size:
            self._scratch = torch.empty(size)
        return self._scratch[:size].view(shape)

    def lora_shrink(
        self,
        x: torch.Tensor,
        layer: int,
        group: ModuleGroup,
        tables: AdapterTables,
        segments: Segments,
        planes: torch.Tensor,
    ) -> None:
        self._read(tables, segments)
        if self._slots.shape[0]:
            cpu_lora.shrink(
                torch.get_num_threads(), *_rows(x), *_planes(planes), self._adapter, layer, self._plan(group),
                self._page_table, self._off, self._rank, self._segment_rows, self._starts, self._slots,
            )  # fmt: skip

    def lora_expand(
        self,
        planes: torch.Tensor,
        layer: int,
        group: ModuleGroup,
        tables: AdapterTables,
        segments: Segments,
        y: torch.Tensor,
    ) -> None:
        self._read(tables, segments)
        if self._slots.shape[0]:
            cpu_lora.expand(
                torch.get_num_threads(), *_planes(planes), *_rows(y), self._adapter, layer, self._plan(group),
                self._page_table, self._off, self._rank, self._scale, self._segment_rows, self._starts, self._slots,
            )  # fmt: skip

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, layer: int, batch: AttentionBatch) -> None:
        self._read_batch(batch)
        cpu_kv.write(
            *_rows(k), *_rows(v), self._kv, layer, self._kv_slots, self._geometry.num_kv_heads, self._geometry.head_dim
        )

    def paged_attention(
        self, q: torch.Tensor, layer: int, batch: AttentionBatch, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        self._read_batch(batch)
        if self._decodes.shape[0]:
            window = NO_WINDOW if spec.sliding_window is None else spec.sliding_window
            cpu_attention.decode(
                torch.get_num_threads(), *_rows(q), *_rows(out), self._kv, layer,
                self._decodes, self._cu_q, self._seq_lens, self._kv_pages, self._page_starts,
                spec.num_heads // spec.num_kv_heads, spec.num_kv_heads, spec.head_dim,
                float(spec.scale), window, float(spec.soft_cap or 0.0),
            )  # fmt: skip
        for i in self._prefills:
            begin, end = int(self._cu_q[i]), int(self._cu_q[i + 1])
            length = int(self._seq_lens[i])
            pages = self._kv_pages[self._page_starts[i] :]
            self._gathered.attend(q[begin:end], layer, pages, length, spec, out[begin:end])

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert weight.dtype is torch.float32
        assert weight.is_contiguous()
        size = x.shape[-1]
        rows = x.reshape(-1, size)
        out = torch.empty(x.shape)
        cpu_fused.rms_norm(*_rows(rows), out.data_ptr(), weight.data_ptr(), rows.shape[0], size, float(eps))
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert weight.dtype is torch.float32
        assert weight.is_contiguous()
        num_rows, size = x.shape
        out = torch.empty(num_rows, size)
        cpu_fused.add_rms_norm(
            *_rows(x), *_rows(residual), out.data_ptr(), weight.data_ptr(), num_rows, size, float(eps)
        )
        return out

    def rotary(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        num_rows, half = cos.shape
        for angles in (cos, sin):
            assert angles.dtype is torch.float32
            assert angles.is_contiguous()
        cpu_fused.rotary(
            *_rows(q), q.shape[1], *_rows(k), k.shape[1], q.shape[2], cos.data_ptr(), sin.data_ptr(), num_rows, half
        )

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_rows, size)
        cpu_fused.silu_and_mul(*_rows(gate_up), out.data_ptr(), num_rows, size)
        return out

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_rows, size)
        cpu_fused.gelu_and_mul(*_rows(gate_up), out.data_ptr(), num_rows, size)
        return out

    def _plan(self, group: ModuleGroup) -> npt.NDArray[np.int64]:
        plan = self._plans.get(group)
        if plan is None:
            plan = self._plans[group] = cpu_lora.group_plan(group, self._geometry)
        return plan

    def _read(self, tables: AdapterTables, segments: Segments) -> None:
        if tables is not self._tables:
            self._page_table, self._off = _array(tables.page_table, torch.int32), _array(tables.off, torch.int32)
            self._rank, self._scale = _array(tables.rank, torch.int32), _array(tables.scale, torch.float32)
            self._tables = tables
        if segments is not self._segments:
            self._segment_rows = _array(segments.rows, torch.int32)
            self._starts, self._slots = _array(segments.starts, torch.int32), _array(segments.slots, torch.int32)
            self._segments = segments

    def _read_batch(self, batch: AttentionBatch) -> None:
        if batch is not self._batch:
            self._cu_q, self._seq_lens = _array(batch.cu_q, torch.int32), _array(batch.seq_lens, torch.int32)
            self._kv_pages = _array(batch.pages, torch.int32)
            self._page_starts = _array(batch.page_starts, torch.int32)
            self._kv_slots = _array(batch.kv_slots, torch.int64)
            num_queries = np.diff(self._cu_q)
            self._decodes = np.flatnonzero(num_queries == 1)
            self._prefills = np.flatnonzero(num_queries > 1).tolist()
            self._batch = batch


def _array(tensor: torch.Tensor, dtype: torch.dtype) -> npt.NDArray[Any]:
    """The memory of a tensor as numba reads it, bfloat16 as its bits.

    Another dtype or layout would compile a kernel again, in the middle of a step.
    """
    assert tensor.dtype is dtype, f"expected {dtype}, got {tensor.dtype}"
    assert tensor.is_contiguous()
    return (tensor.view(torch.uint16) if dtype is torch.bfloat16 else tensor).numpy()


def _rows(x: torch.Tensor) -> tuple[int, int]:
    """Address and row stride of an activation `[T, n]` or `[T, heads, head_dim]` whose rows are contiguous."""
    assert x.dtype is torch.float32
    assert x.stride(-1) == 1
    assert x.dim() == 2 or x.stride(1) == x.shape[2]
    return x.data_ptr(), x.stride(0)


def _planes(planes: torch.Tensor) -> tuple[int, int, int]:
    assert planes.dtype is torch.float32
    assert planes.stride(2) == 1
    return planes.data_ptr(), planes.stride(0), planes.stride(1)
