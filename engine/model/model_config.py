"""The decoder's configuration, read from a Hugging Face model directory without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.quantization.base_format import parse_format
from loramux.adapter_store.formats.quantization.weight_format import WeightFormat
from loramux.engine.errors import ModelNotSupported
from loramux.engine.model.altup_config import AltUpConfig, parse_altup
from loramux.engine.model.config_fields import (
    factor,
    not_negative,
    positive,
    positive_float,
    refuse_field,
    refuse_what_is_not_computed,
)
from loramux.engine.model.delta_config import DeltaConfig, parse_delta
from loramux.engine.model.families import (
    HEAD_WIDE,
    PROJECTION_WIDE,
    Family,
    NormNames,
)
from loramux.engine.model.feed_forward import ClampedGate, FeedForward
from loramux.engine.model.layer_heads import LayerHeads, heads_by_layer, kv_sources, usual_heads
from loramux.engine.model.layer_kinds import CHUNKED, FULL, LINEAR, SLIDING
from loramux.engine.model.missing_features import MISSING_FEATURES
from loramux.engine.model.mixture_config import MixtureConfig, parse_mixture
from loramux.engine.model.multimodal import text_decoder
from loramux.engine.model.rope_config import QueryScaling, RopeConfig, longest_contexts, parse_ropes
from loramux.kernels.layout import ExpertModules, LinearShape, PageGeometry

DTYPES = ("float32", "bfloat16", "float16")
_QKV, _O, _GATE_UP, _DOWN, _ROUTER, _INPUT_GATE, _INPUT_PROJECTION = range(7)
"""The groups of a layer's modules."""

MAX_LAYERS = 1024
"""Maximum number of layers, which bounds the lists with an entry per layer. Published models have far fewer."""

SILU, GELU_TANH, RELU_SQUARED, XIELU = "silu", "gelu_tanh", "relu_squared", "xielu"
SINKS = "sinks"
"""Name of the tensor with a layer's attention sinks: a score for each head."""

XIELU_PREFIX = "mlp.act_fn"
XIELU_SHAPES: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""Names and shapes of the tensors of a layer's xIELU activation."""

INPUT_NORM, LAYER_SCALAR = "post_per_layer_input_norm", "layer_scalar"
INPUT_EMBEDDING, INPUT_PROJECTION = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
INPUT_PROJECTION_NORM = "model.per_layer_projection_norm"

EMBEDDING, HEAD = 0, 1
"""Indices of `ModelConfig.outer_modules`."""

