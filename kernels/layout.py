"""Where every adapter element lies inside the pages of the pool.

The pool is `uint8[P, L, page_bytes]`; its adapter view is `adapter_dtype[P, L, E]`. An adapter is one stream of
elements a layer, packed over the adapter's pages: for each module in order, the rows of A `[rank, in_features]`,
then the rows of B-transposed `[rank, out_features]`. Row `row`, chunk `chunk` of a stream part starts at

    e = offset + row * padded_len + chunk * chunk_len

and is found at `pool[page_table[e // E], layer, e % E]`. A chunk never straddles a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_CHUNK = 1024
MIN_CHUNK = 128
MAX_RANK = 256

A, B = 0, 1
"""Index of the two halves of a module in the last axis of an offset table."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear layer that an adapter may target: `weight[out_features, in_features]`."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Sizes of a page; equal for every page of a pool."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_itemsize: int
    adapter_itemsize: int
    page_tokens: int = 16

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer: K and V of `page_tokens` tokens."""
        return self.page_tokens * 2 * self.num_kv_heads * self.head_dim * self.kv_itemsize

    @property
    def kv_elements(self) -> int:
        """Elements of one page in one layer, seen as K and V."""
        return self.page_bytes // self.kv_itemsize

    @property
    def adapter_elements(self) -> int:
        """`E`: elements of one page in one layer, seen as adapter weights."""
        return self.page_bytes // self.adapter_itemsize

    @property
    def total_page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.page_bytes * self.num_layers


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How the rows of one stream part are laid: padded length and the chunk that divides it, in elements."""

    row_len: int
    padded_len: int
    chunk_len: int


def _largest_power_of_two_dividing(number: int) -> int:
    return number & -number


def row_layout(row_len: int, page_elements: int) -> RowLayout:
    """Lay rows of `row_len` elements over pages of `page_elements`.

    The chunk is the largest power of two, at most 1024, that divides both; where that is below 128, rows are padded
    to a multiple of `min(128, largest power of two dividing page_elements)`.
    """
    page_power = _largest_power_of_two_dividing(page_elements)
    chunk = min(MAX_CHUNK, page_power, _largest_power_of_two_dividing(row_len))
    padded_len = row_len
    if chunk < MIN_CHUNK:
        multiple = min(MIN_CHUNK, page_power)
        padded_len = -(-row_len // multiple) * multiple
        chunk = min(MAX_CHUNK, page_power, _largest_power_of_two_dividing(padded_len))
    return RowLayout(row_len=row_len, padded_len=padded_len, chunk_len=chunk)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLayout:
    """The place of each module of one adapter.

    `ranks` int32 `[num_layers, num_modules]` (0: the module is absent), `offsets` int32 `[num_layers, num_modules, 2]`
    in elements, `num_pages` of the longest layer.
    """

    ranks: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]
    num_pages: int


def adapter_layout(
    geometry: PageGeometry, modules: Sequence[LinearShape], ranks: npt.NDArray[np.int32]
) -> AdapterLayout:
    """Compute the layout of an adapter with `ranks` int32 `[num_layers, num_modules]`.

    Raises ValueError when a rank lies outside `[0, MAX_RANK]` or the table has another shape.
    """
    if ranks.shape != (geometry.num_layers, len(modules)):
        raise ValueError(f"ranks have shape {ranks.shape}, expected {(geometry.num_layers, len(modules))}")
    if ranks.size and (ranks.min() < 0 or ranks.max() > MAX_RANK):
        raise ValueError(f"ranks must lie in [0, {MAX_RANK}]")
    page_elements = geometry.adapter_elements
    rows = [
        (row_layout(module.in_features, page_elements), row_layout(module.out_features, page_elements))
        for module in modules
    ]
    offsets = np.zeros((*ranks.shape, 2), np.int32)
    longest = 0
    for layer in range(geometry.num_layers):
        cursor = 0
        for m, parts in enumerate(rows):
            rank = int(ranks[layer, m])
            if rank == 0:
                continue
            for half, part in enumerate(parts):
                cursor = -(-cursor // part.chunk_len) * part.chunk_len
                offsets[layer, m, half] = cursor
                cursor += rank * part.padded_len
        longest = max(longest, cursor)
    return AdapterLayout(ranks=ranks.astype(np.int32), offsets=offsets, num_pages=-(-longest // page_elements))
