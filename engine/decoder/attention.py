"""The attention of one layer, between its fused projections and the projection of its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from loramux.engine.architectures.attention_config import ROTATED_NORMS
from loramux.engine.architectures.model_config import SINKS, ModelConfig
from loramux.engine.architectures.rope_config import NO_ROPE
from loramux.engine.decoder.decoder_step import DecoderStep
from loramux.engine.decoder.layer_adapters import LayerAdapters
from loramux.engine.decoder.norms import AdaptableNorm, Norm, RmsNorm
from loramux.engine.decoder.placement import Placement
from loramux.engine.decoder.rotary import in_halves
from loramux.engine.sequences.cache_groups import CacheLayout
from loramux.kernels.tables import AttentionSpec, ModuleGroup


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """The attention of one layer.

    `norms` contains the norms of q and k with their numbers of channels, or is empty. `rotary` is an index into
    `DecoderStep.angles`. With `interleaves`, each pair of adjacent channels is rotated. Without `stores_kv`, the layer
    reads the K and V of another layer. `cache_group` and `cache_layer` are the `CacheLayout.place` of the layer whose K
    and V are read. Without `has_v`, the projection of K, before its norm, is also V. Without `scales_query`, the step's
    query scale does not apply. `clip` limits the magnitude of the projections' outputs. `weight` `[head_dim]`
    multiplies q after the rotation.
    """

    spec: AttentionSpec
    norms: tuple[tuple[AdaptableNorm, int], ...]
    value_norm: Norm | None
    rotary: int
    interleaves: bool
    has_gates: bool
    stores_kv: bool
    has_v: bool
    cache_group: int
    cache_layer: int
    sinks: torch.Tensor | None
    scales_query: bool
    clip: float | None
    weight: torch.Tensor | None

    def __call__(self, qkv: torch.Tensor, step: DecoderStep, adapters: LayerAdapters) -> torch.Tensor:
        """The input of the output projection. `qkv` `[num_tokens, ...]` is the output of the fused projections."""
        spec, num_tokens = self.spec, qkv.shape[0]
        q, stored, gate = self._stored(qkv, step, adapters)
        batch, attended = step.attention[self.cache_group], step.outputs[spec.head_dim]
        adapters.kernels.paged_attention(q, self.cache_layer, batch, spec, attended, self.sinks, stored)
        if gate is not None:
            attended = attended * gate.sigmoid()
        return attended.view(num_tokens, spec.num_heads * spec.head_dim)

    def store(self, qkv: torch.Tensor, step: DecoderStep, adapters: LayerAdapters) -> None:
        """Store K and V of the step's rows, without attending to any."""
        self._stored(qkv, step, adapters)

    def _stored(
        self, qkv: torch.Tensor, step: DecoderStep, adapters: LayerAdapters
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor | None]:
        """Store K and V. Returns q, K and V as they are stored unless the layer stores none, and the gate if any."""
        spec, kernels, num_tokens = self.spec, adapters.kernels, qkv.shape[0]
        head_dim, kv_out = spec.head_dim, spec.num_kv_heads * spec.head_dim
        q_out = spec.num_heads * head_dim
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        num_kv_parts = (1 + self.has_v) if self.stores_kv else 0
        q, *kv = torch.split(qkv, [2 * q_out if self.has_gates else q_out, *[kv_out] * num_kv_parts], dim=1)
        gate = None
        if self.has_gates:
            q, gate = q.view(num_tokens, spec.num_heads, 2 * head_dim).chunk(2, dim=2)
        q = self._normed(0, q, adapters).view(num_tokens, spec.num_heads, head_dim)
        k, v = None, None
        if kv:
            k = self._normed(1, kv[0], adapters).view(num_tokens, spec.num_kv_heads, head_dim)
            v = kv[-1].view(num_tokens, spec.num_kv_heads, head_dim)
            if self.value_norm is not None:
                v = self.value_norm(kernels, v)
        if step.query_scale is not None and self.scales_query:
            q = q * step.query_scale
        angles = step.angles[self.rotary]
        if self.interleaves:
            num_pairs = angles[0].shape[1]
            q = in_halves(q, num_pairs)
            k = None if k is None else in_halves(k, num_pairs)
        kernels.rotate_and_store(q, k, v, *angles, self.cache_layer, step.attention[self.cache_group])
        if self.weight is not None:
            q = q * self.weight
        return q, None if k is None or v is None else (k, v), gate

    def _normed(self, index: int, x: torch.Tensor, adapters: LayerAdapters) -> torch.Tensor:
        if not self.norms:
            return x
        norm, size = self.norms[index]
        return norm(x.view(x.shape[0], -1, size), adapters)


def load_attention(
    config: ModelConfig,
    place: Placement,
    layer: int,
    rotary: int,
    window: int | None,
    cache: CacheLayout,
    norm_groups: Mapping[str, ModuleGroup],
) -> Attention:
    """Load the attention of one layer. `rotary` is the index of the layer's rotary embedding. `norm_groups` has the
    layer's norms by name.
    """
    attention = config.attention
    prefix, heads = f"model.layers.{layer}.self_attn", attention.layer_heads[layer]
    cache_group, cache_layer = cache.place(attention.kv_sources[layer])
    stores_kv = attention.kv_sources[layer] == layer
    is_rotated = attention.ropes[layer] is not NO_ROPE
    norms: tuple[tuple[AdaptableNorm, int], ...]
    unweighted = RmsNorm(torch.ones(heads.head_dim, device=place.backend.device), config.norm_eps)
    weight = None
    if attention.has_rotated_norms:
        # The products of q and k are the same if q has the weights of both, so K need not be weighted before it is
        # stored.
        of_q, of_k = (place.finite(f"{prefix}.{name}.weight", (heads.head_dim,)) for name in ROTATED_NORMS)
        weight = (of_q * of_k).to(place.backend.activation_dtype or place.dtype)
    if attention.has_l2_norms and is_rotated:
        # transformers normalises after the rotation, but a rotation does not change the length of a head's vector.
        norms = ((AdaptableNorm(unweighted, None), heads.head_dim),) * 2
    else:
        norms = tuple(
            (AdaptableNorm(place.norm(f"{prefix}.{name}", size), norm_groups.get(f"self_attn.{name}")), size)
            for name, size in attention.norm_sizes(layer)
        )
    return Attention(
        spec=AttentionSpec(
            num_heads=attention.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            scale=attention.scale,
            sliding_window=window,
            soft_cap=attention.soft_cap,
        ),
        norms=norms,
        value_norm=unweighted if attention.has_value_norm and stores_kv else None,
        rotary=rotary,
        interleaves=attention.interleaved_rotary and is_rotated,
        has_gates=attention.has_gates,
        stores_kv=stores_kv,
        has_v=layer not in attention.layers_without_v,
        cache_group=cache_group,
        cache_layer=cache_layer,
        clip=attention.clip,
        weight=weight,
        scales_query=attention.query_scaling is None or not is_rotated,
        sinks=place.finite(f"{prefix}.{SINKS}", (attention.num_heads,)) if attention.has_sinks else None,
    )
