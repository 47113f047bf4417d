"""Gives stacked experts and routers that PEFT targeted as parameters (`target_parameters`) their current names.

PEFT wraps the module of a targeted parameter. For two parameters of one module, the second wrapper contains the first.
Only this nesting tells which tensors belong to which parameter: `experts.base_layer.lora_A.weight` belongs to
`gate_up_proj`, and `experts.lora_A.weight` to `down_proj`. If only one parameter is targeted, its tensor is
`experts.lora_A.weight`. The translated name of stacked experts contains the name of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.packed.module_places import A_SUFFIX, B_SUFFIX, TENSOR_PREFIX
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.validation.name_patterns import NameSet
from loramux.adapter_store.validation.peft_config import PeftConfig
from loramux.adapter_store.validation.tensor_names import TensorNames


def with_stacked_names(names: TensorNames, config: PeftConfig, target: PackTarget) -> TensorNames:
    """Translate the names of targeted parameters. Raises AdapterRejected if two tensors get the same name."""
    if target.experts is None or not config.target_parameters:
        return names
    return replace(names, originals=_renamed(names.originals, _translations(config, target)))


def _translations(config: PeftConfig, target: PackTarget) -> dict[str, str]:
    """Map each module's name in the file to its current name, both without a tensor's suffix."""
    experts = target.experts
    assert experts is not None
    named = NameSet(config.target_parameters)
    stacks = [linear.stack for linear in experts.linears if linear.stack is not None]
    layers = range(target.geometry.num_layers) if experts.layers is None else experts.layers
    found: dict[str, str] = {}
    for layer in layers:
        above = f"model.layers.{layer}."
        targeted = [stack for stack in stacks if named.match(above + stack) is not None]
        for depth, stack in enumerate(reversed(targeted)):
            module, _, _ = stack.rpartition(".")
            found[above + module + depth * ".base_layer"] = above + stack
        if experts.stacked_router != experts.router:
            found[above + experts.stacked_router] = above + experts.router
    return found


def _renamed(originals: Mapping[str, str], translations: Mapping[str, str]) -> dict[str, str]:
    renamed: dict[str, str] = {}
    for name, original in originals.items():
        current = name
        for suffix in (A_SUFFIX, B_SUFFIX):
            key = name.removeprefix(TENSOR_PREFIX).removesuffix(suffix)
            if name.endswith(suffix) and key in translations:
                current = TENSOR_PREFIX + translations[key] + suffix
        if current in renamed:
            raise AdapterRejected("ambiguous_names", "two tensors have names for the same module", original)
        renamed[current] = original
    return renamed
