"""Packs an adapter's canonical file into pages for the pool."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.float_formats import to_pool_dtype
from loramux.adapter_store.formats.files.ignored_tensors import is_ignored
from loramux.adapter_store.formats.packed.affines import dora_affine, norm_affine
from loramux.adapter_store.formats.packed.canonical import CanonicalAdapter, digest_of
from loramux.adapter_store.formats.packed.class_head import CLASS_HEADS, class_head_names
from loramux.adapter_store.formats.packed.fp8 import not_in_fp8, to_fp8_factors
from loramux.adapter_store.formats.packed.module_places import (
    MAGNITUDE_SUFFIX,
    ModulePlace,
    NormPlace,
    module_of,
    module_places,
    shared_places,
    unused_projections,
)
from loramux.adapter_store.formats.packed.pack_target import FP8, PackTarget
from loramux.adapter_store.formats.packed.rearranged_places import in_order, rearranged_places
from loramux.adapter_store.formats.packed.replaced_rows import LoadedWeights, ReplacedRows, replaced_rows, write_rows
from loramux.adapter_store.formats.packed.trained_rows import outer_weight_names
from loramux.adapter_store.formats.packed.trained_vectors import TrainedVector, has_vectors, trained_vectors
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.kernels.layout import (
    AFFINE,
    MAX_RANK,
    A,
    AdapterLayout,
    B,
    LinearShape,
    part_layout,
)

_BLOCK_COLUMNS = 128
"""Number of columns of B transposed that are copied at a time, few enough for their rows to stay in the processor's
first cache.
"""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedAdapter:
    """An adapter in the pool's format: each page of the payload is copied whole into one page of the pool.

    `scales` is float32 `[num_layers, num_modules]` and `outer_scales` float32 `[len(all_outer_modules)]`, 0 for an
    absent module. `payload` is uint8 `[num_pages, num_layers, page_bytes]`. With `E` elements per layer in a page,
    element `e` of layer `l`'s stream is `payload.view(dtype)[e // E, l, e % E]`. Element `e` of the outer stream is
    element `e` of the first `layout.num_outer_pages` pages. Padding is zero. `base` is the fingerprint of the base's
    weights if the payload depends on them, or None.
    """

    digest: str
    layout: AdapterLayout
    scales: npt.NDArray[np.float32]
    payload: npt.NDArray[np.uint8]
    outer_scales: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    base: str | None = None

    @property
    def num_pages(self) -> int:
        return self.layout.num_pages


def needs_base(canonical: Path | bytes) -> bool:
    """Return whether packing needs the base's weights, as it does for DoRA, trained vectors and whole weights."""
    with CanonicalAdapter(canonical) as file:
        return _needs_base(file)


