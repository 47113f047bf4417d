"""The base's own vectors that an adapter replaces: biases of linear layers, and weights and biases of norms.

PEFT's option `bias` trains biases, and `modules_to_save` trains norms. The adapter's rows get the difference from the
base as the affine of a module (`kernels/layout.py`). A module without a LoRA gets one of rank 1 that is zero, because
only modules with a rank have an affine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from loramux.adapter_store.formats.files.ignored_tensors import is_ignored
from loramux.adapter_store.formats.files.safetensors_header import TensorEntry
from loramux.adapter_store.formats.packed.module_places import (
    BIAS_SUFFIX,
    MAGNITUDE_SUFFIX,
    TENSOR_PREFIX,
    ModulePlace,
    norm_places,
    shared_places,
)
from loramux.adapter_store.formats.packed.pack_target import PackTarget

UNUSED_BIAS_SUFFIXES = (".original_module.bias", ".modules_to_save.bias")
"""Suffixes of other copies of a bias. PEFT saves them if both `bias` and `modules_to_save` train the module, but does
not use them with the adapter.
"""


@dataclass(frozen=True, slots=True)
class TrainedVector:
    """A vector `[size]` of a module that an adapter replaces."""

    place: ModulePlace
    size: int


def known_vectors(target: PackTarget, adapted: Collection[str]) -> dict[str, TrainedVector]:
    """Map the name of each tensor that could replace a vector of the base to the vector.

    `adapted` contains the keys of the modules with a LoRA, whose biases have other names.
    """
    found: dict[str, TrainedVector] = {}
    biased = [(place, place.shape.out_features) for place in shared_places(target) if place.shape.has_bias]
    for norm in norm_places(target):
        found[norm.weight_name] = TrainedVector(norm, norm.norm.size)
        if norm.norm.has_bias:
            biased.append((norm, norm.norm.size))
    for place, size in biased:
        vector = TrainedVector(place, size)
        found[place.base_bias_name(place.key in adapted)] = vector
        found.update((TENSOR_PREFIX + place.key + suffix, vector) for suffix in UNUSED_BIAS_SUFFIXES)
    return found


def trained_vectors(
    entries: Mapping[str, TensorEntry], target: PackTarget, adapted: Collection[str]
) -> dict[str, TrainedVector]:
    """Return the vectors that a file replaces, by the names of their tensors.

    `entries` are the file's tensors by PEFT's current names. `adapted` is as for `known_vectors`.
    """
    if not has_vectors(entries):
        return {}
    return {name: vector for name, vector in known_vectors(target, adapted).items() if name in entries}


def has_vectors(entries: Mapping[str, TensorEntry]) -> bool:
    """Return whether some tensors may replace vectors of the base, without knowing the base's modules."""
    of_lora = (MAGNITUDE_SUFFIX, BIAS_SUFFIX)
    return any(
        len(entry.shape) == 1 and not name.endswith(of_lora) and not is_ignored(name) for name, entry in entries.items()
    )
