"""Which modules of the base an adapter's configuration names, each with its rank and scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.peft_config import PeftConfig
from loramux.adapter_store.target import PackTarget
from loramux.kernels.layout import LinearShape

TENSOR_PREFIX = "base_model.model."
A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"

_OUTSIDE_LAYERS = ("lm_head", "embed_tokens")

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class ExpectedModule:
    """One linear layer that the adapter changes by `scale * B A`, A `[rank, in]` and B `[out, rank]`."""

    key: str
    layer: int
    module: int
    shape: LinearShape
    rank: int
    scale: float

    @property
    def a_name(self) -> str:
        return TENSOR_PREFIX + self.key + A_SUFFIX

    @property
    def b_name(self) -> str:
        return TENSOR_PREFIX + self.key + B_SUFFIX


def module_key(layer: int, module: LinearShape) -> str:
    """A module's name in the base model."""
    return f"model.layers.{layer}.{module.name}"


def expected_modules(config: PeftConfig, target: PackTarget) -> list[ExpectedModule]:
    """The modules in the order of the packed stream, chosen as PEFT chooses them.

    Raises AdapterRejected for a name that no module of the base has, so that a misspelt target is not ignored.
    """
    num_layers = target.geometry.num_layers
    keys = [module_key(layer, module) for layer in range(num_layers) for module in target.modules]
    _check_names(config, keys)
    if config.layers is not None and max(config.layers) >= num_layers:
        raise AdapterRejected(
            "base_mismatch", f"the base has {num_layers} layers, not {max(config.layers) + 1}", "layers_to_transform"
        )
    expected = []
    for layer in range(num_layers):
        for m, module in enumerate(target.modules):
            key = module_key(layer, module)
            if not _is_targeted(config, key, layer):
                continue
            rank = _value(config.rank_pattern, key, config.rank)
            alpha = _value(config.alpha_pattern, key, config.alpha)
            scale = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
            expected.append(ExpectedModule(key, layer, m, module, rank, scale))
    if not expected:
        raise AdapterRejected("invalid_config", "the configuration targets no module of the base", "target_modules")
    return expected


def _check_names(config: PeftConfig, keys: Sequence[str]) -> None:
    named = [("target_modules", name) for name in config.target_modules or ()]
    named += [(f"rank_pattern.{name}", name) for name, _ in config.rank_pattern]
    named += [(f"alpha_pattern.{name}", name) for name, _ in config.alpha_pattern]
    for param, name in named:
        if any(_names_module(name, key) for key in keys):
            continue
        if name.rsplit(".", 1)[-1] in _OUTSIDE_LAYERS:
            raise AdapterRejected("unsupported_module", f"adapters of {name} are not supported", param)
        # A base whose q, k and v are one linear has no q_proj: saying what there is tells which base was meant.
        present = ", ".join(dict.fromkeys(key.rsplit(".", 1)[-1] for key in keys))
        raise AdapterRejected(
            "unknown_module", f"the base has no linear layer named {name!r}; its linear layers are {present}", param
        )


def _is_targeted(config: PeftConfig, key: str, layer: int) -> bool:
    if any(_names_module(name, key) for name in config.exclude_modules):
        return False
    if config.target_modules is not None:
        # A full name means that module whatever the list of layers says.
        if key in config.target_modules:
            return True
        if not any(_names_module(name, key) for name in config.target_modules):
            return False
    return config.layers is None or layer in config.layers


def _value(pattern: Sequence[tuple[str, V]], key: str, default: V) -> V:
    return next((value for name, value in pattern if _names_module(name, key)), default)


def _names_module(name: str, key: str) -> bool:
    return key == name or key.endswith("." + name)