def pack(
    canonical: Path | bytes, target: PackTarget, base: BaseWeights | None = None, digest: str | None = None
) -> PackedAdapter:
    """Lay out a canonical adapter for `target`. `base` is required if `needs_base(canonical)`. `digest` is the file's
    SHA-256, if the caller knows it.

    Raises AdapterCorrupt if the file is damaged, AdapterRejected if the adapter does not fit the base, or
    AdapterUnavailable if the base's weights cannot be read.
    """
    if target.dtype == FP8:
        return _to_fp8(pack(canonical, target.in_float32, base, digest), target)
    with CanonicalAdapter(canonical) as file:
        vectors = trained_vectors(file.header.tensors, target, file.scales)
        places = _places(file, target, vectors)
        if not _needs_base(file):
            base = None
        replaced = replaced_rows(file, target, base)
        num_layers = target.geometry.num_layers
        ranks, scales = _tables((num_layers, len(target.all_modules)))
        outer_ranks, outer_scales = _tables((len(target.all_outer_modules),))
        parts = []
        for place in places:
            at = _index(place)
            into_ranks, into_scales = (outer_ranks, outer_scales) if place.layer is None else (ranks, scales)
            rank = place.rank_of(file.header.tensors[place.a_name].shape)
            parts.append(_Part(place, range(into_ranks[at], into_ranks[at] + rank)))
            into_ranks[at] += rank
            into_scales[at] = max(into_scales[at], file.scales[place.key])
        with_affine = {place.key: place for place in _places_with_affine(vectors, replaced, target)}
        without_lora = [place for place in with_affine.values() if place.key not in file.scales]
        for place in without_lora:
            into_ranks = outer_ranks if place.layer is None else ranks
            into_ranks[_index(place)] = max(into_ranks[_index(place)], 1)
        parts += [_Part(place, range(0)) for place in without_lora]
        own_vectors = {name for place in places for name in (place.magnitude_name, place.bias_name)}
        has_affines = bool(with_affine) or not own_vectors.isdisjoint(file.header.tensors)
        layout = target.layout(ranks, outer_ranks, has_affines, replaced.counts)
        payload = np.zeros((layout.num_pages, num_layers, target.geometry.page_bytes), np.uint8)
        pages = payload.view(target.storage_dtype)  # [num_pages, num_layers, E]
        first, page_elements = layout.num_outer_pages, target.geometry.adapter_elements
        own_stream = np.empty(layout.num_pages * page_elements, pages.dtype)
        parts.sort(key=lambda part: -1 if part.place.layer is None else part.place.layer)
        for layer, members in groupby(parts, lambda part: part.place.layer):
            is_outer = layer is None
            stream = pages[:first].reshape(-1) if is_outer else own_stream
            stream.fill(0)
            for _, same_key in groupby(members, lambda part: part.place.key):
                stack = _StackedB(file, target.dtype)
                for part in same_key:
                    index = part.place.module
                    scale = float(outer_scales[index] if layer is None else scales[layer, index])
                    _write(file, part, scale, stack, layout, stream, target, base, replaced, vectors)
            if not is_outer:
                pages[first:, layer] = stream.reshape(-1, page_elements)[first:]
        write_rows(file, replaced, layout, pages[:first].reshape(-1), target)
    fingerprint = base.fingerprint if base else None
    return PackedAdapter(digest or digest_of(canonical), layout, scales, payload, outer_scales, fingerprint)


def _to_fp8(packed: PackedAdapter, target: PackTarget) -> PackedAdapter:
    """Convert an adapter that is packed in float32. Raises AdapterRejected if FP8 codes cannot represent it."""
    wide, old = target.in_float32, packed.layout
    if old.has_affines or any(old.rows.counts):
        raise not_in_fp8()
    layout = target.layout(old.ranks, old.outer_ranks)
    scales, outer_scales = packed.scales.copy(), packed.outer_scales.copy()
    values = packed.payload.view(wide.storage_dtype)
    payload = np.zeros((layout.num_pages, target.geometry.num_layers, target.geometry.page_bytes), np.uint8)
    for layer in (None, *range(target.geometry.num_layers)):
        is_outer = layer is None
        pages, into = (
            (values[: old.num_outer_pages], payload[: layout.num_outer_pages])
            if is_outer
            else (values[:, layer], payload[:, layer])
        )
        # Copies, because the pages of a layer are not contiguous.
        source, stream = pages.reshape(-1), into.reshape(-1).copy()
        for index, module in enumerate(target.all_outer_modules if is_outer else target.all_modules):
            rank, offsets = layout.rank_and_offsets(layer, index)
            if not rank:
                continue
            old_offsets = old.rank_and_offsets(layer, index)[1]
            A_rows, B_rows = (rows_of_part(source, module, p, rank, old_offsets[p], wide, layer) for p in (A, B))
            codes = to_fp8_factors(A_rows, B_rows)
            for p, coded in ((A, codes.A), (B, codes.B)):
                rows_of_part(stream, module, p, rank, offsets[p], target, layer)[...] = coded
            of_all, at = (outer_scales, index) if layer is None else (scales, (layer, index))
            with np.errstate(over="ignore"):
                scale = np.float32(float(of_all[at]) * codes.factor)
            if not np.isfinite(scale):
                raise AdapterRejected("non_finite_values", "the products of A and B are too large for FP8", module.name)
            of_all[at] = scale
        into[...] = stream.reshape(into.shape)
    return PackedAdapter(packed.digest, layout, scales, payload, outer_scales, packed.base)


def rows_of_part(
    stream: npt.NDArray[Any],
    shape: LinearShape,
    part: int,
    rank: int,
    begin: int,
    target: PackTarget,
    layer: int | None,
) -> npt.NDArray[Any]:
    """A view of a part of one module in its stream: A `[rank, in_features]` or B transposed `[rank, out_features]`."""
    geometry = target.geometry.flat if layer is None else target.geometry
    rows = part_layout(shape, part, rank, geometry.adapter_elements)
    view = stream[begin : begin + rows.num_elements].reshape(rows.num_rows, rows.row.padded_len)[:, : rows.row.row_len]
    return view.T if shape.is_embedding and part == A else view


