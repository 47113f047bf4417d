"""The attention of a decoder's layers, read from `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loramux.engine.architectures.config_fields import has_bias, optional_float, positive, positive_float, refuse_field
from loramux.engine.architectures.family import HEAD_WIDE, PROJECTION_WIDE, ROTATED, WEIGHTLESS, Family
from loramux.engine.architectures.layer_heads import LayerHeads, heads_by_layer, kv_sources, usual_heads
from loramux.engine.architectures.layer_kinds import FULL, LINEAR, OLDER_NAMES, SLIDING
from loramux.engine.architectures.rope_config import QueryScaling, RopeConfig, parse_ropes
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.kernels.layout import NormShape

ROTATED_NORMS = ("query_layernorm", "key_layernorm")
"""Names of the norms of q and k whose weights apply after the rotation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Configuration of attention in all layers of one decoder. Layers with a delta rule ignore their entries."""

    num_heads: int
    num_kv_heads: int
    """Number of heads of K and V in the layers whose K is widest."""
    head_dim: int
    """Number of channels of a head in the layers whose K is widest."""
    layer_heads: tuple[LayerHeads, ...]
    kv_sources: tuple[int, ...]
    """Layer `i` reads the K and V of layer `kv_sources[i]`, which is `i` itself if layer `i` computes K and V."""
    layers_without_v: tuple[int, ...]
    """Layers in which the projection of K also yields V."""
    windows: tuple[int | None, ...]
    """Each layer's sliding window in tokens, or None for the whole context."""
    ropes: tuple[RopeConfig, ...]
    """Each layer's rotary embedding."""
    interleaved_rotary: bool
    """True if neighbouring channels are rotated together."""
    qk_norm: str | None
    """The scope of the norms of q and k: each head or the whole projection. None if q and k have no norms with weights.
    """
    has_l2_norms: bool
    """True if q and k of rotated layers are normalised without weights."""
    has_rotated_norms: bool
    """True if the channels of each head of q and k, normalised without weights, have weights after the rotation."""
    has_value_norm: bool
    """True if V is normalised without a weight."""
    query_scaling: QueryScaling | None
    """How q is scaled in layers without rotation, or None if it is not."""
    fused_qkv: bool
    """True if the model projects q, k and v with one linear layer, which is also the target of adapters."""
    qkv_bias: bool
    o_bias: bool
    o_name: str
    """Name of the output projection."""
    has_gates: bool
    """True if the query projection yields q, then a gate, for each head."""
    clip: float | None
    """Maximum magnitude of an element of q, k and v, or None for no limit."""
    scale: float
    """Factor applied to the products of q and k."""
    soft_cap: float | None
    """The magnitude that attention scores approach but never exceed, or None for no limit."""
    has_sinks: bool
    """True if each head's softmax has an additional score without a value."""

    @property
    def has_uneven_cache(self) -> bool:
        """True if layers differ in the size of K and V, or some layers read the K and V of another layer."""
        return len(set(self.layer_heads)) > 1 or self.kv_sources != tuple(range(len(self.kv_sources)))

    def norm_sizes(self, layer: int) -> tuple[tuple[str, int], ...]:
        """Names of the weighted norms of q and k, with their numbers of channels. A layer without K has no `k_norm`."""
        if self.qk_norm is None:
            return ()
        heads = self.layer_heads[layer]
        num_heads = {HEAD_WIDE: (1, 1), PROJECTION_WIDE: (self.num_heads, heads.num_kv_heads)}[self.qk_norm]
        sizes = tuple(zip(("q_norm", "k_norm"), (num * heads.head_dim for num in num_heads), strict=True))
        return sizes if self.kv_sources[layer] == layer else sizes[:1]

    def norm_shapes(self, attending: Sequence[bool], offset: float) -> list[NormShape]:
        """The weighted norms of q and k in the layers that are marked in `attending`. Sizes can differ by layer."""
        found: dict[tuple[str, int, int], list[int]] = {}
        for layer, has_attention in enumerate(attending):
            heads = self.layer_heads[layer]
            widths = (self.num_heads * heads.head_dim, heads.width)
            for (name, size), width in zip(self.norm_sizes(layer) if has_attention else (), widths, strict=False):
                found.setdefault((f"self_attn.{name}", size, width // size), []).append(layer)
        return [
            NormShape(*shape, offset, layers=None if len(layers) == len(attending) else tuple(layers))
            for shape, layers in found.items()
        ]


def parse_kinds(raw: Mapping[str, Any], architecture: str, family: Family, num_layers: int) -> list[str]:
    """Each layer's kind. Unless the family supports `layer_types`, this field must agree with the other fields."""
    usual = family.layers.usual(raw, num_layers)
    kinds = usual if raw.get("layer_types") is None else raw["layer_types"]
    if len(kinds) != num_layers:
        raise ModelNotSupported(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    known = (FULL, family.layers.other)
    if LINEAR not in known:
        # In other families, linear attention is a gated delta rule, which a Mamba layer is not.
        kinds = [OLDER_NAMES.get(kind, kind) for kind in kinds]
    if LINEAR in kinds and LINEAR not in known:
        raise ModelNotSupported(
            f"loramux does not support the layers with a recurrent state, such as Mamba, of this {architecture}"
        )
    for kind in kinds:
        if kind not in known:
            raise ModelNotSupported(f"layer_types names {kind!r}; {' and '.join(known)} are supported")
    if family.attention.has_layer_heads and kinds[-1] != FULL:
        # transformers would silently replace the kind of the last layer.
        refuse_field("layer_types[-1]", kinds[-1], architecture)
    if kinds != usual and not family.layers.may_differ:
        refuse_field("layer_types", kinds, architecture)
    return list(kinds)


def parse_attention(raw: Mapping[str, Any], architecture: str, family: Family, kinds: Sequence[str]) -> AttentionConfig:
    """Configure attention for layers of these kinds. Raises ModelNotSupported, or ValueError for a malformed field."""
    traits, num_heads = family.attention, positive(raw, "num_attention_heads")
    heads = usual_heads(raw, num_heads)
    layer_heads = (heads,) * len(kinds)
    if traits.has_layer_heads:
        layer_heads = heads_by_layer(raw, architecture, kinds, num_heads)
    widest = max(layer_heads, key=lambda one: one.width)
    windows = _parse_windows(raw, family, kinds)
    has_qk_norm = traits.qk_norm_field is None or bool(raw[traits.qk_norm_field])
    qk_norm = traits.qk_norm if has_qk_norm else None
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=widest.num_kv_heads,
        head_dim=widest.head_dim,
        layer_heads=layer_heads,
        kv_sources=kv_sources(raw, kinds),
        layers_without_v=_layers_without_v(raw, windows),
        windows=windows,
        ropes=parse_ropes(raw, architecture, family, windows, heads.head_dim),
        interleaved_rotary=family.rotary.is_interleaved,
        qk_norm=None if qk_norm in (WEIGHTLESS, ROTATED) else qk_norm,
        has_l2_norms=qk_norm in (WEIGHTLESS, ROTATED),
        has_rotated_norms=qk_norm == ROTATED,
        has_value_norm=traits.has_value_norm,
        query_scaling=_query_scaling(raw) if traits.scales_unrotated else None,
        fused_qkv=traits.fused_qkv,
        qkv_bias=has_bias(raw, traits.qkv_bias),
        o_bias=has_bias(raw, traits.o_bias),
        o_name=traits.o_name,
        has_gates=traits.has_gates,
        clip=optional_float(raw, "clip_qkv") if "clip_qkv" in family.reads else None,
        scale=_scale(raw, family, heads.head_dim),
        soft_cap=optional_float(raw, "attn_logit_softcapping"),
        has_sinks=traits.has_sinks,
    )


def _parse_windows(raw: Mapping[str, Any], family: Family, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens, or None."""
    is_windowed = raw.get("sliding_window") is not None
    if "use_sliding_window" in family.assumed:
        is_windowed = is_windowed and bool(raw["use_sliding_window"])
    if SLIDING in kinds and not is_windowed:
        raise ModelNotSupported("layer_types in config.json names sliding layers, but no sliding_window is in use")
    window = positive(raw, "sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _layers_without_v(raw: Mapping[str, Any], windows: Sequence[int | None]) -> tuple[int, ...]:
    is_k = bool(raw.get("attention_k_eq_v"))
    return tuple(layer for layer, window in enumerate(windows) if is_k and window is None)


def _query_scaling(raw: Mapping[str, Any]) -> QueryScaling | None:
    if not raw["attn_temperature_tuning"]:
        return None
    return QueryScaling(growth=positive_float(raw, "attn_scale"), span=positive(raw, "floor_scale"))


def _scale(raw: Mapping[str, Any], family: Family, head_dim: int) -> float:
    if raw.get("attention_multiplier"):
        return positive_float(raw, "attention_multiplier")
    width = positive_float(raw, "query_pre_attn_scalar") if "query_pre_attn_scalar" in family.reads else head_dim
    return 1 / math.sqrt(width)
