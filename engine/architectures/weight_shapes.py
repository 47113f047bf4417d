"""The shapes of the tensors that the decoder reads, for checking a model directory without loading its weights."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import astuple, replace

from loramux.adapter_store.formats.files.float_formats import STORAGE
from loramux.engine.architectures.attention_config import ROTATED_NORMS
from loramux.engine.architectures.feed_forward_config import XIELU, XIELU_PREFIX, XIELU_SHAPES
from loramux.engine.architectures.model_config import INPUT_NORM, LAYER_SCALAR, SINKS, ModelConfig, input_shapes
from loramux.engine.architectures.stacked_experts import StackedPlace, stacked_place
from loramux.engine.architectures.weight_files import DERIVED, EMBEDDING, HEAD, HEAD_BIAS, StoredTensor
from loramux.engine.protocol.errors import ModelNotSupported


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and the shape of each tensor that the decoder reads."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    if config.layer_input_size:
        shapes.update(input_shapes(config))
    if config.altup is not None:
        shapes.update(config.altup.model_shapes(config.hidden_size))
    for layer in range(config.num_layers):
        shapes.update((f"model.layers.{layer}.{name}", shape) for name, shape in _layer_shapes(config, layer))
    for part in norm_parts(config):
        shapes[f"{config.final_norm}.{part}"] = (config.hidden_size,)
    if config.head_bias:
        shapes[HEAD_BIAS] = (config.vocab_size,)
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    # Leave out the last group, the router, because the mixture lists the router's tensors.
    qkv, o, *feed_forward = groups = config.layer_groups(layer)[:-1]
    has_attention = config.has_attention(layer)
    biased = {
        *(qkv if config.attention.qkv_bias and has_attention else ()),
        *(o if config.attention.o_bias and has_attention else ()),
        *(module for group in feed_forward if config.mlp_bias for module in group),
    }
    modules = config.modules
    for index in sorted(itertools.chain.from_iterable((*groups, *config.input_groups[:2]))):
        module = modules[index]
        yield f"{module.name}.weight", (module.out_features, module.in_features)
        if index in biased:
            yield f"{module.name}.bias", (module.out_features,)
    for norm in astuple(config.norms):
        for part in norm_parts(config) if norm is not None else ():
            yield f"{norm}.{part}", (config.hidden_size,)
    for norm, size in config.attention.norm_sizes(layer) if has_attention else ():
        yield f"self_attn.{norm}.weight", (size,)
    if config.attention.has_rotated_norms:
        yield from ((f"self_attn.{norm}.weight", (config.attention.head_dim,)) for norm in ROTATED_NORMS)
    if config.delta is not None and not has_attention:
        yield from config.delta.weight_shapes()
    if config.activation == XIELU:
        yield from ((f"{XIELU_PREFIX}.{name}", shape) for name, shape in XIELU_SHAPES.items())
    if config.layer_input_size:
        yield f"{INPUT_NORM}.weight", (config.hidden_size,)
    if config.altup is not None:
        yield from config.altup.layer_shapes(config.hidden_size)
    if config.has_layer_scalars:
        yield LAYER_SCALAR, (1,)
    if config.attention.has_sinks:
        yield f"self_attn.{SINKS}", (config.attention.num_heads,)
    if config.mixture is not None and layer in config.mixture.layers:
        yield from config.mixture.weight_shapes(config.hidden_size)


def norm_parts(config: ModelConfig) -> tuple[str, ...]:
    if not config.has_norm_weights:
        return ()
    return ("weight", "bias") if config.has_norm_biases else ("weight",)


def check_shapes(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Raise ModelNotSupported, as loading the weights would, for a missing, misshapen or unused tensor.

    If the embeddings are tied, a separately stored head must equal the embedding, which only loading can check.
    """
    if not config.has_head and HEAD in stored:
        raise unnamed_head(config.architecture)
    wanted = weight_shapes(config)
    stacks: set[str] = set()
    for name, shape in wanted.items():
        stack = stacked_place(name)
        tensor = stored.get(name)
        if tensor is None and stack is not None and stack.name in stored:
            tensor = stored[stack.name]
            stacks.add(stack.name)
            if stack.is_transposed(tensor.shape, shape) is None:
                raise misshapen_stack(stack, tensor.shape)
            tensor = replace(tensor, shape=shape)
        if tensor is None:
            raise missing(name)
        if not tensor.is_coded and tensor.dtype not in STORAGE:
            raise unexplained(name, tensor.dtype)
        if tensor.shape != shape:
            raise misshapen(name, tensor.shape, shape)
    rest = {name for name in stored.keys() - wanted.keys() - stacks if not stored[name].is_zero_bias}
    unused = unused_tensors(rest, config.draft_tensors)
    if unused and unused != [HEAD]:
        raise unread(unused)


def unused_tensors(names: Collection[str], draft_tensors: tuple[str, ...]) -> list[str]:
    """Sort the given names, and leave out derived tensors and draft tensors, which the decoder need not read."""
    return sorted(name for name in names if not name.endswith(DERIVED) and not name.startswith(draft_tensors))


def missing(name: str) -> ModelNotSupported:
    if name == HEAD:
        return ModelNotSupported(
            f"the model has no tensor {HEAD}, and tie_word_embeddings in config.json is not true: if it only makes "
            "embeddings, name a decoder without a head, such as Qwen3Model, in architectures"
        )
    return ModelNotSupported(f"the model has no tensor {name}")


def unnamed_head(architecture: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"architectures in config.json names a decoder without a head, but the files have {HEAD}: name {architecture}"
    )


def misshapen(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> ModelNotSupported:
    return ModelNotSupported(f"the tensor {name} has shape {list(found)}, but config.json says {list(wanted)}")


def misshapen_stack(stack: StackedPlace, found: tuple[int, ...]) -> ModelNotSupported:
    shape = list(found)
    return ModelNotSupported(f"the tensor {stack.name} has shape {shape}, which does not fit expert {stack.expert}")


def unexplained(name: str, dtype: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"the tensor {name} has dtype {dtype}, which quantization_config in config.json does not explain"
    )


def unread(names: list[str]) -> ModelNotSupported:
    return ModelNotSupported(
        f"the model has {len(names)} tensors that its architecture does not use, such as {names[0]}"
    )
