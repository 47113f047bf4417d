"""Random adapters in shuffled pages of a pool, the same adapters as dense matrices, and batches that use them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.model import Model
from loramux.engine.execution.step_shape import MAX_SINGLE_ROWS
from loramux.kernels.layout import AdapterLayout, B, adapter_layout, row_layout
from loramux.kernels.segments import SEGMENT_ROWS, build_segments, max_segments
from loramux.kernels.tables import AdapterTables, PoolViews, Segments

SCALE = 2.0
"""`alpha / r`, the same for all adapters, because vLLM's kernels accept only one value."""

MAX_RANK = 64
"""Highest rank in any case. All cases use page tables for this rank, so that they share compiled kernels."""

POISON = 1 << 30
"""Value of unused entries in the segment starts. It is larger than any row or segment number."""


@dataclass(frozen=True, slots=True)
class LoraCase:
    """`num_rows` rows of `num_sequences` sequences, split evenly among adapters of these `ranks`."""

    num_rows: int
    num_sequences: int
    ranks: tuple[int, ...]
    label: str

    @property
    def num_adapters(self) -> int:
        return len(self.ranks)

    @property
    def rows_each(self) -> int:
        return self.num_rows // self.num_adapters

    @property
    def slots(self) -> np.ndarray:
        return np.repeat(np.arange(self.num_adapters, dtype=np.int32), self.rows_each)

    @property
    def is_uniform(self) -> bool:
        return len(set(self.ranks)) == 1

    def __str__(self) -> str:
        return f"T={self.num_rows} N={self.num_adapters} r={self.label}"


