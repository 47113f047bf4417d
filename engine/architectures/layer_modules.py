"""The linear layers that adapters can target in a decoder layer, with PEFT's names, each with its group."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from loramux.engine.architectures.attention_config import AttentionConfig
from loramux.engine.architectures.feed_forward import FeedForwardNames
from loramux.engine.architectures.mixture_config import MixtureConfig
from loramux.kernels.layout import LinearShape


class Group(IntEnum):
    """A group of a layer's modules. Modules of a group have the same input."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3
    ROUTER = 4
    INPUT_GATE = 5
    INPUT_PROJECTION = 6
    ALL_INPUTS = 7


def attention_modules(
    attention: AttentionConfig, hidden_size: int, attending: Sequence[bool]
) -> list[tuple[Group, LinearShape]]:
    """The projections of attention in the layers that are marked in `attending`."""
    heads = list(zip(attention.layer_heads, attending, strict=True))
    q_out = [attention.num_heads * one.head_dim * has_attention for one, has_attention in heads]
    k_out = [
        one.width if has_attention and attention.kv_sources[layer] == layer else 0
        for layer, (one, has_attention) in enumerate(heads)
    ]
    v_out = [0 if layer in attention.layers_without_v else size for layer, size in enumerate(k_out)]
    if attention.fused_qkv:
        outputs = {"qkv_proj": [q + k + v for q, k, v in zip(q_out, k_out, v_out, strict=True)]}
    else:
        outputs = {
            "q_proj": [2 * q if attention.has_gates else q for q in q_out],
            "k_proj": k_out,
            "v_proj": v_out,
        }
    found = [
        (Group.QKV, linear)
        for name, sizes in outputs.items()
        for linear in _linears(
            f"self_attn.{name}", [(hidden_size, size) if size else None for size in sizes], attention.qkv_bias
        )
    ]
    o_shapes = [(size, hidden_size) if size else None for size in q_out]
    return found + [(Group.OUTPUT, linear) for linear in _linears(attention.o_name, o_shapes, attention.o_bias)]


def feed_forward_modules(
    block: FeedForwardNames, hidden_size: int, sizes: Sequence[int], has_bias: bool
) -> list[tuple[Group, LinearShape]]:
    """The linear layers of a feed-forward block, given its number of inner features in each layer (0: no block)."""
    per_input = (2 if block.has_gate else 1) / len(block.inputs)
    wide = [(hidden_size, int(per_input * size)) if size else None for size in sizes]
    narrow = [(size, hidden_size) if size else None for size in sizes]
    found = [(Group.GATE_UP, linear) for name in block.inputs for linear in _linears(name, wide, has_bias)]
    return found + [(Group.DOWN, linear) for linear in _linears(block.output, narrow, has_bias)]


def router_modules(mixture: MixtureConfig, hidden_size: int, num_layers: int) -> list[tuple[Group, LinearShape]]:
    """The router of a layer's experts, and the shared expert's gate if there is one."""
    found = []
    for router in mixture.router_linears(hidden_size):
        shape = router.in_features, router.out_features
        layers = [shape if layer in mixture.layers else None for layer in range(num_layers)]
        found += [(Group.ROUTER, linear) for linear in _linears(router.name, layers, mixture.names.has_biases)]
    return found


def _linears(name: str, shapes: Sequence[tuple[int, int] | None], has_bias: bool) -> list[LinearShape]:
    """One entry for each distinct shape `(in_features, out_features)` of a linear layer. None means that a decoder
    layer lacks it.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for layer, shape in enumerate(shapes):
        if shape is not None:
            found.setdefault(shape, []).append(layer)
    return [
        LinearShape(name, *shape, layers=None if len(layers) == len(shapes) else tuple(layers), has_bias=has_bias)
        for shape, layers in found.items()
    ]
