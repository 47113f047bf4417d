"""From an adapter's canonical file to the pages that the pool holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.canonical import CanonicalAdapter, digest_of
from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.expected_modules import A_SUFFIX, B_SUFFIX, TENSOR_PREFIX, module_key
from loramux.adapter_store.float_formats import to_bfloat16_bits, to_float32
from loramux.adapter_store.safetensors_header import TensorEntry
from loramux.adapter_store.target import PackTarget
from loramux.kernels.layout import MAX_RANK, A, AdapterLayout, B, adapter_layout, row_layout


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter as the pool takes it: page `i` of the payload is copied whole into one page of the pool.

    `scales` float32 `[num_layers, num_modules]`, 0 where the module is absent. `payload` uint8
    `[num_pages, num_layers, page_bytes]`: element `e` of layer `l`'s stream is `payload.view(dtype)[e // E, l, e % E]`;
    elements that belong to no row are zero.
    """

    digest: str
    layout: AdapterLayout
    scales: npt.NDArray[np.float32]
    payload: npt.NDArray[np.uint8]

    @property
    def num_pages(self) -> int:
        return self.layout.num_pages


def pack(canonical: Path | bytes, target: PackTarget) -> PackedAdapter:
    """Lay a canonical adapter out for `target`.

    Raises AdapterCorrupt for a damaged file and AdapterRejected where the adapter was made for another base.
    """
    with CanonicalAdapter(canonical) as file:
        ranks, scales = _ranks_and_scales(file.header.tensors, file.scales, target)
        layout = adapter_layout(target.geometry, target.modules, ranks)
        payload = np.zeros((layout.num_pages, target.geometry.num_layers, target.geometry.page_bytes), np.uint8)
        pages = payload.view(target.storage_dtype)  # [num_pages, num_layers, E]
        for layer in range(target.geometry.num_layers):
            pages[:, layer] = _layer_stream(file, layer, layout, target).reshape(layout.num_pages, -1)
    return PackedAdapter(digest_of(canonical), layout, scales, payload)


def _ranks_and_scales(
    entries: Mapping[str, TensorEntry], module_scales: Mapping[str, float], target: PackTarget
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    num_layers, num_modules = target.geometry.num_layers, len(target.modules)
    ranks = np.zeros((num_layers, num_modules), np.int32)
    scales = np.zeros((num_layers, num_modules), np.float32)
    num_placed = 0
    for layer in range(num_layers):
        for m, module in enumerate(target.modules):
            key = module_key(layer, module)
            if key not in module_scales:
                continue
            a = entries.get(TENSOR_PREFIX + key + A_SUFFIX)
            b = entries.get(TENSOR_PREFIX + key + B_SUFFIX)
            rank = a.shape[0] if a else 0
            if (
                not a
                or not b
                or not 0 < rank <= MAX_RANK
                or a.shape != (rank, module.in_features)
                or b.shape != (module.out_features, rank)
            ):
                raise AdapterRejected("base_mismatch", "the adapter was made for another base model", key)
            ranks[layer, m] = rank
            scales[layer, m] = module_scales[key]
            num_placed += 1
    if num_placed != len(module_scales) or 2 * num_placed != len(entries):
        raise AdapterRejected("base_mismatch", "the adapter has modules that the base model lacks")
    return ranks, scales


def _layer_stream(file: CanonicalAdapter, layer: int, layout: AdapterLayout, target: PackTarget) -> npt.NDArray[Any]:
    """The stream of one layer: `[num_pages * E]` elements."""
    page_elements = target.geometry.adapter_elements
    stream = np.zeros(layout.num_pages * page_elements, target.storage_dtype)
    for m, module in enumerate(target.modules):
        rank = int(layout.ranks[layer, m])
        if rank == 0:
            continue
        prefix = TENSOR_PREFIX + module_key(layer, module)
        for half, name in ((A, prefix + A_SUFFIX), (B, prefix + B_SUFFIX)):
            weights = _converted(file, name, target.dtype)
            rows = weights if half == A else weights.T  # [rank, row_len]
            padded_len = row_layout(rows.shape[1], page_elements).padded_len
            offset = int(layout.offsets[layer, m, half])
            place = stream[offset : offset + rank * padded_len].reshape(rank, padded_len)
            place[:, : rows.shape[1]] = rows
    return stream


def _converted(file: CanonicalAdapter, name: str, dtype: str) -> npt.NDArray[Any]:
    stored = file.header.tensors[name].dtype
    values = file.raw(name)
    if dtype == "float32":
        return to_float32(values, stored)
    return values if stored == "BF16" else to_bfloat16_bits(to_float32(values, stored))
