"""Finds the base's modules in files that fuse them, or that divide the base's fused modules.

Releases of one model can differ in whether they fuse linear layers that have the same input, such as q, k and v. The
weights are the same, so an adapter of one release also fits the other:

- If the base fuses the layers and the file does not, the fused layer's A stacks the parts' A, and its B is
  block-diagonal: each part's B computes the part's outputs from the part's ranks.
- If the file fuses the layers and the base does not, each of the base's layers has the file's A and its own rows of B.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import accumulate

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.packed.module_places import ModulePlace, module_key, module_places
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.kernels.layout import LinearShape

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
}
"""The parts of each fused layer, in the order of its outputs."""

_Modules = dict[str, tuple[int, LinearShape]]
"""A layer's modules by name, with their indices in `PackTarget.modules`."""


def places_in_file(target: PackTarget, modules: Collection[str]) -> list[ModulePlace]:
    """List the base's modules that an adapter may change, layer by layer, divided like the file's `modules`.

    Raises AdapterRejected if the file has both a fused layer and one of its parts.
    """
    places = list(module_places(target))
    others = list(rearranged_places(target))
    divided = {place.shape.name for place in others if place.key in modules}
    if not divided:
        return places
    both = next((place for place in places if place.shape.name in divided and place.key in modules), None)
    if both is not None:
        raise AdapterRejected(
            "ambiguous_names", "the file has tensors for a fused layer and for its parts", both.a_name
        )
    kept = [place for place in places if place.shape.name not in divided]
    return in_order([*kept, *(place for place in others if place.shape.name in divided)])


def in_order(places: Collection[ModulePlace]) -> list[ModulePlace]:
    """Sort modules like `module_places`: the outer modules, then layer by layer."""
    return sorted(places, key=lambda place: -1 if place.layer is None else place.layer)


def rearranged_places(target: PackTarget) -> Iterator[ModulePlace]:
    """List the modules of `target` as files may store them if they divide the base's modules differently."""
    for layer in range(target.geometry.num_layers):
        here = {shape.name: (index, shape) for index, shape in enumerate(target.modules) if shape.is_in(layer)}
        for name in here:
            parent, dot, last = name.rpartition(".")
            if last in _FUSED:
                yield from _divided(here, layer, parent + dot, last, target)
            for fused, parts in _FUSED.items():
                if last == parts[0] and all(parent + dot + part in here for part in parts):
                    yield from _fused(here, layer, parent + dot, fused)


def _divided(here: _Modules, layer: int, parent: str, fused: str, target: PackTarget) -> Iterator[ModulePlace]:
    """List the parts of one of the base's fused layers."""
    index, shape = here[parent + fused]
    widths = _widths(here, parent, fused, target)
    for part, begin, width in zip(_FUSED[fused], _begins(widths), widths, strict=True):
        key = f"model.layers.{layer}.{parent}{part}"
        outputs = range(begin, begin + width)
        yield ModulePlace(key, layer, index, shape, parent + part, num_b_rows=width, outputs=outputs)


def _fused(here: _Modules, layer: int, parent: str, fused: str) -> Iterator[ModulePlace]:
    """List the base's layers that are the parts of a fused layer in the file."""
    modules = [here[parent + part] for part in _FUSED[fused]]
    widths = [shape.out_features for _, shape in modules]
    key = module_key(layer, replace(modules[0][1], name=parent + fused))
    for (index, shape), begin, width in zip(modules, _begins(widths), widths, strict=True):
        rows = range(begin, begin + width)
        yield ModulePlace(key, layer, index, shape, parent + fused, num_b_rows=sum(widths), b_rows=rows)


def _begins(widths: list[int]) -> list[int]:
    return [0, *accumulate(widths[:-1])]


def _widths(here: _Modules, parent: str, fused: str, target: PackTarget) -> list[int]:
    """Return the number of outputs of each part of one of the base's fused layers."""
    total = here[parent + fused][1].out_features
    if fused == "gate_up_proj":
        return [total // 2, total // 2]
    if fused == "qkv_proj":
        keys = target.geometry.num_kv_heads * target.geometry.head_dim
        return [total - 2 * keys, keys, keys]
    # The output of a gated delta rule is as wide as its values.
    values = here[parent + "out_proj"][1].in_features
    return [(total - values) // 2, (total - values) // 2, values]
