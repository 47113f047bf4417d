"""Location of each element of an adapter in the pool's pages.

The pool is `uint8[P, L, page_bytes]`; its adapter view is `adapter_dtype[P, L, E]`. An adapter is one stream of
elements per layer, packed into the adapter's pages: for each module in order, the rows of A `[rank, in_features]`, then
the rows of B transposed `[rank, out_features]`. In an adapter with affines, such as a DoRA adapter, two rows follow
each B: the module's gain and shift `[out_features]`. Chunk `chunk` of row `row` of a stream part starts at element

    e = offset + row * padded_len + chunk * chunk_len

which is stored at `pool[page_table[e // E], layer, e % E]`. A chunk never crosses a page boundary.

The outer modules (`lm_head`, `embed_tokens`, and those of the base's own head for drafts) belong to no layer of the
pool. They form a separate stream, in pages that precede the layers' pages. Each of these pages is viewed as one layer
of `L * E` elements (`PageGeometry.flat`), so the same formula holds with that `E` and layer 0. An embedding's A is
stored by token: row `t` of `[in_features, rank]` begins at `offset + t * rank`, is not padded, and may cross a page
boundary.

The outer stream ends with the trained rows: rows of an outer module's own weight `[vocab_size, hidden_size]` that the
adapter replaces. They are stored like the rows of an A whose rank is the number of trained rows, in ascending order of
their token ids. The ids, int32, are stored in place of B, from byte `4 * offset` of the stream on. If all rows are
replaced, row `i` belongs to token `i`, and no ids are stored. An adapter with tokens beyond the base's vocabulary has a
row for each of them, and can therefore have more rows than the base's weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

MAX_CHUNK = 1024
MIN_CHUNK = 128
MAX_RANK = 256
MAX_ELEMENTS = (1 << 31) - 1
"""Maximum length of a stream, in elements. Offsets are int32."""

SCALE_BYTES = 2
"""Size of the scale of the K or V of one token and head, in bytes. Scales are bfloat16."""

ID_BYTES = 4
"""Size of a trained row's id, in bytes."""

MAX_EXTRA_TOKENS = 512
"""Maximum number of tokens that an adapter can have beyond the base's vocabulary, whose size includes padding."""

A, B, AFFINE = 0, 1, 2
"""Indices of a module's parts in an offset table's last axis."""

AFFINE_ROWS = 2
"""Gain and shift: the module's output is `y + gain * y + shift`, where `y` includes the product of A and B."""

