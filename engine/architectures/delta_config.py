"""The layers of a hybrid decoder that have a gated delta rule instead of attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loramux.engine.architectures.config_fields import positive, refuse_field
from loramux.engine.architectures.layer_kinds import FULL, LINEAR
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.kernels.delta_spec import DeltaSpec
from loramux.kernels.layout import LinearShape

DELTA_NORM = "linear_attn.norm"
"""Name of the norm of a delta rule's output. All heads share its weight."""

MAX_HEADS = 1024
MAX_DIM = 256
"""Maximum number of elements in a head's key or value."""

MAX_CONV_LEN = 16
"""Longest convolution, in positions."""


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """`layers` have a gated delta rule, and `attention_layers` are all other layers. Both are in ascending order."""

    layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    spec: DeltaSpec

    def linears(self, hidden_size: int) -> tuple[LinearShape, ...]:
        """The input projections in the order in which they are fused, then the output projection."""
        spec = self.spec
        outputs = {
            "in_proj_qkv": spec.channels,
            "in_proj_z": spec.matrix_rows,
            "in_proj_b": spec.num_v_heads,
            "in_proj_a": spec.num_v_heads,
        }
        return (
            *(
                LinearShape(f"linear_attn.{name}", hidden_size, size, layers=self.layers)
                for name, size in outputs.items()
            ),
            LinearShape("linear_attn.out_proj", spec.matrix_rows, hidden_size, layers=self.layers),
        )

    def weight_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name, without the layer's prefix, and the shape of each tensor of one layer, except its projections."""
        spec = self.spec
        yield "linear_attn.conv1d.weight", (spec.channels, 1, spec.conv_len)
        yield "linear_attn.A_log", (spec.num_v_heads,)
        yield "linear_attn.dt_bias", (spec.num_v_heads,)
        yield f"{DELTA_NORM}.weight", (spec.v_dim,)


def parse_delta(raw: Mapping[str, Any], architecture: str, kinds: Sequence[str]) -> DeltaConfig | None:
    """The layers with a gated delta rule, or None if there are none. Raises ModelNotSupported."""
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    attention_layers = tuple(layer for layer, kind in enumerate(kinds) if kind != LINEAR)
    if not layers:
        return None
    if not attention_layers:
        raise ModelNotSupported(f"config.json has no {FULL!r} layer, but at least one is needed")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse_field("hidden_act", raw["hidden_act"], architecture)

    def limited(name: str, least: int, most: int) -> int:
        value = positive(raw, name)
        if not least <= value <= most:
            raise ModelNotSupported(f"{name} {value} in config.json is not in [{least}, {most}]")
        return value

    spec = DeltaSpec(
        num_layers=len(layers),
        num_k_heads=limited("linear_num_key_heads", 1, MAX_HEADS),
        num_v_heads=limited("linear_num_value_heads", 1, MAX_HEADS),
        k_dim=limited("linear_key_head_dim", 1, MAX_DIM),
        v_dim=limited("linear_value_head_dim", 1, MAX_DIM),
        conv_len=limited("linear_conv_kernel_dim", 2, MAX_CONV_LEN),
    )
    if spec.num_v_heads % spec.num_k_heads:
        raise ModelNotSupported(
            f"{spec.num_v_heads} value heads cannot be divided among {spec.num_k_heads} key heads "
            "in linear-attention layers"
        )
    return DeltaConfig(layers, attention_layers, spec)
