"""The traits of an architecture that its `config.json` does not state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loramux.engine.architectures.draft_head import DraftHeadNames
from loramux.engine.architectures.feed_forward import GATED, FeedForwardNames
from loramux.engine.architectures.layer_kinds import SLIDING, LayerKinds, RotatedLayers, all_rotated, without_windows
from loramux.engine.architectures.mixture_config import MixtureTraits

SEQUENTIAL, PARALLEL, SCALED, STREAMS = "sequential", "parallel", "scaled", "streams"
"""How the blocks of a layer read and change the residual.

- `sequential`: the feed-forward block reads the residual after the attention block has changed it.
- `parallel`: both blocks read the same normalised residual.
- `scaled`: as in `sequential`, but a tensor scales the residual after the layer.
- `streams`: the layer has several residuals (AltUp).
"""

HEAD_WIDE, PROJECTION_WIDE, WEIGHTLESS, ROTATED = "head", "projection", "weightless", "rotated"
"""The norms of q and k: with weights for each head or for all heads together, without weights, which only rotated
layers have, or with weights for each head that apply after the rotation.
"""


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


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """The kinds of layers.

    `usual` returns them if `config.json` has no `layer_types`. By default, all layers have full attention. With
    `may_differ`, `layer_types` may contradict it.
    """

    usual: LayerKinds = without_windows
    may_differ: bool = False
    other: str = SLIDING
    """The kind of the layers without full attention: with a window, a gated delta rule, or chunks. In a chunked layer,
    tokens see only their own chunk, so contexts are limited to one chunk.
    """
    wiring: str = SEQUENTIAL


@dataclass(frozen=True, slots=True)
class NormTraits:
    """The norms of the residual. `offset` is added to their stored weights. `final` names the norm after the last
    layer.
    """

    names: NormNames = PRE_NORMS
    eps_field: str = "rms_norm_eps"
    offset: float = 0.0
    subtracts_mean: bool = False
    has_weights: bool = True
    has_biases: bool = False
    final: str = "model.norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTraits:
    """The projections and norms of attention. A bias is True, False, or the name of the field that decides."""

    qk_norm: str | None = None
    qk_norm_field: str | None = None
    """The field that turns the norms of q and k on or off. Without it, they are always on."""
    has_value_norm: bool = False
    """True if V is normalised without a weight."""
    qkv_bias: str | bool = "attention_bias"
    o_bias: str | bool = "attention_bias"
    o_name: str = "self_attn.o_proj"
    fused_qkv: bool = False
    has_gates: bool = False
    """True if the query projection also yields a gate for each element of attention's output."""
    has_layer_heads: bool = False
    """True if the heads of K and V can differ between layers with and without windows."""
    has_sinks: bool = False
    scales_unrotated: bool = False
    """True if layers without rotation scale q by a factor that grows with the position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTraits:
    """The rotary embeddings.

    `layers` returns which layers rotate q and k. `kinds` are the supported kinds, and `fields` are further fields that
    the rotary settings may have.
    """

    layers: RotatedLayers = all_rotated
    is_interleaved: bool = False
    """True if neighbouring channels are rotated together instead of channels from the two halves of a head."""
    kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "dynamic")
    fields: tuple[str, ...] = ()
    window_theta_field: str | None = None
    """The field with the default theta of windowed layers, which then have their own rotary embedding."""
    layer_theta_field: str | None = None
    """The field that lists each layer's theta, or 0 for no rotation."""


@dataclass(frozen=True, slots=True)
class FeedForwardTraits:
    """The feed-forward blocks without experts. `bias` is True, False, or the name of the field that decides."""

    names: FeedForwardNames = GATED
    bias: str | bool = "mlp_bias"
    size_field: str = "intermediate_size"
    activation_field: str = "hidden_act"
    gelu_means_tanh: bool = False
    clamps_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTraits:
    """The head, and the fields whose values multiply and divide the logits."""

    scale_field: str | None = None
    divisor_field: str | None = None
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The traits of one architecture."""

    layers: LayerTraits = LayerTraits()
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Values of missing fields, as in transformers, if they differ from the usual defaults."""
    reads: tuple[str, ...] = ()
    """The fields of `config_fields.DECISIVE` that the architecture supports."""
    norms: NormTraits = NormTraits()
    attention: AttentionTraits = AttentionTraits()
    rotary: RotaryTraits = RotaryTraits()
    feed_forward: FeedForwardTraits = FeedForwardTraits()
    mixture: MixtureTraits | None = None
    head: HeadTraits = HeadTraits()
    scales_embedding: bool = False
    draft_tensors: tuple[str, ...] = ()
    """Name prefixes of tensors that serve only multi-token prediction. The decoder does not read them."""
    draft_head: DraftHeadNames | None = None
    """The head for drafts, if the architecture has one that loramux can use."""