_GATES = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}
_ACTIVATIONS_WITHOUT_GATE = {
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_new": GELU_TANH,
    "relu2": RELU_SQUARED,
    "xielu": XIELU,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Configuration of one decoder.

    By default, contexts have up to `max_model_len` tokens. The operator can allow up to `stretched_model_len`.
    `layer_heads` contains each layer's heads of K and V; `num_kv_heads` and `head_dim` are the heads of the layer with
    the widest K. Layer `i` reads the K and V of layer `kv_sources[i]`, which is `i` itself unless layer `i` computes no
    K and V. In `layers_without_v`, the projection of K also yields V. With `has_value_norm`, V is normed without a
    weight. With `has_l2_norms`, so are q and k of rotated layers. `query_scaling` scales q in layers without rotation,
    or is None. `altup` describes parallel residuals, or is None. `layer_intermediate_sizes` contains the inner size of
    each layer's feed-forward. If `layer_input_size` is not 0, an embedding of this size enters each layer. With
    `has_layer_scalars`, a number multiplies each layer's output. `layer_windows` contains each layer's sliding window
    in tokens, or None for the whole context. `layer_ropes` contains each layer's rotary embedding. `norm_offset` is
    added to every norm's weight. `qk_norm` is None if q and k have no norms with weights. `clip_qkv` limits the
    magnitude of q, k and v, or is None. `residual_scale` multiplies the outputs of attention and feed-forward. With
    `fused_qkv`, q, k and v are one linear, for the base and for adapters. A soft cap of None means no cap. With
    `has_sinks`, each head's softmax has an additional score without a value. `mixture` describes the layers with
    experts instead of a feed-forward of `intermediate_size`, or is None. `delta` describes the layers with a gated
    delta rule instead of attention, or is None. With `gates_attention`, the query projection yields q, then a gate, for
    each head. `quantization` is the format of the stored weights, or None if they are floats. Tensors whose names begin
    with one of `draft_tensors` are not read: they predict further tokens, or they are K and V projections and norms of
    layers that read another layer's K and V.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_heads: tuple[LayerHeads, ...]
    kv_sources: tuple[int, ...]
    layers_without_v: tuple[int, ...]
    has_value_norm: bool
    has_l2_norms: bool
    query_scaling: QueryScaling | None
    layer_intermediate_sizes: tuple[int, ...]
    layer_input_size: int
    layer_input_vocab_size: int
    altup: AltUpConfig | None
    has_layer_scalars: bool
    vocab_size: int
    max_model_len: int
    stretched_model_len: int
    norms: NormNames
    norm_eps: float
    norm_offset: float
    has_layer_norms: bool
    has_norm_weights: bool
    has_norm_biases: bool
    final_norm: str
    qk_norm: str | None
    qkv_bias: bool
    o_bias: bool
    o_name: str
    head_bias: bool
    clip_qkv: float | None
    mlp_bias: bool
    fused_qkv: bool
    feed_forward: FeedForward
    mixture: MixtureConfig | None
    delta: DeltaConfig | None
    gates_attention: bool
    parallel_blocks: bool
    interleaved_rotary: bool
    activation: str
    clamped_gate: ClampedGate | None
    embedding_scale: float
    attention_scale: float
    residual_scale: float
    logit_scale: float
    attention_soft_cap: float | None
    has_sinks: bool
    logit_soft_cap: float | None
    tied_embeddings: bool
    layer_windows: tuple[int | None, ...]
    layer_ropes: tuple[RopeConfig, ...]
    dtype: str
    quantization: WeightFormat | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    draft_tensors: tuple[str, ...]

    @property
    def modules(self) -> tuple[LinearShape, ...]:
        """The linears in the layers, which adapters can target, with PEFT's names, in the pool's fixed order.

        A name occurs several times if the size of the linear differs between layers. The linears of experts are in
        `experts` instead.
        """
        return tuple(linear for _, linear in self._grouped_modules)

    @property
    def _grouped_modules(self) -> list[tuple[int, LinearShape]]:
        """`modules`, each in a pair with the index of its group."""
        hidden = self.hidden_size
        attending = [self.has_attention(layer) for layer in range(self.num_layers)]
        q_out = [self.num_heads * one.head_dim * has for one, has in zip(self.layer_heads, attending, strict=True)]
        k_out = [
            heads.width if attending[layer] and self.kv_sources[layer] == layer else 0
            for layer, heads in enumerate(self.layer_heads)
        ]
        v_out = [0 if layer in self.layers_without_v else size for layer, size in enumerate(k_out)]
        if self.fused_qkv:
            outputs = {"qkv_proj": [q + k + v for q, k, v in zip(q_out, k_out, v_out, strict=True)]}
        else:
            outputs = {
                "q_proj": [2 * q if self.gates_attention else q for q in q_out],
                "k_proj": k_out,
                "v_proj": v_out,
            }
        found = [
            (_QKV, linear)
            for name, sizes in outputs.items()
            for linear in _linears(f"self_attn.{name}", [(hidden, size) if size else None for size in sizes])
        ]
        o_shapes = [(size, hidden) if size else None for size in q_out]
        found += [(_O, linear) for linear in _linears(self.o_name, o_shapes)]
        for block, sizes in self._feed_forwards:
            per_input = (2 if block.has_gate else 1) / len(block.inputs)
            wide = [(hidden, int(per_input * size)) if size else None for size in sizes]
            for name in block.inputs:
                found += [(_GATE_UP, linear) for linear in _linears(name, wide)]
            narrow = [(size, hidden) if size else None for size in sizes]
            found += [(_DOWN, linear) for linear in _linears(block.output, narrow)]
        if self.mixture is not None:
            for router in self.mixture.router_linears(hidden):
                shape = router.in_features, router.out_features
                layers = [shape if layer in self.mixture.layers else None for layer in range(self.num_layers)]
                found += [(_ROUTER, linear) for linear in _linears(router.name, layers)]
        if self.delta is not None:
            *inputs, output = self.delta.linears(hidden)
            found += [*((_QKV, linear) for linear in inputs), (_O, output)]
        if self.layer_input_size:
            found.append((_INPUT_GATE, LinearShape("per_layer_input_gate", hidden, self.layer_input_size)))
            found.append((_INPUT_PROJECTION, LinearShape("per_layer_projection", self.layer_input_size, hidden)))
        return found

    def has_attention(self, layer: int) -> bool:
        return self.delta is None or layer in self.delta.attention_layers

    @property
    def experts(self) -> ExpertModules | None:
        """The linears of the experts, or None if no layer has experts."""
        if self.mixture is None:
            return None
        linears = self.mixture.expert_linears(self.hidden_size)
        names, num_experts = self.mixture.names, self.mixture.routing.num_experts
        return ExpertModules(num_experts, linears, names.router, names.stacked_router, self._mixture_layers)

    @property
    def _mixture_layers(self) -> tuple[int, ...] | None:
        """The layers with experts, or None if all have them."""
        assert self.mixture is not None
        return None if len(self.mixture.layers) == self.num_layers else self.mixture.layers

    @property
    def _feed_forwards(self) -> list[tuple[FeedForward, list[int]]]:
        """The feed-forward blocks that all tokens use, each with its inner size in each layer (0: no block)."""
        layers = range(self.num_layers)
        mixture = self.mixture
        if mixture is None:
            return [(self.feed_forward, list(self.layer_intermediate_sizes))]
        dense = [0 if layer in mixture.layers else self.layer_intermediate_sizes[layer] for layer in layers]
        found = [(self.feed_forward, dense)] if any(dense) else []
        if mixture.shared is not None:
            found.append((mixture.shared.block, [mixture.shared.size * (layer in mixture.layers) for layer in layers]))
        return found

    @property
    def outer_modules(self) -> tuple[LinearShape, ...]:
        """The modules outside the layers, which adapters can target too, with PEFT's names.

        The modules are separate even if the base ties their weights, because an adapter modifies only the module that
        it names.
        """
        return (
            LinearShape("model.embed_tokens", self.vocab_size, self.hidden_size, is_embedding=True),
            LinearShape("lm_head", self.hidden_size, self.vocab_size),
        )

    @property
    def module_groups(self) -> tuple[tuple[int, ...], ...]:
        """Indices of `modules` by their input: q/k/v, o, gate/up, down, router.

        A group is empty if no layer has any of its modules. The input projections of a delta rule belong to the first
        group, and its output projection to the second.
        """
        return self._groups(_QKV, _O, _GATE_UP, _DOWN, _ROUTER)

    @property
    def input_groups(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the `modules` that apply a layer's own input embedding: its gate and its projection."""
        return self._groups(_INPUT_GATE, _INPUT_PROJECTION)

    def _groups(self, *groups: int) -> tuple[tuple[int, ...], ...]:
        modules = self._grouped_modules
        return tuple(tuple(m for m, (group, _) in enumerate(modules) if group == wanted) for wanted in groups)

    def layer_groups(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """`module_groups` with only the modules of one layer."""
        modules = self.modules
        return tuple(tuple(m for m in group if modules[m].is_in(layer)) for group in self.module_groups)

    def qk_norm_sizes(self, layer: int) -> tuple[tuple[str, int], ...]:
        """Names and numbers of channels of the weighted norms of q and k. A layer without K has no `k_norm`."""
        if self.qk_norm is None:
            return ()
        heads = self.layer_heads[layer]
        num_heads = {HEAD_WIDE: (1, 1), PROJECTION_WIDE: (self.num_heads, heads.num_kv_heads)}[self.qk_norm]
        sizes = tuple(zip(("q_norm", "k_norm"), (num * heads.head_dim for num in num_heads), strict=True))
        return sizes if self.kv_sources[layer] == layer else sizes[:1]

    @property
    def has_uneven_cache(self) -> bool:
        """True if layers differ in the size of K and V, or some layers read the K and V of another layer."""
        return len(set(self.layer_heads)) > 1 or self.kv_sources != tuple(range(self.num_layers))

    def geometry(self, kv_itemsize: int, adapter_itemsize: int) -> PageGeometry:
        """The geometry of the pool's pages for this decoder."""
        return PageGeometry(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            kv_itemsize=kv_itemsize,
            adapter_itemsize=adapter_itemsize,
        )

    def num_state_pages(self, geometry: PageGeometry) -> int:
        """Number of pages for the state of one sequence of any length; 0 if all layers have attention."""
        return 0 if self.delta is None else self.delta.spec.num_pages(geometry)

    @staticmethod
    def load(model_dir: Path) -> ModelConfig:
        """Read `config.json` and, if present, `generation_config.json`. Raises ModelNotSupported with the reason."""
        if model_dir.suffix == ".gguf" or (not (model_dir / "config.json").exists() and any(model_dir.glob("*.gguf"))):
            raise ModelNotSupported(
                f"{model_dir} is a GGUF model, which cannot be read: use the safetensors checkpoint that it was made "
                "from, with --quantization int8 or int4"
            )
        if not model_dir.is_dir():
            raise ModelNotSupported(f"the model directory {model_dir} does not exist")
        raw = _read_json(model_dir / "config.json")
        if raw is None:
            raise ModelNotSupported(f"{model_dir} has no config.json: use a Hugging Face model directory")
        generation = _read_json(model_dir / "generation_config.json") or {}
        try:
            return _parse(raw, generation)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ModelNotSupported(f"config.json of {model_dir} is incomplete or malformed: {error}") from error


def input_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that produce the input embeddings of the layers."""
    size = config.layer_input_size
    return {
        f"{INPUT_EMBEDDING}.weight": (config.layer_input_vocab_size, config.num_layers * size),
        f"{INPUT_PROJECTION}.weight": (config.num_layers * size, config.hidden_size),
        f"{INPUT_PROJECTION_NORM}.weight": (size,),
    }


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotSupported(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelNotSupported(f"{path} does not contain a JSON object")
    return value


def _parse(raw: Mapping[str, Any], generation: dict[str, Any]) -> ModelConfig:
    architecture = (raw.get("architectures") or ["none"])[0]
    found = text_decoder(architecture, raw)
    if found is None:
        feature = MISSING_FEATURES.get(architecture)
        reason = "; docs/models.md lists what is supported" if feature is None else f": loramux lacks {feature}"
        raise ModelNotSupported(f"the architecture {architecture} is not supported{reason}")
    family, raw = found
    refuse_what_is_not_computed(raw, architecture, family.reads)
    raw = {**family.assumed, **raw}
    if family.gates_attention and raw["attn_output_gate"] is not True:
        refuse_field("attn_output_gate", raw["attn_output_gate"], architecture)
    if raw.get("use_bidirectional_attention") == "all":
        refuse_field("use_bidirectional_attention", "all", architecture)
    if raw.get("rope_parameters") is None and "rope_parameters" in family.assumed:
        raw["rope_parameters"] = family.assumed["rope_parameters"]
    num_layers, hidden_size = positive(raw, "num_hidden_layers"), positive(raw, "hidden_size")
    if num_layers > MAX_LAYERS:
        raise ModelNotSupported(f"num_hidden_layers {num_layers} is above {MAX_LAYERS}")
    num_heads = positive(raw, "num_attention_heads")
    kinds = _parse_kinds(raw, architecture, family, num_layers)
    heads = usual_heads(raw, num_heads)
    layer_heads = (heads,) * num_layers
    if family.has_layer_heads:
        layer_heads = heads_by_layer(raw, architecture, kinds, num_heads)
    sources = kv_sources(raw, kinds)
    sizes = _intermediate_sizes(raw, family, sources)
    widest = max(layer_heads, key=lambda one: one.width)
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise ModelNotSupported(f"the dtype {dtype!r} in config.json is not one of {', '.join(DTYPES)}")
    try:
        quantization = parse_format(raw)
    except BaseNotSupported as error:
        raise ModelNotSupported(str(error)) from error
    windows = _parse_windows(raw, family, kinds)
    ropes = parse_ropes(raw, architecture, family, windows, heads.head_dim)
    max_model_len, stretched_model_len = longest_contexts(raw, ropes)
    if CHUNKED in kinds:
        # Within the first chunk, a chunked layer sees the whole context.
        chunk = positive(raw, "attention_chunk_size")
        max_model_len, stretched_model_len = min(max_model_len, chunk), min(stretched_model_len, chunk)
    vocab_size = positive(raw, "vocab_size")
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=max(sizes),
        num_heads=num_heads,
        num_kv_heads=widest.num_kv_heads,
        head_dim=widest.head_dim,
        layer_heads=layer_heads,
        kv_sources=sources,
        layers_without_v=_layers_without_v(raw, windows),
        has_value_norm=family.has_value_norm,
        has_l2_norms=family.has_l2_norms and _has_qk_norm(raw, family),
        query_scaling=_query_scaling(raw) if family.scales_unrotated else None,
        layer_intermediate_sizes=sizes,
        layer_input_size=_layer_input_size(raw, family),
        layer_input_vocab_size=raw.get("vocab_size_per_layer_input") or 0,
        altup=parse_altup(raw, architecture, num_layers) if family.has_altup else None,
        has_layer_scalars=family.has_layer_scalars,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        stretched_model_len=stretched_model_len,
        norms=family.norms,
        norm_eps=positive_float(raw, family.norm_eps_field),
        norm_offset=family.norm_offset,
        has_layer_norms=family.has_layer_norms,
        has_norm_weights=family.has_norm_weights,
        has_norm_biases=family.has_norm_biases,
        final_norm=family.final_norm,
        qk_norm=family.qk_norm if _has_qk_norm(raw, family) else None,
        qkv_bias=_has_bias(raw, family.qkv_bias),
        o_bias=_has_bias(raw, family.o_bias),
        o_name=family.o_name,
        head_bias=family.has_head_bias,
        clip_qkv=_soft_cap(raw, "clip_qkv") if "clip_qkv" in family.reads else None,
        mlp_bias=_has_bias(raw, family.mlp_bias),
        fused_qkv=family.fused_qkv,
        feed_forward=family.feed_forward,
        mixture=None if family.mixture is None else parse_mixture(raw, family.mixture, num_layers),
        delta=parse_delta(raw, architecture, kinds),
        gates_attention=family.gates_attention,
        parallel_blocks=family.parallel_blocks,
        interleaved_rotary=family.interleaved_rotary,
        activation=_parse_activation(raw, family),
        clamped_gate=_parse_clamped_gate(raw) if family.clamps_gate else None,
        embedding_scale=hidden_size**0.5 if family.scales_embedding else factor(raw, "embedding_multiplier"),
        attention_scale=_attention_scale(raw, family, heads.head_dim),
        residual_scale=factor(raw, "residual_multiplier"),
        logit_scale=factor(raw, family.logit_scale_field) / factor(raw, family.logit_divisor_field),
        attention_soft_cap=_soft_cap(raw, "attn_logit_softcapping"),
        has_sinks=family.has_sinks,
        logit_soft_cap=_soft_cap(raw, "final_logit_softcapping"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        layer_windows=windows,
        layer_ropes=ropes,
        dtype=dtype,
        quantization=quantization,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_parse_eos(generation.get("eos_token_id", raw.get("eos_token_id")), vocab_size),
        draft_tensors=(*family.draft_tensors, *_draft_layers(raw, num_layers), *_shared_tensors(sources)),
    )


def _has_bias(raw: Mapping[str, Any], bias: str | bool) -> bool:
    return bias if isinstance(bias, bool) else bool(raw.get(bias, False))


def _has_qk_norm(raw: Mapping[str, Any], family: Family) -> bool:
    return family.qk_norm_field is None or bool(raw[family.qk_norm_field])


def _draft_layers(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    """The prefixes of the tensors of extra layers that follow the last layer and predict further tokens."""
    name = "num_nextn_predict_layers"
    count = 0 if raw.get(name) is None else not_negative(raw, name)
    return [f"model.layers.{num_layers + layer}." for layer in range(min(count, MAX_LAYERS))]


def _query_scaling(raw: Mapping[str, Any]) -> QueryScaling | None:
    if not raw["attn_temperature_tuning"]:
        return None
    return QueryScaling(growth=positive_float(raw, "attn_scale"), span=positive(raw, "floor_scale"))


def _shared_tensors(sources: Sequence[int]) -> list[str]:
    """Prefixes of unused tensors in published files: K and V of layers that read the K and V of another layer."""
    parts = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    shared = [layer for layer, source in enumerate(sources) if layer != source]
    return [f"model.layers.{layer}.self_attn.{part}" for layer in shared for part in parts]


def _layers_without_v(raw: Mapping[str, Any], windows: Sequence[int | None]) -> tuple[int, ...]:
    is_k = bool(raw.get("attention_k_eq_v"))
    return tuple(layer for layer, window in enumerate(windows) if is_k and window is None)


def _intermediate_sizes(raw: Mapping[str, Any], family: Family, sources: Sequence[int]) -> tuple[int, ...]:
    """The inner size of each layer's feed-forward. It can be doubled in layers that read another layer's K and V."""
    if family.has_altup and isinstance(raw[family.dense_size_field], list):
        sizes = raw[family.dense_size_field]
        if len(sizes) != len(sources):
            raise ModelNotSupported(f"intermediate_size has {len(sizes)} entries for {len(sources)} layers")
        return tuple(positive({"intermediate_size": size}, "intermediate_size") for size in sizes)
    size, factor = positive(raw, family.dense_size_field), 2 if raw.get("use_double_wide_mlp") else 1
    if factor == 2 and raw.get("enable_moe_block"):
        raise ModelNotSupported("config.json has both use_double_wide_mlp and enable_moe_block")
    return tuple(size * (1 if layer == source else factor) for layer, source in enumerate(sources))


def _layer_input_size(raw: Mapping[str, Any], family: Family) -> int:
    if not raw.get("hidden_size_per_layer_input"):
        return 0
    size = positive(raw, "hidden_size_per_layer_input")
    own, usual = positive(raw, "vocab_size_per_layer_input"), positive(raw, "vocab_size")
    # With AltUp, the vocabulary of the layer inputs can be smaller. Tokens beyond it get the input of token 0.
    if own != usual and not (family.has_altup and own < usual):
        raise ModelNotSupported(
            f"vocab_size_per_layer_input = {raw['vocab_size_per_layer_input']} in config.json differs from vocab_size"
        )
    return size


def _linears(name: str, shapes: Sequence[tuple[int, int] | None]) -> list[LinearShape]:
    """One linear for each distinct shape `(in_features, out_features)`. None means that a layer lacks the linear."""
    found: dict[tuple[int, int], list[int]] = {}
    for layer, shape in enumerate(shapes):
        if shape is not None:
            found.setdefault(shape, []).append(layer)
    return [
        LinearShape(name, *shape, layers=None if len(layers) == len(shapes) else tuple(layers))
        for shape, layers in found.items()
    ]


def _attention_scale(raw: Mapping[str, Any], family: Family, head_dim: int) -> float:
    if raw.get("attention_multiplier"):
        return positive_float(raw, "attention_multiplier")
    width = positive_float(raw, "query_pre_attn_scalar") if "query_pre_attn_scalar" in family.reads else head_dim
    return 1 / math.sqrt(width)


def _parse_activation(raw: Mapping[str, Any], family: Family) -> str:
    name = family.activation_field
    activation = raw.get(name, "silu")
    if activation == "gelu" and family.gelu_means_tanh:
        return GELU_TANH
    supported = _GATES if family.feed_forward.has_gate else _ACTIVATIONS_WITHOUT_GATE
    if activation not in supported:
        raise ModelNotSupported(
            f"the activation {activation!r} ({name} in config.json) is not supported; supported: {', '.join(supported)}"
        )
    return supported[activation]


def _parse_clamped_gate(raw: Mapping[str, Any]) -> ClampedGate:
    return ClampedGate(alpha=positive_float(raw, "swiglu_alpha"), limit=positive_float(raw, "swiglu_limit"))


def _parse_kinds(raw: Mapping[str, Any], architecture: str, family: Family, num_layers: int) -> list[str]:
    """Each layer's kind. Unless the family supports `layer_types`, this field must agree with the other fields."""
    usual = family.layer_kinds(raw, num_layers)
    kinds = usual if raw.get("layer_types") is None else raw["layer_types"]
    if len(kinds) != num_layers:
        raise ModelNotSupported(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    known = (FULL, LINEAR if family.has_delta_layers else CHUNKED if family.has_chunks else SLIDING)
    for kind in kinds:
        if kind not in known:
            raise ModelNotSupported(f"layer_types names {kind!r}; {' and '.join(known)} are supported")
    if family.has_layer_heads and kinds[-1] != FULL:
        # transformers would silently replace the kind of the last layer.
        refuse_field("layer_types[-1]", kinds[-1], architecture)
    if kinds != usual and not family.has_layer_types:
        refuse_field("layer_types", kinds, architecture)
    return list(kinds)


def _parse_windows(raw: Mapping[str, Any], family: Family, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens, or None."""
    is_windowed = raw.get("sliding_window") is not None
    if "use_sliding_window" in family.assumed:
        is_windowed = is_windowed and bool(raw["use_sliding_window"])
    if SLIDING in kinds and not is_windowed:
        raise ModelNotSupported("layer_types in config.json names sliding layers, but no sliding_window is in use")
    window = positive(raw, "sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _soft_cap(raw: dict[str, Any], name: str) -> float | None:
    return None if raw.get(name) is None else positive_float(raw, name)


def _parse_eos(value: Any, vocab_size: int) -> tuple[int, ...]:
    """The tokens that end an answer. Some files also name tokens that the model does not have, or -1."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(token for token in map(int, listed) if 0 <= token < vocab_size)
