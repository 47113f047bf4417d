"""Divides packed adapters among the workers of a tensor-parallel engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter, rows_of_part
from loramux.engine.parallel.sharding import Shard
from loramux.kernels.layout import AFFINE, A, AdapterLayout, LinearShape


@dataclass(frozen=True, slots=True)
class AdapterDivider:
    """Divides adapters that are packed for `whole`, the whole model.

    `own` is the target of one worker, whose modules are that worker's share of the whole model's modules. `shards` has
    the shares of each worker in `whole.all_modules`.
    """

    whole: PackTarget
    own: PackTarget
    shards: Sequence[Sequence[Shard]]

    def num_pages(self, packed: PackedAdapter) -> int:
        """Number of pages of each worker's share."""
        return self._layout(packed).num_pages

    def shares_of(self, packed: PackedAdapter) -> list[PackedAdapter]:
        """The share of each worker. All shares have the same layout."""
        return [self.share_of(packed, worker) for worker in range(len(self.shards))]

    def share_of(self, packed: PackedAdapter, worker: int) -> PackedAdapter:
        """The pages of worker `worker`. The outer modules and trained rows are the same for each worker."""
        own, old, layout = self.own, packed.layout, self._layout(packed)
        num_layers, first, page_elements = (
            own.geometry.num_layers,
            layout.num_outer_pages,
            own.geometry.adapter_elements,
        )
        payload = np.zeros((layout.num_pages, num_layers, own.geometry.page_bytes), np.uint8)
        source, pages = packed.payload.view(own.storage_dtype), payload.view(own.storage_dtype)
        self._copy_outer(source, old, pages[:first].reshape(-1), layout)
        for layer in range(num_layers):
            # Copies, because the pages of a layer are not contiguous.
            whole, stream = source[:, layer].reshape(-1), pages[:, layer].reshape(-1).copy()
            for index in np.flatnonzero(layout.ranks[layer]).tolist():
                shard = self.shards[worker][index]
                self._copy_share(whole, old, stream, layout, layer, index, shard, has_shift=worker == 0)
            pages[first:, layer] = stream.reshape(-1, page_elements)[first:]
        outer_scales = packed.outer_scales[: len(own.outer_modules)]
        return PackedAdapter(packed.digest, layout, packed.scales, payload, outer_scales, packed.base)

    def _layout(self, packed: PackedAdapter) -> AdapterLayout:
        old = packed.layout
        # Workers have no head for drafts, so they do not get an adapter's modules for it.
        outer_ranks = old.outer_ranks[: len(self.own.outer_modules)]
        return self.own.layout(old.ranks, outer_ranks, old.has_affines, old.rows)

    def _copy_share(
        self,
        source: npt.NDArray[Any],
        old: AdapterLayout,
        stream: npt.NDArray[Any],
        layout: AdapterLayout,
        layer: int,
        index: int,
        shard: Shard,
        has_shift: bool,
    ) -> None:
        rank, begins = layout.rank_and_offsets(layer, index)
        old_begins = old.rank_and_offsets(layer, index)[1]
        own, whole = self.own.all_modules[index], self.whole.all_modules[index]
        for part in layout.parts:
            rows = rows_of_part(source, whole, part, rank, old_begins[part], self.whole, layer)
            into = rows_of_part(stream, own, part, rank, begins[part], self.own, layer)
            _columns(rows, shard.inputs if part == A else shard.outputs, into)
            if part == AFFINE and shard.is_summed and not has_shift:
                # The outputs are added up, so only one worker may add the shift.
                into[1] = 0

    def _copy_outer(
        self, source: npt.NDArray[Any], old: AdapterLayout, stream: npt.NDArray[Any], layout: AdapterLayout
    ) -> None:
        whole = source[: old.num_outer_pages].reshape(-1)
        for index, module in enumerate(self.own.outer_modules):
            rank, begins = layout.rank_and_offsets(None, index)
            old_begins = old.rank_and_offsets(None, index)[1]
            for part in layout.parts if rank else ():
                rows = rows_of_part(whole, module, part, rank, old_begins[part], self.whole, None)
                rows_of_part(stream, module, part, rank, begins[part], self.own, None)[...] = rows
            self._copy_rows(whole, old, stream, layout, index, module)

    def _copy_rows(
        self,
        source: npt.NDArray[Any],
        old: AdapterLayout,
        stream: npt.NDArray[Any],
        layout: AdapterLayout,
        index: int,
        module: LinearShape,
    ) -> None:
        """Copy the trained rows of an outer module and their ids."""
        taken = old.row_span(index, module, self.whole.geometry)
        filled = layout.row_span(index, module, self.own.geometry)
        assert len(taken) == len(filled), "trained rows are laid out alike in pages of each size"
        as_bytes = stream.view(np.uint8)
        as_bytes[filled.start : filled.stop] = source.view(np.uint8)[taken.start : taken.stop]


def _columns(rows: npt.NDArray[Any], ranges: Sequence[range], into: npt.NDArray[Any]) -> None:
    """Copy the columns in `ranges` of `rows` `[num_rows, num_columns]` into `into`, side by side."""
    begin = 0
    for columns in ranges:
        into[:, begin : begin + len(columns)] = rows[:, columns.start : columns.stop]
        begin += len(columns)
