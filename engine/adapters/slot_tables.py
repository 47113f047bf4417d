"""The adapter tables. They are allocated once, at fixed addresses, and written one slot at a time between steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from loramux.adapter_store.formats.packed.pack_target import FP8, PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.architectures.model_config import EMBEDDING, HEAD
from loramux.engine.device.accelerator import Accelerator
from loramux.engine.sequences.batch import OuterSlots
from loramux.kernels.tables import AdapterTables


class TableWriter(Protocol):
    def write(self, slot: int, pages: list[int], packed: PackedAdapter) -> None:
        """Point the slot at the adapter stored in `pages`, for steps submitted from now on."""


class SlotTables:
    """Tables for `num_slots` adapters. Each slot has room for an adapter of the highest rank on every module.

    `outer_factors` are the factors that the base applies to the outputs of the outer modules. `device` contains the
    tables that kernels read. On a GPU, each slot is staged in host memory and copied in step order. A slot's staging
    memory can be overwritten without waiting for the last copy of the slot: before each write, the new adapter is
    copied into its pages, and that copy waits for everything submitted before it (see `PageCopier`).
    """

    def __init__(
        self, target: PackTarget, num_slots: int, accelerator: Accelerator, outer_factors: tuple[float, ...]
    ) -> None:
        shape = (target.geometry.num_layers, len(target.all_modules))
        outer_shape = (1, len(target.outer_modules))

        def zeros(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            num_bytes = dtype.itemsize * num_slots * int(np.prod(sizes))
            return accelerator.host_buffer(num_bytes).view(dtype).view(num_slots, *sizes).zero_()

        def tables(page_table: torch.Tensor, shape: tuple[int, int]) -> AdapterTables:
            return AdapterTables(
                page_table=page_table,
                off=zeros(torch.int32, *shape, 3),
                rank=zeros(torch.int32, *shape),
                scale=zeros(torch.float32, *shape),
            )

        page_table = zeros(torch.int32, target.max_pages)
        outer = tables(page_table, outer_shape)
        trained_rows = tables(page_table, outer_shape)
        drafter = tables(page_table, (1, len(target.draft_modules))) if target.draft_modules else None
        self._host = replace(tables(page_table, shape), outer=outer, trained_rows=trained_rows, drafter=drafter)
        self._factors = np.array(outer_factors, np.float32)
        self.device = self._host
        # Pairs of a staged table and its device table.
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        if accelerator.device.type != "cpu":
            self.device = _on(accelerator.device, self._host)
            self._copied = list(zip(_tensors(self._host), _tensors(self.device), strict=True))
        if target.dtype == FP8:
            # FP8 adapters have no trained rows, and kernels cannot read such rows as codes.
            self.device = replace(self.device, trained_rows=None)
        # numpy views of the staged tables: numpy writes a few numbers ten times as fast as torch does.
        self._written = tuple(table.numpy() for table in _tensors(self._host))
        self._max_ranks = np.zeros(num_slots, np.int32)
        self._has_module = np.zeros((num_slots, len(target.all_modules)), np.bool_)
        self._has_affines = np.zeros(num_slots, np.bool_)
        self._has_outer = np.zeros((num_slots, len(target.outer_modules)), np.bool_)
        self._num_rows = np.zeros((num_slots, len(target.outer_modules)), np.int32)
        self._max_draft_ranks = np.zeros(num_slots, np.int32)
        # If the target has no embedding, no adapter can have its own vocabulary.
        self._base_vocab_size = target.vocab_size or 0
        self._vocab_sizes = np.full(num_slots, self._base_vocab_size, np.int32)

    def write(self, slot: int, pages: list[int], packed: PackedAdapter) -> None:
        layout = packed.layout
        page_table, off, rank, scale, outer_off, outer_rank, outer_scale, row_off, num_rows, *drafter = self._written
        num_outer = self._has_outer.shape[1]
        outer_ranks, draft_ranks = layout.outer_ranks[:num_outer], layout.outer_ranks[num_outer:]
        page_table[slot, : len(pages)] = pages
        off[slot] = layout.offsets
        rank[slot] = layout.ranks
        scale[slot] = packed.scales
        # Offsets and scales of outer modules and of trained rows are written only for adapters that have them.
        outer_rank[slot] = 0
        self._has_outer[slot] = False
        if outer_ranks.any() or layout.rows.counts:
            outer_off[slot, 0] = layout.outer_offsets[:num_outer]
            outer_rank[slot, 0] = outer_ranks
            outer_scale[slot, 0] = packed.outer_scales[:num_outer] * self._factors
            self._has_outer[slot] = outer_ranks > 0
        self._max_draft_ranks[slot] = draft_ranks.max(initial=0)
        if drafter:
            draft_off, draft_rank, draft_scale = drafter
            draft_rank[slot, 0] = 0
            if self._max_draft_ranks[slot]:
                draft_off[slot, 0] = layout.outer_offsets[num_outer:]
                draft_rank[slot, 0] = draft_ranks
                draft_scale[slot, 0] = packed.outer_scales[num_outer:]
        num_rows[slot] = self._num_rows[slot] = 0
        if layout.rows.counts:
            row_off[slot, 0] = layout.row_offsets[:num_outer]
            num_rows[slot, 0] = self._num_rows[slot] = layout.rows.counts
            self._has_outer[slot] |= self._num_rows[slot] > 0
        self._vocab_sizes[slot] = self._base_vocab_size
        if layout.rows.vocab_size is not None:
            # Even an adapter without trained rows can have a smaller vocabulary than the base.
            self._vocab_sizes[slot] = layout.rows.vocab_size
            self._has_outer[slot] = True
        # The ranks of a drafter are left out: they must not change how the layers of the base are computed.
        self._max_ranks[slot] = max(int(layout.ranks.max(initial=0)), int(outer_ranks.max(initial=0)))
        self._has_module[slot] = layout.ranks.any(axis=0)
        self._has_affines[slot] = layout.has_affines
        for staged, table in self._copied:
            table[slot].copy_(staged[slot], non_blocking=True)

    def max_rank(self, slots: npt.NDArray[np.int32]) -> int:
        """Highest rank of the adapters in `slots`, where -1 is the base, or 0 if there are no adapters.

        Does not include their drafters.
        """
        used = slots[slots >= 0]
        return int(self._max_ranks[used].max(initial=0))

    def max_rows(self, slots: npt.NDArray[np.int32], module: int) -> int:
        """Largest number of trained rows of an outer module among the adapters in `slots`, where -1 is the base."""
        return int(self._num_rows[slots[slots >= 0], module].max(initial=0))

    def vocab_sizes(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        """Vocabulary sizes of the adapters in `slots`, int32, where -1 is the base. None if all equal the base's."""
        sizes = np.where(slots >= 0, self._vocab_sizes[slots], np.int32(self._base_vocab_size))
        return sizes if (sizes != self._base_vocab_size).any() else None

    def modules(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Modules that adapters in `slots` change in any layer, bool `[num_modules]`. Slot -1 is the base."""
        changed: npt.NDArray[np.bool_] = np.logical_or.reduce(self._has_module[slots[slots >= 0]], axis=0)
        return changed

    def has_affines(self, slots: npt.NDArray[np.int32]) -> bool:
        """True if an adapter in `slots` rescales or shifts the output of a module in a layer. Slot -1 is the base."""
        return bool(self._has_affines[slots[slots >= 0]].any())

    def max_draft_rank(self, slots: npt.NDArray[np.int32]) -> int:
        """Highest rank of the drafters of the adapters in `slots`, where -1 is the base, or 0 if there are none."""
        return int(self._max_draft_ranks[slots[slots >= 0]].max(initial=0))

    def have_drafters(self, slots: npt.NDArray[np.int32]) -> list[bool]:
        """Whether each of `slots`, where -1 is the base, has an adapter with a drafter."""
        found: list[bool] = ((slots >= 0) & (self._max_draft_ranks[slots] > 0)).tolist()
        return found

    def outer_slots(self, slots: npt.NDArray[np.int32], sample_rows: npt.NDArray[np.int32]) -> OuterSlots | None:
        """For each row, the slot of the adapter that changes its embedding or logits, or -1.

        None if no row has such an adapter.

        `slots` int32 `[num_tokens]`, -1 for the base. `sample_rows` int32 `[num_samples]`.
        """
        if not self._has_outer[slots[slots >= 0]].any():
            return None
        samples = slots[sample_rows]
        return OuterSlots(embedding=self._having(slots, EMBEDDING), head=self._having(samples, HEAD))

    def _having(self, slots: npt.NDArray[np.int32], module: int) -> npt.NDArray[np.int32]:
        is_there = (slots >= 0) & self._has_outer[slots, module]
        return np.where(is_there, slots, np.int32(-1))


def _tensors(tables: AdapterTables) -> tuple[torch.Tensor, ...]:
    assert tables.outer is not None
    assert tables.trained_rows is not None
    outer, rows = tables.outer, tables.trained_rows
    inner = tables.page_table, tables.off, tables.rank, tables.scale
    drafter = () if tables.drafter is None else (tables.drafter.off, tables.drafter.rank, tables.drafter.scale)
    return (*inner, outer.off, outer.rank, outer.scale, rows.off, rows.rank, *drafter)


def _on(device: torch.device, tables: AdapterTables) -> AdapterTables:
    page_table, off, rank, scale, *outer = (table.to(device) for table in _tensors(tables))
    outer_off, outer_rank, outer_scale, row_off, num_rows, *drafter = outer
    return AdapterTables(
        page_table,
        off,
        rank,
        scale,
        outer=AdapterTables(page_table, outer_off, outer_rank, outer_scale),
        trained_rows=AdapterTables(page_table, row_off, num_rows, outer_scale),
        drafter=AdapterTables(page_table, drafter[0], drafter[1], drafter[2]) if drafter else None,
    )
