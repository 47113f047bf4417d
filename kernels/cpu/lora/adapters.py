"""The CPU's LoRA kernels over one page pool."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from loramux.kernels.cpu.instructions.arrays import array, planes_of, rows_of
from loramux.kernels.cpu.lora.addresses import group_plan
from loramux.kernels.cpu.lora.affines import apply_affines
from loramux.kernels.cpu.lora.gather import gather
from loramux.kernels.cpu.lora.low_rank import low_rank
from loramux.kernels.cpu.lora.trained_rows import replace_rows, store_columns
from loramux.kernels.layout import row_layout
from loramux.kernels.tables import AdapterTables, LoraCall, ModuleGroup, PoolViews, Segments

SEGMENT_ROWS = 64
"""Maximum number of rows per segment. The rows' activations stay in the L2 cache while an adapter is applied."""

NOWHERE = (0, 0)
"""Address and row stride of rows that no kernel accesses."""

MAX_VIEWS = 64
"""Maximum number of cached plane shapes. A step's shapes recur in each layer and usually in the next step."""


class CpuLora:
    """Shrink, gather and expand over one page pool in host memory.

    Values derived from tables and segments are cached as long as the same objects are passed, which covers all layers
    of a step. Arrays share memory with the tensors, so tables may be rewritten between steps. Each step has new
    `Segments` objects, without padding.
    """

    segment_rows = SEGMENT_ROWS

    def __init__(self, pool: PoolViews) -> None:
        pool = pool.of_adapters
        if pool.adapter.dtype not in (torch.float32, torch.bfloat16, torch.uint8):
            raise ValueError(f"adapters are {pool.adapter.dtype}; the CPU kernels support float32, bfloat16 and FP8")
        self._geometry = pool.geometry
        self.adapter_pool = array(pool.adapter, pool.adapter.dtype)  # [P, L, E]
        self._adapter_dtype = pool.adapter.dtype
        self._ids = array(pool.raw.view(torch.int32), torch.int32)
        self._plans: dict[ModuleGroup, npt.NDArray[np.int64]] = {}
        self._scratch = torch.empty(0)
        self._planes: dict[tuple[int, int, int], torch.Tensor] = {}
        self._tables: AdapterTables | None = None
        self._segments: Segments | None = None

    def lora_planes(self, call: LoraCall, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, len(call.group.modules), call.segments.max_rank)
        planes = self._planes.get(shape)
        if planes is None:
            size = shape[0] * shape[1] * shape[2]
            # Reuse memory. New memory would cause one page fault per 4 KiB for every linear layer.
            if self._scratch.shape[0] < size:
                self._scratch = torch.empty(size)
                self._planes.clear()
            if len(self._planes) == MAX_VIEWS:
                self._planes.clear()
            planes = self._planes[shape] = self._scratch[:size].view(shape)
        return planes

    def lora_shrink(self, x: torch.Tensor, call: LoraCall, planes: torch.Tensor) -> None:
        self._run(x, planes, None, call)

    def lora_expand(self, planes: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        self._run(None, planes, y, call)

    def lora_add(self, x: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        self._run(x, self.lora_planes(call, y.shape[0]), y, call)

    def lora_delta(self, x: torch.Tensor, call: LoraCall, slots: torch.Tensor, y: torch.Tensor) -> None:
        self.lora_add(x, call, y.zero_())

    def lora_affine(self, call: LoraCall, y: torch.Tensor) -> None:
        self._read(call)
        if self._slots.shape[0]:
            (width,), (module,) = call.group.out_features, call.group.modules
            layout = row_layout(width, self._geometry.adapter_elements)
            apply_affines(
                *rows_of(y), self.adapter_pool, call.layer, module, width, layout.padded_len, layout.chunk_len,
                self._page_table, self._off, self._segment_rows, self._starts, self._slots,
            )  # fmt: skip

    def lora_gather(self, tokens: torch.Tensor, call: LoraCall, planes: torch.Tensor) -> None:
        self._read(call)
        if self._slots.shape[0]:
            address, row_stride, _ = planes_of(planes)
            gather(
                array(tokens, torch.int32), address, row_stride, self.adapter_pool, call.layer, call.group.modules[0],
                self._page_table, self._off, self._rank, self._segment_rows, self._starts, self._slots,
            )  # fmt: skip

    def replace_rows(self, tokens: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        self._read(call)
        if self._slots.shape[0]:
            padded_len = row_layout(y.shape[1], self._geometry.adapter_elements).padded_len
            replace_rows(
                array(tokens, torch.int32), array(y, self._adapter_dtype), self.adapter_pool, self._ids,
                call.group.in_features, padded_len, call.group.modules[0],
                self._page_table, self._off, self._rank, self._segment_rows, self._starts, self._slots,
            )  # fmt: skip

    def replace_columns(self, x: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        self._read(call)
        if self._slots.shape[0]:
            # The head's trained rows are multiplied like the rows of A.
            planes = self.lora_planes(call, x.shape[0])
            self.lora_shrink(x, call, planes)
            address, row_stride, _ = planes_of(planes)
            store_columns(
                address, row_stride, *rows_of(y), self._ids, call.group.out_features[0], call.group.modules[0],
                self._page_table, self._off, self._rank, self._segment_rows, self._starts, self._slots,
            )  # fmt: skip

    def _run(self, x: torch.Tensor | None, planes: torch.Tensor, y: torch.Tensor | None, call: LoraCall) -> None:
        """Shrink if `x` is given, then expand if `y` is given."""
        self._read(call)
        if self._slots.shape[0]:
            x_rows, shifts = self._segment_rows, self._no_shifts
            if call.segments.experts is not None:
                shifts = array(call.segments.experts, torch.int32) * np.int32(call.group.expert_stride)
                if x is not None:
                    x_rows = x_rows // np.int32(planes.shape[0] // x.shape[0])
            low_rank(
                torch.get_num_threads(), x is not None, y is not None,
                *(NOWHERE if x is None else rows_of(x)), *planes_of(planes), *(NOWHERE if y is None else rows_of(y)),
                self.adapter_pool, call.layer, self.plan(call.group), self._page_table, self._off, self._rank,
                self._scale, x_rows, self._segment_rows, self._starts, self._slots, shifts,
            )  # fmt: skip

    def plan(self, group: ModuleGroup) -> npt.NDArray[np.int64]:
        plan = self._plans.get(group)
        if plan is None:
            plan = self._plans[group] = group_plan(group, self._geometry)
        return plan

    def _read(self, call: LoraCall) -> None:
        tables, segments = call.tables, call.segments
        if tables is not self._tables:
            self._page_table, self._off = array(tables.page_table, torch.int32), array(tables.off, torch.int32)
            self._rank, self._scale = array(tables.rank, torch.int32), array(tables.scale, torch.float32)
            self._tables = tables
        if segments is not self._segments:
            self._segment_rows = array(segments.rows, torch.int32)
            self._starts, self._slots = array(segments.starts, torch.int32), array(segments.slots, torch.int32)
            self._segments = segments
            self._no_shifts = np.zeros(self._slots.shape[0], np.int32)