NO_AFFINE = -1
"""Value of each module's affine offset if the adapter has no affines."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear layer that an adapter may target: `weight[out_features, in_features]`.

    An embedding is a linear layer with one-hot inputs: each row selects one of `in_features` tokens. `layers` are the
    layers that have this linear layer, or None for all. With `has_bias`, the base adds a bias `[out_features]`.
    """

    name: str
    in_features: int
    out_features: int
    is_embedding: bool = False
    layers: tuple[int, ...] | None = None
    has_bias: bool = False

    def is_in(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """One linear layer of each expert.

    In an adapter's file, its tensors are named `name`, where `{}` stands for the expert's number, or they are stacked
    for all experts and named `stack`. Either is None if the base has no such form. A linear layer without a `name` can
    be the fused form of linear layers with names, such as gate and up. With `alternates`, the outputs of gate and up
    alternate in an adapter's file.
    """

    name: str | None
    stack: str | None
    in_features: int
    out_features: int
    alternates: bool = False

    def shape(self, expert: int, layers: tuple[int, ...] | None) -> LinearShape:
        name = f"{self.stack}.{expert}" if self.name is None else self.name.format(expert)
        return LinearShape(name, self.in_features, self.out_features, layers=layers)


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """The linear layers of `num_experts` experts in `layers` (None: in all layers).

    Along the module axis, they follow all other modules, expert by expert. `router` is the module that chooses
    experts; adapters that were trained with transformers 5 call it `stacked_router`.
    """

    num_experts: int
    linears: tuple[ExpertLinear, ...]
    router: str
    stacked_router: str
    layers: tuple[int, ...] | None = None

    @property
    def modules(self) -> tuple[LinearShape, ...]:
        numbers = range(self.num_experts)
        return tuple(linear.shape(expert, self.layers) for expert in numbers for linear in self.linears)

    def index(self, expert: int, linear: int) -> int:
        """The index in `modules` of one linear layer of one expert."""
        return expert * len(self.linears) + linear

    @property
    def largest(self) -> tuple[bool, ...]:
        """Marks the linear layers that the largest adapter changes: those with a name, or all if none has a name."""
        has_names = any(linear.name is not None for linear in self.linears)
        return tuple(linear.name is not None or not has_names for linear in self.linears)


@dataclass(frozen=True, slots=True)
class NormShape:
    """One norm whose weight `[size]`, and bias if it has one, an adapter may replace.

    The norm divides its input into `repeats` parts, such as heads, which share the weight. `offset` is added to the
    stored weight. `layers` are the layers that have this norm, or None for all. The norm after the last layer, whose
    name is its full name, belongs to the last layer.
    """

    name: str
    size: int
    repeats: int = 1
    offset: float = 0.0
    has_bias: bool = False
    layers: tuple[int, ...] | None = None

    @property
    def linear(self) -> LinearShape:
        """This norm along the module axis: a module with an affine and a LoRA of rank 1 that is zero."""
        width = self.size * self.repeats
        return LinearShape(self.name, width, width, layers=self.layers)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Dimensions of a page; all pages of a pool have the same dimensions.

    With `elements_per_scale`, K and V are int8 codes. K or V of one token and head has one scale, which is outside of
    the page. There is a scale per `elements_per_scale` elements of a page: the greatest common divisor of the head
    dimensions of all layers, so the places of scales follow from the places of elements.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_itemsize: int
    adapter_itemsize: int
    page_tokens: int = 16
    elements_per_scale: int = 0

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
    def num_scales(self) -> int:
        """Number of scales of the K and V of one page in one layer, or 0 if they are not int8 codes."""
        return self.kv_elements // self.elements_per_scale if self.elements_per_scale else 0

    @property
    def pool_page_bytes(self) -> int:
        """Bytes that one page takes in a pool: `total_page_bytes`, and its scales."""
        return self.total_page_bytes + SCALE_BYTES * self.num_scales * self.num_layers

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
    """One part of one module in the stream: `num_rows` rows."""

    num_rows: int
    row: RowLayout

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.row.padded_len


def part_layout(module: LinearShape, part: int, rank: int, page_elements: int) -> PartLayout:
    """The layout of part `A`, `B` or `AFFINE` of a module of this rank in pages of `page_elements`."""
    if part == A and module.is_embedding:
        return PartLayout(module.in_features, RowLayout(row_len=rank, padded_len=rank, chunk_len=1))
    row_len = module.in_features if part == A else module.out_features
    return PartLayout(AFFINE_ROWS if part == AFFINE else rank, row_layout(row_len, page_elements))


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The number of rows that an adapter replaces in each outer module; `()` means none.

    With `is_shared`, all outer modules use the same rows, which are stored once, because the base ties its head to its
    embedding. `vocab_size` is the size of the adapter's vocabulary, or None for the base's vocabulary. An adapter with
    more tokens than the base has a row for each additional token.
    """

    counts: tuple[int, ...] = ()
    is_shared: bool = False
    vocab_size: int | None = None
    num_labels: int | None = None
    """Number of classes of a classifier, whose head is stored as rows of `lm_head`. None for other adapters."""

    def __post_init__(self) -> None:
        if self.is_shared and len(set(self.counts)) != 1:
            raise ValueError(f"modules with {self.counts} rows cannot share them")


NO_ROWS = RowCounts()


def trained_rows_of(module: LinearShape) -> tuple[int, int]:
    """The number of rows of an outer module's weight, one per token of the vocabulary, and their length."""
    if module.is_embedding:
        return module.in_features, module.out_features
    return module.out_features, module.in_features


def _no_ranks() -> npt.NDArray[np.int32]:
    return np.zeros(0, np.int32)


def _no_offsets() -> npt.NDArray[np.int32]:
    return np.zeros((0, 3), np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLayout:
    """Location of each module of one adapter.

    `ranks` is int32 `[num_layers, num_modules]`; 0 means that the module is absent. `offsets` is int32 `[num_layers,
    num_modules, 3]`, in elements of a layer. With `has_affines`, every module has an affine.

    The first `num_outer_pages` of the adapter's `num_pages` pages contain the outer modules. `outer_ranks` is int32
    `[num_outer_modules]`, and `outer_offsets` is int32 `[num_outer_modules, 3]`, in elements of whole pages. Both are
    empty if the base has no outer modules. The outer pages also contain the trained rows. `row_offsets`, int32
    `[num_outer_modules, 3]`, contains the offset of each module's rows, in elements, and the offset of its ids, in
    units of four bytes.
    """

    ranks: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]
    num_pages: int
    num_outer_pages: int = 0
    outer_ranks: npt.NDArray[np.int32] = field(default_factory=_no_ranks)
    outer_offsets: npt.NDArray[np.int32] = field(default_factory=_no_offsets)
    has_affines: bool = False
    rows: RowCounts = NO_ROWS
    row_offsets: npt.NDArray[np.int32] = field(default_factory=_no_offsets)

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts of each module in the stream."""
        return parts_of(self.has_affines)

    def rank_and_offsets(self, layer: int | None, module: int) -> tuple[int, tuple[int, ...]]:
        """Rank of a module, and the offsets of its parts; `layer` is None for an outer module."""
        at = module if layer is None else (layer, module)
        ranks, offsets = (self.ranks, self.offsets) if layer is not None else (self.outer_ranks, self.outer_offsets)
        return int(ranks[at]), tuple(offsets[at].tolist())

    def row_span(self, index: int, module: LinearShape, geometry: PageGeometry) -> range:
        """The bytes of the outer pages that contain an outer module's trained rows and their ids.

        Empty if the module has no trained rows, or shares those of the first outer module.
        """
        count = self.rows.counts[index] if self.rows.counts else 0
        if not count or (self.rows.is_shared and index):
            return range(0)
        begin, first_id = (int(offset) for offset in self.row_offsets[index, :2])
        num_ids = 0 if count >= trained_rows_of(module)[0] else count
        return range(begin * geometry.adapter_itemsize, (first_id + num_ids) * ID_BYTES)


def adapter_layout(
    geometry: PageGeometry,
    modules: Sequence[LinearShape],
    ranks: npt.NDArray[np.int32],
    outer_modules: Sequence[LinearShape] = (),
    outer_ranks: npt.NDArray[np.int32] | None = None,
    has_affines: bool = False,
    rows: RowCounts = NO_ROWS,
) -> AdapterLayout:
    """Compute the layout of an adapter with `ranks` int32 `[num_layers, num_modules]`.

    `outer_ranks` is int32 `[num_outer_modules]`; None means that all are 0. Raises ValueError if a rank is outside `[0,
    MAX_RANK]`, a table has the wrong shape, a module has more than MAX_EXTRA_TOKENS trained rows beyond its own rows,
    or offsets cannot address all elements.
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
    parts = parts_of(has_affines)
    outer_offsets, row_offsets = np.zeros((2, len(outer_modules), 3), np.int32)
    outer_end = _lay_out(outer_modules, outer_ranks, parts, 0, outer_elements, outer_offsets)
    outer_end = _lay_out_rows(outer_modules, rows, outer_end, geometry, row_offsets)
    num_outer_pages = -(-outer_end // outer_elements)
    offsets = np.zeros((*ranks.shape, 3), np.int32)
    end = begin = num_outer_pages * page_elements
    # Layers usually have the same ranks, and laying out hundreds of experts takes a millisecond.
    known: dict[bytes, tuple[int, int]] = {}
    for layer in range(geometry.num_layers):
        same = known.get(ranks[layer].tobytes())
        if same is None:
            layer_end = _lay_out(modules, ranks[layer], parts, begin, page_elements, offsets[layer])
            known[ranks[layer].tobytes()] = (layer, layer_end)
        else:
            like, layer_end = same
            offsets[layer] = offsets[like]
        end = max(end, layer_end)
    return AdapterLayout(
        ranks=ranks.astype(np.int32),
        offsets=offsets,
        num_pages=-(-end // page_elements),
        num_outer_pages=num_outer_pages,
        outer_ranks=outer_ranks.astype(np.int32),
        outer_offsets=outer_offsets,
        has_affines=has_affines,
        rows=rows,
        row_offsets=row_offsets,
    )


def parts_of(has_affines: bool) -> tuple[int, ...]:
    return (A, B, AFFINE) if has_affines else (A, B)


def _lay_out(
    modules: Sequence[LinearShape],
    ranks: npt.NDArray[np.int32],
    parts: Sequence[int],
    begin: int,
    page_elements: int,
    offsets: npt.NDArray[np.int32],
) -> int:
    """Lay out modules from element `begin` on, and return the end of the last module.

    Reads `ranks` `[num_modules]` and fills `offsets` `[num_modules, 3]`.
    """
    cursor = begin
    offsets[:, AFFINE] = NO_AFFINE
    for m, module in enumerate(modules):
        rank = int(ranks[m])
        if rank == 0:
            continue
        for index in parts:
            part = part_layout(module, index, rank, page_elements)
            cursor = -(-cursor // part.row.chunk_len) * part.row.chunk_len
            offsets[m, index] = cursor
            cursor += part.num_elements
            if cursor > MAX_ELEMENTS:
                raise ValueError(
                    f"a layer's modules need more than {MAX_ELEMENTS} elements, which is all that offsets can address"
                )
    return cursor


def _lay_out_rows(
    modules: Sequence[LinearShape],
    rows: RowCounts,
    begin: int,
    geometry: PageGeometry,
    offsets: npt.NDArray[np.int32],
) -> int:
    """Lay out trained rows from element `begin` of the outer stream on, fill `offsets`, and return the rows' end."""
    cursor, page_elements = begin, geometry.flat.adapter_elements
    if len(rows.counts) > len(modules):
        raise ValueError(f"there are rows of {len(rows.counts)} modules, but only {len(modules)} modules")
    # The modules of the head for drafts, which are last, have no trained rows.
    for m, (module, count) in enumerate(zip(modules, rows.counts, strict=False)):
        num_rows, row_len = trained_rows_of(module)
        if not 0 <= count <= num_rows + MAX_EXTRA_TOKENS:
            raise ValueError(f"{count} rows of {module.name} are outside [0, {num_rows + MAX_EXTRA_TOKENS}]")
        if rows.is_shared and m:
            offsets[m] = offsets[0]
        elif count:
            part = PartLayout(count, row_layout(row_len, page_elements))
            cursor = -(-cursor // part.row.chunk_len) * part.row.chunk_len
            end = cursor + part.num_elements
            words = -(-end * geometry.adapter_itemsize // ID_BYTES)
            num_ids = 0 if count >= num_rows else count
            end = -(-(words + num_ids) * ID_BYTES // geometry.adapter_itemsize)
            if end > MAX_ELEMENTS:
                raise ValueError(f"the trained rows end after {end} elements, but offsets reach only {MAX_ELEMENTS}")
            offsets[m, :2] = cursor, words
            cursor = end
    return cursor
