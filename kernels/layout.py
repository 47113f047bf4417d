"""Location of each element of an adapter in the pool's pages.

The pool is `uint8[P, L, page_bytes]`; its adapter view is `adapter_dtype[P, L, E]`. An adapter is one stream of
elements per layer, packed into the adapter's pages: for each module in order, the rows of A `[rank, in_features]`, then
the rows of B transposed `[rank, out_features]`. Chunk `chunk` of row `row` of a stream part starts at element

    e = offset + row * padded_len + chunk * chunk_len

which is stored at `pool[page_table[e // E], layer, e % E]`. A chunk never crosses a page boundary.

The outer modules (`lm_head`, `embed_tokens`) belong to no layer. They form a separate stream, in pages that precede the
layers' pages. Each of these pages is viewed as one layer of `L * E` elements (`PageGeometry.flat`), so the same formula
holds with that `E` and layer 0. An embedding's A is stored by token: row `t` of `[in_features, rank]` begins at `offset
+ t * rank`, is not padded, and may cross a page boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

MAX_CHUNK = 1024
MIN_CHUNK = 128
MAX_RANK = 256

A, B = 0, 1
"""Indices of a module's two halves in an offset table's last axis."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear layer that an adapter may target: `weight[out_features, in_features]`.

    An embedding is a linear layer with one-hot inputs: each row selects one of `in_features` tokens.
    """

    name: str
    in_features: int
    out_features: int
    is_embedding: bool = False


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Dimensions of a page; all pages of a pool have the same dimensions."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_itemsize: int
    adapter_itemsize: int
    page_tokens: int = 16

    @property
    def page_bytes(self) -> int:
        """Size in bytes of one page in one layer: K and V of `page_tokens` tokens."""
        return self.page_tokens * 2 * self.num_kv_heads * self.head_dim * self.kv_itemsize

    @property
    def kv_elements(self) -> int:
        """Number of elements of one page in one layer, viewed as K and V."""
        return self.page_bytes // self.kv_itemsize

    @property
    def adapter_elements(self) -> int:
        """`E`: number of elements of one page in one layer, viewed as adapter weights."""
        return self.page_bytes // self.adapter_itemsize

    @property
    def total_page_bytes(self) -> int:
        """Size in bytes of one page over all layers."""
        return self.page_bytes * self.num_layers

    @property
    def flat(self) -> PageGeometry:
        """This page viewed as one layer, for the outer modules' stream."""
        return replace(self, num_layers=1, num_kv_heads=self.num_layers * self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Layout of one stream part's rows, in elements; `chunk_len` divides `padded_len`."""

    row_len: int
    padded_len: int
    chunk_len: int


def _largest_power_of_two_dividing(number: int) -> int:
    return number & -number


def row_layout(row_len: int, page_elements: int) -> RowLayout:
    """Lay out rows of `row_len` elements in pages of `page_elements`.

    The chunk length is the largest power of two, at most 1024, that divides both. If it is below 128, rows are first
    padded to a multiple of `min(128, largest power of two dividing page_elements)`.
    """
    page_power = _largest_power_of_two_dividing(page_elements)
    chunk = min(MAX_CHUNK, page_power, _largest_power_of_two_dividing(row_len))
    padded_len = row_len
    if chunk < MIN_CHUNK:
        multiple = min(MIN_CHUNK, page_power)
        padded_len = -(-row_len // multiple) * multiple
        chunk = min(MAX_CHUNK, page_power, _largest_power_of_two_dividing(padded_len))
    return RowLayout(row_len=row_len, padded_len=padded_len, chunk_len=chunk)


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One half of one module in the stream: `num_rows` rows."""

    num_rows: int
    row: RowLayout

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.row.padded_len


def part_layout(module: LinearShape, half: int, rank: int, page_elements: int) -> PartLayout:
    """The layout of half `A` or `B` of a module of this rank in pages of `page_elements`."""
    if half == A and module.is_embedding:
        return PartLayout(module.in_features, RowLayout(row_len=rank, padded_len=rank, chunk_len=1))
    return PartLayout(rank, row_layout(module.out_features if half == B else module.in_features, page_elements))


def _no_ranks() -> npt.NDArray[np.int32]:
    return np.zeros(0, np.int32)


def _no_offsets() -> npt.NDArray[np.int32]:
    return np.zeros((0, 2), np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLayout:
    """Location of each module of one adapter.

    `ranks` int32 `[num_layers, num_modules]` (0: the module is absent), `offsets` int32 `[num_layers, num_modules, 2]`
    in elements of a layer. The first `num_outer_pages` of the adapter's `num_pages` pages contain the outer modules:
    `outer_ranks` int32 `[num_outer_modules]`, `outer_offsets` int32 `[num_outer_modules, 2]` in elements of whole
    pages. Both are empty if the adapter's target has no outer modules.
    """

    ranks: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]
    num_pages: int
    num_outer_pages: int = 0
    outer_ranks: npt.NDArray[np.int32] = field(default_factory=_no_ranks)
    outer_offsets: npt.NDArray[np.int32] = field(default_factory=_no_offsets)

    def rank_and_offsets(self, layer: int | None, module: int) -> tuple[int, int, int]:
        """Rank of a module, and the offsets of its A and B; `layer` is None for an outer module."""
        if layer is None:
            a, b = self.outer_offsets[module]
            return int(self.outer_ranks[module]), int(a), int(b)
        a, b = self.offsets[layer, module]
        return int(self.ranks[layer, module]), int(a), int(b)

    @property
    def max_rank(self) -> int:
        return max(int(self.ranks.max(initial=0)), int(self.outer_ranks.max(initial=0)))


def adapter_layout(
    geometry: PageGeometry,
    modules: Sequence[LinearShape],
    ranks: npt.NDArray[np.int32],
    outer_modules: Sequence[LinearShape] = (),
    outer_ranks: npt.NDArray[np.int32] | None = None,
) -> AdapterLayout:
    """Compute the layout of an adapter with `ranks` int32 `[num_layers, num_modules]`.

    `outer_ranks` is int32 `[num_outer_modules]`; None means that all are 0. Raises ValueError if a rank is outside `[0,
    MAX_RANK]` or a table has the wrong shape.
    """
    if outer_ranks is None:
        outer_ranks = np.zeros(len(outer_modules), np.int32)
    for name, table, shape in (
        ("ranks", ranks, (geometry.num_layers, len(modules))),
        ("outer ranks", outer_ranks, (len(outer_modules),)),
    ):
        if table.shape != shape:
            raise ValueError(f"{name} have shape {table.shape}, expected {shape}")
        if table.size and (table.min() < 0 or table.max() > MAX_RANK):
            raise ValueError(f"{name} must be in [0, {MAX_RANK}]")
    outer_elements, page_elements = geometry.flat.adapter_elements, geometry.adapter_elements
    outer_offsets = np.zeros((len(outer_modules), 2), np.int32)
    outer_end = _lay_out(outer_modules, outer_ranks, 0, outer_elements, outer_offsets)
    num_outer_pages = -(-outer_end // outer_elements)
    offsets = np.zeros((*ranks.shape, 2), np.int32)
    end = begin = num_outer_pages * page_elements
    for layer in range(geometry.num_layers):
        end = max(end, _lay_out(modules, ranks[layer], begin, page_elements, offsets[layer]))
    return AdapterLayout(
        ranks=ranks.astype(np.int32),
        offsets=offsets,
        num_pages=-(-end // page_elements),
        num_outer_pages=num_outer_pages,
        outer_ranks=outer_ranks.astype(np.int32),
        outer_offsets=outer_offsets,
    )


def _lay_out(
    modules: Sequence[LinearShape],
    ranks: npt.NDArray[np.int32],
    begin: int,
    page_elements: int,
    offsets: npt.NDArray[np.int32],
) -> int:
    """Lay out modules from element `begin` on, and return the end of the last one.

    Reads `ranks` `[num_modules]` and fills `offsets` `[num_modules, 2]`.
    """
    cursor = begin
    for m, module in enumerate(modules):
        rank = int(ranks[m])
        if rank == 0:
            continue
        for half in (A, B):
            part = part_layout(module, half, rank, page_elements)
            cursor = -(-cursor // part.row.chunk_len) * part.row.chunk_len
            offsets[m, half] = cursor
            cursor += part.num_elements
    return cursor
