"""The modules of the base model that adapters may change, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.kernels.layout import ExpertModules, LinearShape, NormShape

TENSOR_PREFIX = "base_model.model."
A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"
EMBEDDING_A_SUFFIX = ".lora_embedding_A"
EMBEDDING_B_SUFFIX = ".lora_embedding_B"
MAGNITUDE_SUFFIX = ".lora_magnitude_vector"
BIAS_SUFFIX = ".lora_B.bias"
BASE_BIAS_SUFFIXES = (".bias", ".base_layer.bias")
"""Suffixes of a linear layer's own bias, without and with a LoRA of the layer."""


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """One module of the base: its name `key`, its layer, and its index in `PackTarget.all_modules`.

    For an outer module (the embedding or the head), `layer` is None and the index refers to the target's outer modules.
    So it is for a module of the base's own head for drafts, which `is_draft` marks. `kind` is the module's name without
    its layer and its expert.

    If the file stacks the tensors of `num_experts` experts, `key` is the name of the stack, and the module belongs to
    `expert`. As in PEFT, the rows of A are all ranks of expert 0, then all ranks of expert 1, and so on. The columns of
    B are rank 0 of every expert, then rank 1 of every expert, and so on. With `alternates`, the rows of B alternate
    between the gate and the up projection. In a packed file, all rows of the gate come first.

    If the file divides the base's modules differently, the rows `b_rows` of a B with `num_b_rows` rows compute the
    outputs `outputs` of the module: see `rearranged_places`. Otherwise, all three are None, and row `i` computes output
    `i`.
    """

    key: str
    layer: int | None
    module: int
    shape: LinearShape
    kind: str
    is_expert: bool = False
    is_stacked: bool = False
    expert: int = 0
    num_experts: int = 1
    alternates: bool = False
    num_b_rows: int | None = None
    b_rows: range | None = None
    outputs: range | None = None
    is_draft: bool = False

    @property
    def file_outputs(self) -> int:
        """The number of rows of the tensor B, and the number of magnitudes and biases."""
        return self.shape.out_features if self.num_b_rows is None else self.num_b_rows

    @property
    def module_outputs(self) -> range:
        """The outputs of the module that the file's tensors change."""
        return range(self.shape.out_features) if self.outputs is None else self.outputs

    def of_module(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the rows of B, the magnitudes or the biases that belong to the module."""
        return values if self.b_rows is None else values[self.b_rows.start : self.b_rows.stop]

    @property
    def name(self) -> str:
        """The module's own name, even if the file stacks its tensors."""
        return self.key if self.layer is None else module_key(self.layer, self.shape)

    def rank_of(self, a_shape: Sequence[int]) -> int:
        """Return the rank of the module, given the shape of its tensor A."""
        return a_shape[0] // self.num_experts

    def a_rows(self, rank: int) -> range:
        return range(self.expert * rank, (self.expert + 1) * rank)

    @property
    def b_columns(self) -> slice:
        return slice(self.expert, None, self.num_experts)

    @property
    def a_name(self) -> str:
        """The name of the tensor A `[rank, in_features]`."""
        return TENSOR_PREFIX + self.key + (EMBEDDING_A_SUFFIX if self.shape.is_embedding else A_SUFFIX)

    @property
    def b_name(self) -> str:
        """The name of the tensor B `[out_features, rank]`."""
        return TENSOR_PREFIX + self.key + (EMBEDDING_B_SUFFIX if self.shape.is_embedding else B_SUFFIX)

    @property
    def magnitude_name(self) -> str:
        """The name of the magnitudes `[out_features]` of a DoRA adapter."""
        return TENSOR_PREFIX + self.key + MAGNITUDE_SUFFIX

    @property
    def bias_name(self) -> str:
        """The name of the bias `[out_features]` of an adapter that was trained with `lora_bias`."""
        return TENSOR_PREFIX + self.key + BIAS_SUFFIX

    def base_bias_name(self, has_lora: bool) -> str:
        """The name of the layer's own bias `[out_features]`, which replaces the base's."""
        return TENSOR_PREFIX + self.key + BASE_BIAS_SUFFIXES[has_lora]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormPlace(ModulePlace):
    """One norm of the base. Its bias, if it has one, is named like that of a module without a LoRA."""

    norm: NormShape

    @property
    def weight_name(self) -> str:
        """The name of the weight `[size]`, which replaces the base's."""
        return TENSOR_PREFIX + self.key + ".weight"


def module_of(tensor: str) -> str:
    """Return the name of the module to which a LoRA's tensor belongs."""
    return tensor.removeprefix(TENSOR_PREFIX).partition(".lora_")[0]


def module_key(layer: int, module: LinearShape | NormShape) -> str:
    """Return the name of a layer's module in the base model."""
    is_full = module.name.startswith("model.")
    return module.name if is_full else f"model.layers.{layer}.{module.name}"


def unused_projections(target: PackTarget) -> frozenset[str]:
    """Return the keys of the K and V projections of layers that read the K and V of an earlier layer.

    In Gemma 3n and Gemma 4, earlier releases of transformers had these modules but did not use them. PEFT ignores their
    tensors if the base lacks the modules.
    """
    layers_with_q, layers_with_k = (_layers_with(target, name) for name in ("self_attn.q_proj", "self_attn.k_proj"))
    sharing = layers_with_q - layers_with_k if layers_with_k else ()
    return frozenset(f"model.layers.{layer}.self_attn.{name}" for layer in sharing for name in ("k_proj", "v_proj"))


def _layers_with(target: PackTarget, name: str) -> set[int]:
    shapes = [shape for shape in target.modules if shape.name == name]
    return {layer for layer in range(target.geometry.num_layers) for shape in shapes if shape.is_in(layer)}


def module_places(target: PackTarget) -> Iterator[ModulePlace]:
    """List the base's modules that an adapter may change, layer by layer.

    A module of an expert is listed once for each form, stacked or separate, in which a file may store it.
    """
    yield from _outer_places(target)
    yield from draft_places(target)
    for layer in range(target.geometry.num_layers):
        yield from _layer_places(target, layer)
        if target.experts is not None:
            yield from _expert_places(target, target.experts, layer)


def shared_places(target: PackTarget) -> Iterator[ModulePlace]:
    """List the modules that all tokens use: `module_places` without those of experts and of the head for drafts."""
    yield from _outer_places(target)
    for layer in range(target.geometry.num_layers):
        yield from _layer_places(target, layer)


def norm_places(target: PackTarget) -> Iterator[NormPlace]:
    """List the base's norms that an adapter may replace, layer by layer."""
    first = len(target.all_modules) - len(target.norms)
    for layer in range(target.geometry.num_layers):
        for index, norm in enumerate(target.norms, start=first):
            if norm.linear.is_in(layer):
                yield NormPlace(module_key(layer, norm), layer, index, norm.linear, norm.name, norm=norm)


def _outer_places(target: PackTarget) -> Iterator[ModulePlace]:
    for index, shape in enumerate(target.outer_modules):
        yield ModulePlace(shape.name, None, index, shape, shape.name)


def draft_places(target: PackTarget) -> Iterator[ModulePlace]:
    """List the modules of the base's own head for drafts."""
    for index, shape in enumerate(target.draft_modules, start=len(target.outer_modules)):
        yield ModulePlace(shape.name, None, index, shape, shape.name, is_draft=True)


def _layer_places(target: PackTarget, layer: int) -> Iterator[ModulePlace]:
    for index, shape in enumerate(target.modules):
        if shape.is_in(layer):
            yield ModulePlace(module_key(layer, shape), layer, index, shape, shape.name)


def _expert_places(target: PackTarget, experts: ExpertModules, layer: int) -> Iterator[ModulePlace]:
    if experts.layers is not None and layer not in experts.layers:
        return
    modules, first, num_experts = target.all_modules, len(target.modules), experts.num_experts
    for i, linear in enumerate(experts.linears):
        indices = [first + experts.index(expert, i) for expert in range(num_experts)]
        if linear.name is not None:
            for index in indices:
                module = modules[index]
                yield ModulePlace(module_key(layer, module), layer, index, module, linear.name, is_expert=True)
        if linear.stack is not None:
            key = f"model.layers.{layer}.{linear.stack}"
            for expert, index in enumerate(indices):
                yield ModulePlace(
                    key,
                    layer,
                    index,
                    modules[index],
                    linear.stack,
                    is_expert=True,
                    is_stacked=True,
                    expert=expert,
                    num_experts=num_experts,
                    alternates=linear.alternates,
                )
