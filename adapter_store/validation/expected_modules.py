"""The modules that a PEFT configuration targets, with their ranks and scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.module_places import TENSOR_PREFIX, ModulePlace, module_places
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.validation.peft_config import PeftConfig
from loramux.kernels.layout import MAX_RANK

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class ExpectedModule(ModulePlace):
    """A module that the adapter changes by `scale * B A`, with A `[rank, in]` and B `[out, rank]`.

    `vector_name` is the tensor of its magnitude or bias, `[out]`, or None if it has neither.
    """

    rank: int
    scale: float
    vector_name: str | None


def expected_modules(config: PeftConfig, target: PackTarget, ranks_in_file: Mapping[str, int]) -> list[ExpectedModule]:
    """Return the targeted modules, in the order of the packed streams and by PEFT's rules.

    `ranks_in_file` maps the key of each module with tensors to its rank. It replaces the configuration's regular
    expressions.

    As in PEFT, `all-linear` leaves out `lm_head`, and with `layers_to_transform` the embedding must be named in full,
    `model.embed_tokens`. Raises AdapterRejected for a name that matches no module, so that typos do not go unnoticed.
    """
    num_layers = target.geometry.num_layers
    places = list(module_places(target))
    _check_names(config, [place.key for place in places])
    if config.layers is not None and not config.targets_from_tensors and max(config.layers) >= num_layers:
        raise AdapterRejected(
            "base_mismatch", f"the base has {num_layers} layers, numbered from 0", "layers_to_transform"
        )
    expected = []
    for place in places:
        if place.key in config.modules_to_save:
            # PEFT adds no LoRA to a module whose own weight was trained.
            continue
        if not (place.key in ranks_in_file if config.targets_from_tensors else _is_targeted(config, place)):
            continue
        rank = _value(config.rank_pattern, place.key, config.rank)
        if config.ranks_from_tensors:
            rank = ranks_in_file.get(place.key, rank)
            if not 1 <= rank <= MAX_RANK:
                raise AdapterRejected(
                    "rank_out_of_range", f"a rank must be between 1 and {MAX_RANK}", TENSOR_PREFIX + place.key
                )
        scale = scale_of(config, place.key, rank)
        vector_name = place.magnitude_name if config.use_dora else place.bias_name if config.lora_bias else None
        if config.lora_bias and place.shape.is_embedding:
            raise AdapterRejected("unsupported_config", "PEFT does not support lora_bias for embeddings", "lora_bias")
        expected.append(ExpectedModule(place.key, place.layer, place.module, place.shape, rank, scale, vector_name))
    if not expected:
        raise AdapterRejected("invalid_config", "the configuration targets no module of the base", "target_modules")
    return expected


def scale_of(config: PeftConfig, key: str, rank: int) -> float:
    """The factor of the product `B A` of a module with this rank."""
    alpha = _value(config.alpha_pattern, key, config.alpha)
    return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


def _check_names(config: PeftConfig, keys: Sequence[str]) -> None:
    named = []
    if not config.targets_from_tensors:
        named += [(f"target_modules[{index}]", name) for index, name in enumerate(config.target_modules or ())]
    if not config.ranks_from_tensors:
        named += [(f"rank_pattern.{name}", name) for name, _ in config.rank_pattern]
    named += [(f"alpha_pattern.{name}", name) for name, _ in config.alpha_pattern]
    for param, name in named:
        if any(_names_module(name, key) for key in keys):
            continue
        # A base with fused q, k and v, for example, has no q_proj. The base's list of modules helps a tenant notice
        # that the adapter is for another base.
        present = ", ".join(dict.fromkeys(key.rsplit(".", 1)[-1] for key in keys))
        raise AdapterRejected(
            "unknown_module", f"the base has no module of this name; adapters may change its {present}", param
        )


def _is_targeted(config: PeftConfig, place: ModulePlace) -> bool:
    if any(_names_module(name, place.key) for name in config.exclude_modules):
        return False
    if config.target_modules is None:
        # "All linear" means the linears inside the layers. PEFT leaves out the head, and an embedding is not a linear.
        if place.layer is None:
            return False
    elif place.key in config.target_modules:
        # A full name selects its module, regardless of the list of layers.
        return True
    elif not any(_names_module(name, place.key) for name in config.target_modules):
        return False
    return config.layers is None or place.layer in config.layers


def _value(pattern: Sequence[tuple[str, V]], key: str, default: V) -> V:
    return next((value for name, value in pattern if _names_module(name, key)), default)


def _names_module(name: str, key: str) -> bool:
    return key == name or key.endswith("." + name)