class ResidentAdapters:
    """Adapters of the given ranks on all seven linear layers, without rank padding, in shuffled pages. The pool's
    random elements are the adapters' weights. With `shares_pages`, all adapters share a few pages, which is enough for
    compiling kernels but not for measurements.
    """

    def __init__(self, bench: Bench, model: Model, pool: PoolViews, ranks: tuple[int, ...], shares_pages: bool) -> None:
        geometry, device = pool.geometry, bench.device
        self.model, self.pool, self.ranks = model, pool, ranks
        self._layouts = {rank: self._layout(rank) for rank in {*ranks, MAX_RANK}}
        counts = [self._layouts[rank].num_pages for rank in ranks]
        num_pages = pool.raw.shape[0]
        if sum(counts) > num_pages and not shares_pages:
            raise MemoryError(
                f"the adapters need {sum(counts) * geometry.total_page_bytes / 1e9:.1f} GB, "
                f"but the pool has {num_pages * geometry.total_page_bytes / 1e9:.1f} GB"
            )
        shuffled = torch.from_numpy(np.random.default_rng(2).permutation(max(num_pages, sum(counts))) % num_pages)
        # Unused entries point to the first page and are never read.
        page_table = torch.zeros(len(ranks), self._layouts[MAX_RANK].num_pages, dtype=torch.int32)
        begin = 0
        for slot, count in enumerate(counts):
            page_table[slot, :count] = shuffled[begin : begin + count]
            begin += count
        off = np.stack([self._layouts[rank].offsets for rank in ranks])
        rank = np.stack([self._layouts[rank].ranks for rank in ranks])
        self.tables = AdapterTables(
            page_table=page_table.to(device),
            off=torch.from_numpy(off).to(device),
            rank=torch.from_numpy(rank).to(device),
            scale=torch.full(rank.shape, SCALE, device=device),
        )

    def _layout(self, rank: int) -> AdapterLayout:
        model = self.model
        ranks = np.full((model.num_layers, len(model.modules)), rank, np.int32)
        return adapter_layout(self.pool.geometry, model.modules, ranks)

    @property
    def max_rank(self) -> int:
        return max(self.ranks)

    def rows(self, layer: int, module: int, half: int, slots: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the matrix A as `[num_slots, rank, in]`, or B transposed as `[num_slots, rank, out]`, as `half` says.

        All slots must have this rank.

        The function reads only these adapters' pages and does not use the kernels, so that the kernels can be checked
        against the result.
        """
        shape = self.model.modules[module]
        layout = row_layout(shape.out_features if half == B else shape.in_features, self.pool.geometry.adapter_elements)
        E, begin = self.pool.geometry.adapter_elements, int(self._layouts[rank].offsets[layer, module, half])
        length = rank * layout.padded_len
        first, last = begin // E, -(-(begin + length) // E)
        pages = self.tables.page_table[slots, first:last].long()
        stream = self.pool.adapter[pages, layer].flatten(1)[:, begin - first * E :][:, :length]
        return stream.unflatten(1, (rank, layout.padded_len))[:, :, : layout.row_len]

    def slots_by_rank(self) -> dict[int, torch.Tensor]:
        device = self.tables.rank.device
        return {
            rank: torch.tensor([slot for slot, own in enumerate(self.ranks) if own == rank], device=device)
            for rank in sorted(set(self.ranks))
        }

    def weight_bytes(self) -> int:
        """Bytes of all adapters' A and B in all layers, each counted once and without padding."""
        elements = sum(module.in_features + module.out_features for module in self.model.modules)
        return sum(self.ranks) * elements * self.model.num_layers * self.pool.adapter.element_size()


@dataclass(frozen=True, slots=True, eq=False)
class LoraBatch:
    """A case's rows on the device. `xs[g]` `[T, in]` is the input to group `g`, the same in all layers."""

    case: LoraCase
    model: Model
    xs: tuple[torch.Tensor, ...]
    segments: Segments

    def outputs(self) -> list[torch.Tensor]:
        """New random rows `[T, total_out]` for each group, in place of the base's output."""
        device = self.xs[0].device
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(3)
        return [
            torch.randn(
                self.case.num_rows, group.total_out, generator=generator, device=x.device, dtype=torch.float32
            ).mul_(0.1).to(x.dtype)
            for group, x in zip(self.model.groups, self.xs, strict=True)
        ]  # fmt: skip

    def activation_bytes(self) -> int:
        """Bytes to read x, read y and write y once each, in all groups and layers."""
        elements = sum(group.in_features + 2 * group.total_out for group in self.model.groups)
        return self.case.num_rows * elements * self.model.num_layers * self.xs[0].element_size()


def batch_of(bench: Bench, model: Model, case: LoraCase) -> LoraBatch:
    """The case's rows and segments, as in an engine's step. The segments are padded to the number that a captured graph
    has room for.
    """
    generator = bench.generator(4)
    xs = tuple(
        torch.randn(case.num_rows, group.in_features, generator=generator, device=bench.device).to(bench.dtype)
        for group in model.groups
    )
    has_single_rows = case.num_rows == case.num_sequences and case.rows_each <= MAX_SINGLE_ROWS
    segment_rows = 1 if has_single_rows else SEGMENT_ROWS
    listed = build_segments(case.slots, segment_rows)
    missing = max_segments(case.num_rows, case.num_sequences) - listed.num_segments
    tail = torch.full((missing,), POISON, dtype=torch.int32)
    segments = Segments(
        rows=listed.rows.to(bench.device),
        starts=torch.cat([listed.starts, tail]).to(bench.device),
        slots=torch.cat([listed.slots, torch.full_like(tail, -1)]).to(bench.device),
        max_rank=max(case.ranks),
        max_rows=segment_rows,
    )
    return LoraBatch(case, model, xs, segments)


def expected_change(adapters: ResidentAdapters, batch: LoraBatch, layer: int) -> list[torch.Tensor]:
    """The adapters' contribution to each group's output in this layer, float64 `[T, total_out]`, from dense
    matrices.
    """
    case, model = batch.case, batch.model
    changes = []
    for group, x in zip(model.groups, batch.xs, strict=True):
        change = torch.zeros(case.num_rows, group.total_out, dtype=torch.float64, device=x.device)
        for rank, slots in adapters.slots_by_rank().items():
            for i, module in enumerate(group.modules):
                a, b = (adapters.rows(layer, module, half, slots, rank) for half in (0, 1))
                columns = slice(group.out_offsets[i], group.out_offsets[i] + group.out_features[i])
                for n, slot in enumerate(slots.tolist()):
                    rows = slice(slot * case.rows_each, (slot + 1) * case.rows_each)
                    change[rows, columns] = SCALE * (x[rows].double() @ a[n].double().T @ b[n].double())
        changes.append(change)
    return changes
