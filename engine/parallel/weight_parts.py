"""The parts of a model's tensors that each worker has. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.quantization.base_format import CheckpointTensors, kind_of
from loramux.adapter_store.formats.quantization.divided import divided
from loramux.engine.architectures.mixture_config import MixtureConfig
from loramux.engine.architectures.model_config import SINKS, ModelConfig
from loramux.engine.architectures.weight_files import EMBEDDING, HEAD, HEAD_BIAS
from loramux.engine.parallel.sharding import module_shards, shares, vocabulary_share
from loramux.engine.protocol.errors import ConfigNotUsable, ModelNotSupported


@dataclass(frozen=True, slots=True)
class WeightPart:
    """The part of the stored tensor `name` of `shape` that a worker has: `ranges` along `axis`.

    Without ranges, the worker has zeros, because only worker 0 adds the tensor.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    ranges: tuple[range, ...]


def weight_parts(model: ModelConfig, size: int, worker: int, has_own_head: bool) -> dict[str, WeightPart]:
    """The tensors that worker `worker` of `size` does not have as they are stored, by their names in the decoder.

    Without `has_own_head`, the rows of the head are those of the embedding.
    """
    found: dict[str, WeightPart] = {}

    def add(name: str, shape: tuple[int, ...], axis: int, ranges: tuple[range, ...]) -> None:
        found[name] = WeightPart(name, shape, axis, ranges)

    for module, shard in zip(model.modules, module_shards(model, size, worker), strict=False):
        whole = (module.out_features, module.in_features)
        for layer in (one for one in range(model.num_layers) if module.is_in(one)):
            name = f"model.layers.{layer}.{module.name}"
            if not shard.is_summed:
                add(f"{name}.weight", whole, 0, shard.outputs)
                add(f"{name}.bias", whole[:1], 0, shard.outputs)
                continue
            add(f"{name}.weight", whole, 1, shard.inputs)
            if worker > 0:
                add(f"{name}.bias", whole[:1], 0, ())
    if model.attention.has_sinks:
        heads = (model.attention.num_heads,)
        for layer in range(model.num_layers):
            add(f"model.layers.{layer}.self_attn.{SINKS}", heads, 0, shares(heads, size, worker))
    mixture = model.mixture
    for layer in () if mixture is None else mixture.layers:
        assert mixture is not None
        prefix = f"model.layers.{layer}.{mixture.names.experts}"
        for name, shape, axis, lengths in _expert_tensors(mixture, model.hidden_size):
            add(f"{prefix}.{name}", shape, axis, shares(lengths, size, worker))
        if mixture.names.has_biases and worker > 0:
            shape = (mixture.routing.num_experts, model.hidden_size)
            add(f"{prefix}.{mixture.names.down}_bias", shape, 0, ())
    tokens = (vocabulary_share(model.vocab_size, size, worker),)
    found[HEAD] = WeightPart(HEAD if has_own_head else EMBEDDING, (model.vocab_size, model.hidden_size), 0, tokens)
    add(HEAD_BIAS, (model.vocab_size,), 0, tokens)
    return found


def check_groups(checkpoint: CheckpointTensors, model: ModelConfig, size: int) -> None:
    """Raise ConfigNotUsable if `size` workers cannot divide the quantised weights by whole groups of inputs.

    The first weight of each kind decides for all weights of this kind, and no other is read.
    """
    known = set()
    for name, part in weight_parts(model, size, 0, has_own_head=True).items():
        coded = checkpoint.coded.get(name)
        if coded is None or part.axis == 0 or kind_of(name, coded) in known:
            continue
        known.add(kind_of(name, coded))
        try:
            weight = coded.read()
        except BaseNotSupported as error:
            raise ModelNotSupported(str(error)) from error
        try:
            divided(weight, part.axis, part.ranges)
        except ValueError as error:
            raise ConfigNotUsable(
                f"tensor_parallel_size {size} cannot divide the quantised weight {name}: {error}"
            ) from error


def _expert_tensors(
    mixture: MixtureConfig, hidden_size: int
) -> Iterator[tuple[str, tuple[int, ...], int, tuple[int, ...]]]:
    """The name, without the experts' prefix, and the shape of each weight of one layer's experts, with the axis of the
    inner features and the lengths of the parts of this axis that are divided alike.
    """
    names, size, num_experts = mixture.names, mixture.expert_size, mixture.routing.num_experts
    if names.up is not None:
        for expert in range(num_experts):
            for name in (names.gate, names.up):
                yield f"{expert}.{name}.weight", (size, hidden_size), 0, (size,)
            yield f"{expert}.{names.down}.weight", (hidden_size, size), 1, (size,)
        return
    # With biases, the features of gate and up alternate.
    both = (2 * size,) if names.has_biases else (size, size)
    suffix = "" if names.has_biases else names.stack_suffix
    if names.has_biases or names.is_transposed:
        yield f"{names.gate}{suffix}", (num_experts, hidden_size, 2 * size), 2, both
        yield f"{names.down}{suffix}", (num_experts, size, hidden_size), 1, (size,)
    else:
        yield f"{names.gate}{suffix}", (num_experts, 2 * size, hidden_size), 1, both
        yield f"{names.down}{suffix}", (num_experts, hidden_size, size), 2, (size,)
    if names.has_biases:
        yield f"{names.gate}_bias", (num_experts, 2 * size), 1, both
