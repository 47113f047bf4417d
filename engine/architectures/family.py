"""The traits of an architecture that its `config.json` does not state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loramux.engine.architectures.feed_forward import GATED, FeedForward
from loramux.engine.architectures.layer_kinds import LayerKinds, RotatedLayers, all_rotated
from loramux.engine.architectures.mixture_config import MixtureTraits

HEAD_WIDE, PROJECTION_WIDE = "head", "projection"
"""The scope of a norm of q and k: each head, or all heads together."""


@dataclass(frozen=True, slots=True)
class NormNames:
    """The names of the tensors of a layer's norms. None where the layer has no norm."""

    before_attention: str | None
    after_attention: str | None
    before_feed_forward: str | None
    after_feed_forward: str | None


PRE_NORMS = NormNames("input_layernorm", None, "post_attention_layernorm", None)
GEMMA_NORMS = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
OUTPUT_NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
PARALLEL_NORMS = NormNames("input_layernorm", None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The traits of one architecture."""

    layer_kinds: LayerKinds
    """Returns the kinds of layers if `config.json` has no `layer_types`."""
    has_layer_types: bool = False
    """True if `layer_types` may differ from `layer_kinds`."""
    rotated_layers: RotatedLayers = all_rotated
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Values of missing fields, as in transformers, if they differ from the usual defaults."""
    reads: tuple[str, ...] = ()
    """The fields of `config_fields.DECISIVE` that the architecture supports."""
    norms: NormNames = PRE_NORMS
    norm_eps_field: str = "rms_norm_eps"
    norm_offset: float = 0.0
    has_layer_norms: bool = False
    has_norm_weights: bool = True
    has_norm_biases: bool = False
    final_norm: str = "model.norm"
    """Name of the norm after the last layer."""
    qk_norm: str | None = None
    qk_norm_field: str | None = None
    """The field that turns the norms of q and k on or off. Without it, they are always on."""
    qkv_bias: str | bool = "attention_bias"
    """True, False, or the name of the field that decides."""
    o_bias: str | bool = "attention_bias"
    """True, False, or the name of the field that decides."""
    mlp_bias: str | bool = "mlp_bias"
    """True, False, or the name of the field that decides."""
    fused_qkv: bool = False
    o_name: str = "self_attn.o_proj"
    """Name of the projection of attention's output."""
    feed_forward: FeedForward = GATED
    dense_size_field: str = "intermediate_size"
    """The field with the inner size of a feed-forward block without experts."""
    parallel_blocks: bool = False
    """True if the attention and feed-forward blocks read the same normalised residual."""
    interleaved_rotary: bool = False
    """True if neighbouring channels are rotated together instead of channels from the two halves of a head."""
    activation_field: str = "hidden_act"
    gelu_means_tanh: bool = False
    clamps_gate: bool = False
    scales_embedding: bool = False
    logit_scale_field: str | None = None
    logit_divisor_field: str | None = None
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "dynamic")
    rope_fields: tuple[str, ...] = ()
    window_theta_field: str | None = None
    """The field with the default theta of windowed layers, which then have their own rotary embedding."""
    layer_theta_field: str | None = None
    """The field that lists each layer's theta, or 0 for no rotation."""
    mixture: MixtureTraits | None = None
    gates_attention: bool = False
    """True if the query projection also yields a gate for each element of attention's output."""
    has_delta_layers: bool = False
    """True if `layer_types` may name layers with a gated delta rule."""
    has_chunks: bool = False
    """True if `layer_types` may name layers whose tokens see only their own chunk. Contexts are limited to one chunk.
    """
    has_layer_heads: bool = False
    """True if the heads of K and V can differ between layers with and without windows."""
    has_value_norm: bool = False
    """True if V is normalised without a weight."""
    has_l2_norms: bool = False
    """True if q and k of rotated layers are normalised without weights."""
    scales_unrotated: bool = False
    """True if layers without rotation scale q by a factor that grows with the position."""
    has_sinks: bool = False
    has_altup: bool = False
    """True if a layer has several residuals."""
    has_layer_scalars: bool = False
    """True if a tensor scales each layer's output."""
    has_head_bias: bool = False
    draft_tensors: tuple[str, ...] = ()
    """Name prefixes of tensors that serve only multi-token prediction. The decoder does not read them."""
