"""The modules of the base model that adapters may change, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.kernels.layout import LinearShape

TENSOR_PREFIX = "base_model.model."
A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"
EMBEDDING_A_SUFFIX = ".lora_embedding_A"
EMBEDDING_B_SUFFIX = ".lora_embedding_B"
MAGNITUDE_SUFFIX = ".lora_magnitude_vector"
BIAS_SUFFIX = ".lora_B.bias"


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """One module of the base: its name `key`, its layer, and its index among the target's modules.

    For an outer module, `layer` is None and the index counts the target's outer modules.
    """

    key: str
    layer: int | None
    module: int
    shape: LinearShape

    @property
    def a_name(self) -> str:
        """The tensor A `[rank, in_features]`."""
        return TENSOR_PREFIX + self.key + (EMBEDDING_A_SUFFIX if self.shape.is_embedding else A_SUFFIX)

    @property
    def b_name(self) -> str:
        """The tensor B `[out_features, rank]`."""
        return TENSOR_PREFIX + self.key + (EMBEDDING_B_SUFFIX if self.shape.is_embedding else B_SUFFIX)

    @property
    def magnitude_name(self) -> str:
        """The vector `[out_features]` of a DoRA adapter."""
        return TENSOR_PREFIX + self.key + MAGNITUDE_SUFFIX

    @property
    def bias_name(self) -> str:
        """The vector `[out_features]` of an adapter that was trained with `lora_bias`."""
        return TENSOR_PREFIX + self.key + BIAS_SUFFIX


def module_key(layer: int, module: LinearShape) -> str:
    """The name of a layer's module in the base model."""
    return f"model.layers.{layer}.{module.name}"


def module_places(target: PackTarget) -> Iterator[ModulePlace]:
    """List the base's modules that an adapter may change, in the order of the packed streams."""
    for index, shape in enumerate(target.outer_modules):
        yield ModulePlace(shape.name, None, index, shape)
    for layer in range(target.geometry.num_layers):
        for index, shape in enumerate(target.modules):
            if shape.is_in(layer):
                yield ModulePlace(module_key(layer, shape), layer, index, shape)