@dataclass(frozen=True, slots=True)
class _Part:
    """Tensors of one module in the file, with the module's ranks that they fill.

    Usually, a module has one part and `ranks` are all of its ranks. If the file divides a fused module, each of its
    parts fills its own ranks and outputs. A module that has an affine but no LoRA has a part without ranks.
    """

    place: ModulePlace
    ranks: range


def _places_with_affine(
    vectors: Mapping[str, TrainedVector], replaced: ReplacedRows, target: PackTarget
) -> Iterator[ModulePlace]:
    """List modules that need an affine even without a LoRA: those whose vectors the adapter replaces, and a biased head
    whose rows it replaces.
    """
    yield from (vector.place for vector in vectors.values())
    for place in shared_places(target) if replaced.counts.num_labels is None else ():
        if place.layer is None and place.shape.has_bias and len(replaced.tokens[place.key]):
            yield place


def _index(place: ModulePlace) -> int | tuple[int, int]:
    """Return the index of a module in the tables of the outer modules or of the layers."""
    return place.module if place.layer is None else (place.layer, place.module)


def _tables(shape: tuple[int, ...]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    return np.zeros(shape, np.int32), np.zeros(shape, np.float32)


def _places(file: CanonicalAdapter, target: PackTarget, vectors: Mapping[str, TrainedVector]) -> list[ModulePlace]:
    """List the modules with a LoRA. Raises AdapterRejected if the base has no module of the same name and shape.

    `vectors` are the vectors of the base that the file replaces, by the names of their tensors.
    """
    entries = file.header.tensors
    every = (*module_places(target), *rearranged_places(target))
    places = in_order([place for place in every if place.key in file.scales])
    for place in places:
        a, b = entries.get(place.a_name), entries.get(place.b_name)
        rank = place.rank_of(a.shape) if a else 0
        num_rows = rank * place.num_experts
        if (
            not a
            or not b
            or not 0 < rank <= MAX_RANK
            or a.shape != (num_rows, place.shape.in_features)
            or b.shape != (place.file_outputs, num_rows)
        ):
            raise AdapterRejected("base_mismatch", "the adapter was made for another base model", place.key)
    known = {name for place in places for name in (place.a_name, place.b_name, place.magnitude_name, place.bias_name)}
    known.update(name for module in target.outer_modules for name in outer_weight_names(module.name))
    if file.num_labels is not None:
        known.update(name for head in CLASS_HEADS for name in class_head_names(head))
    unused = unused_projections(target)
    known.update(name for name in entries if is_ignored(name) or module_of(name) in unused)
    known.update(name for name, vector in vectors.items() if entries[name].shape == (vector.size,))
    if len({place.key for place in places}) != len(file.scales) or not known.issuperset(entries):
        raise AdapterRejected("base_mismatch", "the adapter has modules that the base model does not have")
    return places


def _needs_base(file: CanonicalAdapter) -> bool:
    entries = file.header.tensors
    has_magnitudes = any(name.endswith(MAGNITUDE_SUFFIX) for name in entries)
    return has_magnitudes or has_vectors(entries) or any(rows.whole is not None for rows in file.trained.values())


class _StackedB:
    """Reads a B once for all modules that share it, such as all experts of a stack, whose columns are interleaved."""

    def __init__(self, file: CanonicalAdapter, dtype: str) -> None:
        self._file = file
        self._dtype = dtype
        self._whole: npt.NDArray[Any] | None = None

    def of(self, place: ModulePlace, scale: float) -> npt.NDArray[Any]:
        """Return the module's B `[out_features, rank]`, for an A and B that are multiplied by `scale`.

        Parts of one module that have different scales have to be multiplied by the ratio.
        """
        if self._whole is None:
            own = self._file.scales[place.key]
            if np.float32(own) == np.float32(scale):
                self._whole = self._file.converted(place.b_name, self._dtype)
            else:
                scaled = self._file.float32(place.b_name) * np.float32(own / scale)
                self._whole = to_pool_dtype(scaled, self._dtype)
        B = place.of_module(self._whole[:, place.b_columns])
        if place.outputs is not None:
            whole = np.zeros((place.shape.out_features, B.shape[1]), B.dtype)
            whole[place.outputs.start : place.outputs.stop] = B
            return whole
        return np.concatenate((B[::2], B[1::2])) if place.alternates else B


def _write(
    file: CanonicalAdapter,
    part: _Part,
    scale: float,
    stack: _StackedB,
    layout: AdapterLayout,
    stream: npt.NDArray[Any],
    target: PackTarget,
    base: BaseWeights | None,
    replaced: ReplacedRows,
    vectors: Collection[str],
) -> None:
    """Write all stream parts of a module, with `scale`, into its stream."""
    place = part.place
    geometry = target.geometry.flat if place.layer is None else target.geometry
    rank, offsets = layout.rank_and_offsets(place.layer, place.module)
    for index in layout.parts if part.ranks else (AFFINE,):
        # A is [rank, in_features], B is [out_features, rank]; an embedding's A is laid out by token.
        if index == A:
            rows = file.converted(place.a_name, target.dtype, place.a_rows(len(part.ranks)))
            rows = rows.T if place.shape.is_embedding else rows
        elif index == B:
            rows = stack.of(place, scale).T
        else:
            rows = to_pool_dtype(_affine(file, place, base, replaced, vectors), target.dtype)
        layout_of_part = part_layout(place.shape, index, rank, geometry.adapter_elements)
        begin = offsets[index]
        at = stream[begin : begin + layout_of_part.num_elements]
        at = at.reshape(layout_of_part.num_rows, layout_of_part.row.padded_len)[:, : layout_of_part.row.row_len]
        if index == AFFINE:
            # The parts of a module have different outputs, and zeros elsewhere.
            np.copyto(at, rows, where=rows != 0)
        else:
            first = 0 if place.shape.is_embedding else part.ranks.start
            into = at[first : first + len(rows)]
            for begin in range(0, rows.shape[1], _BLOCK_COLUMNS):
                into[:, begin : begin + _BLOCK_COLUMNS] = rows[:, begin : begin + _BLOCK_COLUMNS]


def _affine(
    file: CanonicalAdapter,
    place: ModulePlace,
    base: BaseWeights | None,
    replaced: ReplacedRows,
    vectors: Collection[str],
) -> npt.NDArray[np.float32]:
    """Return a module's gain and shift, float32 `[2, out_features]`. Both are zero for a plain LoRA.

    `vectors` names the tensors that replace the base's own vectors. Others of such names were ignored by validation.
    """
    has_lora, names, outputs = place.key in file.scales, file.header.tensors, place.module_outputs
    if isinstance(place, NormPlace):
        assert base is not None, "packing a trained norm needs the base's norm"
        weight, bias = (
            file.float32(name) if name in vectors else None
            for name in (place.weight_name, place.base_bias_name(has_lora))
        )
        return norm_affine(place, weight, bias, base)
    affine = np.zeros((2, place.shape.out_features), np.float32)
    if place.magnitude_name in names:
        assert base is not None, "packing a DoRA adapter needs the base's weights"
        A, B, magnitude = (file.float32(name) for name in (place.a_name, place.b_name, place.magnitude_name))
        weights = LoadedWeights(file, base)
        affine[:, outputs.start : outputs.stop] = dora_affine(
            place, A, place.of_module(B), file.scales[place.key], place.of_module(magnitude), weights
        )
    elif place.bias_name in names:
        shift = file.scales[place.key] * place.of_module(file.float32(place.bias_name))
        affine[1, outputs.start : outputs.stop] = shift
    if (name := place.base_bias_name(has_lora)) in vectors:
        affine[1] += file.float32(name) - _base_bias(base, place, name)
    tokens = replaced.tokens.get(place.key)
    if place.shape.has_bias and tokens is not None and len(tokens) and replaced.counts.num_labels is None:
        # The products with replaced rows lack the base's bias.
        affine[1, tokens] += (1 + affine[0, tokens]) * _base_bias(base, place, place.key)[tokens]
    return affine


def _base_bias(base: BaseWeights | None, place: ModulePlace, param: str) -> npt.NDArray[np.float32]:
    bias = None if base is None else base.bias(place.key)
    if bias is None:
        raise AdapterRejected("base_mismatch", "the base has no bias that the adapter could replace", param)
    return bias
