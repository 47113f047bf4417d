"""The size and the activation of feed-forward blocks, read from `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loramux.engine.architectures.config_fields import positive, positive_float
from loramux.engine.architectures.family import STREAMS, Family
from loramux.engine.architectures.feed_forward import ClampedGate
from loramux.engine.protocol.errors import ModelNotSupported

SILU, GELU_TANH, RELU_SQUARED, XIELU = "silu", "gelu_tanh", "relu_squared", "xielu"
XIELU_PREFIX = "mlp.act_fn"
XIELU_SHAPES: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""Names and shapes of the tensors of a layer's xIELU activation."""

_GATES = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}
_ACTIVATIONS_WITHOUT_GATE = {
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_new": GELU_TANH,
    "relu2": RELU_SQUARED,
    "xielu": XIELU,
}


def intermediate_sizes(raw: Mapping[str, Any], family: Family, sources: Sequence[int]) -> tuple[int, ...]:
    """The inner size of each layer's feed-forward block. It can be doubled in layers that read the K and V of another
    layer.
    """
    field = family.feed_forward.size_field
    if family.layers.wiring == STREAMS and isinstance(raw[field], list):
        sizes = raw[field]
        if len(sizes) != len(sources):
            raise ModelNotSupported(f"intermediate_size has {len(sizes)} entries for {len(sources)} layers")
        return tuple(positive({"intermediate_size": size}, "intermediate_size") for size in sizes)
    size, factor = positive(raw, field), 2 if raw.get("use_double_wide_mlp") else 1
    if factor == 2 and raw.get("enable_moe_block"):
        raise ModelNotSupported("config.json has both use_double_wide_mlp and enable_moe_block")
    return tuple(size * (1 if layer == source else factor) for layer, source in enumerate(sources))


def parse_activation(raw: Mapping[str, Any], family: Family) -> str:
    traits = family.feed_forward
    name = traits.activation_field
    activation = raw.get(name, "silu")
    if activation == "gelu" and traits.gelu_means_tanh:
        return GELU_TANH
    supported = _GATES if traits.names.has_gate else _ACTIVATIONS_WITHOUT_GATE
    if activation not in supported:
        raise ModelNotSupported(
            f"the activation {activation!r} ({name} in config.json) is not supported; supported: {', '.join(supported)}"
        )
    return supported[activation]


def parse_clamped_gate(raw: Mapping[str, Any]) -> ClampedGate:
    return ClampedGate(alpha=positive_float(raw, "swiglu_alpha"), limit=positive_float(raw, "swiglu_limit"))
