"""The decoder's configuration, read from a Hugging Face model directory without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from loramux.adapter_store.errors import BaseNotSupported
from loramux.adapter_store.formats.quantization.base_format import parse_format
from loramux.adapter_store.formats.quantization.weight_format import WeightFormat
from loramux.engine.architectures.altup_config import AltUpConfig, parse_altup
from loramux.engine.architectures.attention_config import AttentionConfig, parse_attention, parse_kinds
from loramux.engine.architectures.config_fields import (
    factor,
    has_bias,
    not_negative,
    optional_float,
    positive,
    positive_float,
    refuse_field,
    refuse_what_is_not_computed,
)
from loramux.engine.architectures.delta_config import DELTA_NORM, DeltaConfig, parse_delta
from loramux.engine.architectures.draft_head import DraftHeadNames
from loramux.engine.architectures.end_tokens import end_tokens, eos_of_tokenizer
from loramux.engine.architectures.family import PARALLEL, SCALED, STREAMS, Family, NormNames
from loramux.engine.architectures.feed_forward import ClampedGate, FeedForwardNames
from loramux.engine.architectures.feed_forward_config import intermediate_sizes, parse_activation, parse_clamped_gate
from loramux.engine.architectures.gguf_model import check_model_directory
from loramux.engine.architectures.layer_kinds import CHUNKED
from loramux.engine.architectures.layer_modules import Group, attention_modules, feed_forward_modules, router_modules
from loramux.engine.architectures.missing_features import MISSING_FEATURES
from loramux.engine.architectures.mixture_config import MixtureConfig, parse_mixture
from loramux.engine.architectures.multimodal import text_decoder, with_head
from loramux.engine.architectures.rope_config import longest_contexts
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.kernels.layout import ExpertModules, LinearShape, NormShape, PageGeometry

DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 1024
"""Maximum number of layers. It bounds the length of lists with one entry per layer. Published models have far fewer."""

SINKS = "sinks"
"""Name of the tensor with a layer's attention sinks: a score for each head."""

INPUT_NORM, LAYER_SCALAR = "post_per_layer_input_norm", "layer_scalar"
INPUT_EMBEDDING, INPUT_PROJECTION = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
INPUT_PROJECTION_NORM = "model.per_layer_projection_norm"

EMBEDDING, HEAD = 0, 1
"""Indices of `ModelConfig.outer_modules`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Configuration of one decoder."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    """Default limit on the length of a context, in tokens."""
    stretched_model_len: int
    """Highest limit on the length of a context that the operator can set, in tokens."""
    dtype: str
    quantization: WeightFormat | None
    """Format of the stored weights, or None if they are floats."""
    attention: AttentionConfig
    delta: DeltaConfig | None
    """The layers with a gated delta rule instead of attention, or None if all layers have attention."""
    feed_forward: FeedForwardNames
    intermediate_size: int
    """Largest number of inner features of a feed-forward block without experts."""
    layer_intermediate_sizes: tuple[int, ...]
    """Number of inner features of each layer's feed-forward block."""
    mlp_bias: bool
    activation: str
    clamped_gate: ClampedGate | None
    mixture: MixtureConfig | None
    """The layers with experts, or None if no layer has experts."""
    parallel_blocks: bool
    """True if the attention and feed-forward blocks read the same normalised residual."""
    norms: NormNames
    norm_eps: float
    norm_offset: float
    """Number added to the stored weights of all norms except those of a delta rule."""
    has_layer_norms: bool
    """True if norms subtract the mean."""
    has_norm_weights: bool
    has_norm_biases: bool
    final_norm: str
    """Name of the norm after the last layer."""
    layer_input_size: int
    """Size of the embedding that enters each layer, or 0 if there is none."""
    layer_input_vocab_size: int
    """Number of tokens with an embedding that enters each layer."""
    altup: AltUpConfig | None
    """The layers' parallel residuals, or None if each token has one residual."""
    has_layer_scalars: bool
    """True if each layer has a number that multiplies its output."""
    embedding_scale: float
    residual_scale: float
    """Factor applied to the outputs of the attention and feed-forward blocks."""
    logit_scale: float
    logit_soft_cap: float | None
    """The magnitude that logits approach but never exceed, or None for no limit."""
    head_bias: bool
    tied_embeddings: bool
    has_head: bool
    """False if the model was saved without a head and does not tie it to the embedding, so it makes only embeddings."""
    eos_token_ids: tuple[int, ...]
    draft_tensors: tuple[str, ...]
    """Name prefixes of tensors that are not read. They serve only multi-token prediction, or compute K and V in layers
    that read the K and V of another layer.
    """
    draft_head: DraftHeadNames | None
    """The head for drafts that `config.json` names, or None if there is none that loramux can use."""

    @property
    def draft_layer(self) -> ModelConfig:
        """The layer of the head for drafts, as a decoder of one layer of the same kind as the base's last layer."""
        last, attention = self.num_layers - 1, self.attention
        return replace(
            self,
            num_layers=1,
            attention=replace(
                attention,
                layer_heads=attention.layer_heads[last:],
                kv_sources=(0,),
                windows=attention.windows[last:],
                ropes=attention.ropes[last:],
            ),
            layer_intermediate_sizes=self.layer_intermediate_sizes[last:],
            mixture=None if self.mixture is None else replace(self.mixture, layers=(0,)),
        )

    @property
    def modules(self) -> tuple[LinearShape, ...]:
        """The linear layers that adapters can target in decoder layers, with PEFT's names, in the order of the adapter
        tables.

        A name occurs several times if the size of the linear layer differs between decoder layers. The linear layers of
        experts are in `experts` instead.
        """
        return tuple(linear for _, linear in self._grouped_modules)

    @property
    def _grouped_modules(self) -> list[tuple[Group, LinearShape]]:
        """`modules`, each paired with its group."""
        hidden = self.hidden_size
        attending = [self.has_attention(layer) for layer in range(self.num_layers)]
        found = attention_modules(self.attention, hidden, attending)
        for block, sizes in self._feed_forwards:
            found += feed_forward_modules(block, hidden, sizes, self.mlp_bias)
        if self.mixture is not None:
            found += router_modules(self.mixture, hidden, self.num_layers)
        if self.delta is not None:
            *inputs, output = self.delta.linears(hidden)
            found += [*((Group.QKV, linear) for linear in inputs), (Group.OUTPUT, output)]
        if self.layer_input_size:
            found.append((Group.INPUT_GATE, LinearShape("per_layer_input_gate", hidden, self.layer_input_size)))
            found.append((Group.INPUT_PROJECTION, LinearShape("per_layer_projection", self.layer_input_size, hidden)))
            # One linear layer computes the inputs of all layers, before the first one.
            size = self.num_layers * self.layer_input_size
            found.append((Group.ALL_INPUTS, LinearShape(INPUT_PROJECTION, hidden, size, layers=(0,))))
        return found

    def has_attention(self, layer: int) -> bool:
        return self.delta is None or layer in self.delta.attention_layers

    @property
    def experts(self) -> ExpertModules | None:
        """The linear layers of the experts, or None if no decoder layer has experts."""
        if self.mixture is None:
            return None
        linears = self.mixture.expert_linears(self.hidden_size)
        names, num_experts = self.mixture.names, self.mixture.routing.num_experts
        return ExpertModules(num_experts, linears, names.router, names.stacked_router, self._mixture_layers)

    @property
    def norm_shapes(self) -> tuple[NormShape, ...]:
        """The norms that adapters can replace. Along the module axis, they follow all linear layers.

        Norms that only a few architectures have, such as those between the branches of a mixture, are left out.
        """
        if not self.has_norm_weights:
            return ()

        def norm(name: str, layers: tuple[int, ...] | None = None) -> NormShape:
            return NormShape(name, self.hidden_size, 1, self.norm_offset, self.has_norm_biases, layers)

        found = [norm(name) for name in astuple(self.norms) if name is not None]
        found += self.attention.norm_shapes(
            [self.has_attention(layer) for layer in range(self.num_layers)], self.norm_offset
        )
        if self.delta is not None:
            spec = self.delta.spec
            found.append(NormShape(DELTA_NORM, spec.v_dim, spec.num_v_heads, layers=self.delta.layers))
        return (*found, norm(self.final_norm, (self.num_layers - 1,)))

    @property
    def first_norm(self) -> int:
        """The index of the first norm along the module axis."""
        experts = self.experts
        num_experts = 0 if experts is None else experts.num_experts * len(experts.linears)
        return len(self.modules) + num_experts

    @property
    def _mixture_layers(self) -> tuple[int, ...] | None:
        """The layers with experts, or None if all have them."""
        assert self.mixture is not None
        return None if len(self.mixture.layers) == self.num_layers else self.mixture.layers

    @property
    def _feed_forwards(self) -> list[tuple[FeedForwardNames, list[int]]]:
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
        """The modules outside the decoder layers, with PEFT's names. Adapters can target them too.

        The modules are separate even if the base ties their weights, because an adapter modifies only the module that
        it names.
        """
        return (
            LinearShape("model.embed_tokens", self.vocab_size, self.hidden_size, is_embedding=True),
            LinearShape("lm_head", self.hidden_size, self.vocab_size, has_bias=self.head_bias),
        )

    @property
    def draft_modules(self) -> tuple[LinearShape, ...]:
        """The linear layers of the head for drafts that adapters can change: those of its layer, in the order of
        `draft_layer.modules`, and its projection. Its experts are left out, because PEFT has no names for them.
        """
        names = self.draft_head
        if names is None:
            return ()
        projection = LinearShape(names.projection, 2 * self.hidden_size, self.hidden_size)
        return tuple(
            replace(module, name=f"{names.prefix}.{module.name}", layers=None)
            for module in (*self.draft_layer.modules, projection)
        )

    @property
    def module_groups(self) -> tuple[tuple[int, ...], ...]:
        """Indices of `modules` by their input: q/k/v, o, gate/up, down, router.

        A group is empty if no layer has any of its modules. The input projections of a delta rule belong to the first
        group, and its output projection to the second.
        """
        return self._groups(Group.QKV, Group.OUTPUT, Group.GATE_UP, Group.DOWN, Group.ROUTER)

    @property
    def input_groups(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the `modules` of the layers' own input embeddings: a layer's gate and projection, and the linear
        layer that computes the inputs of all layers.
        """
        return self._groups(Group.INPUT_GATE, Group.INPUT_PROJECTION, Group.ALL_INPUTS)

    def _groups(self, *groups: Group) -> tuple[tuple[int, ...], ...]:
        modules = self._grouped_modules
        return tuple(tuple(m for m, (group, _) in enumerate(modules) if group == wanted) for wanted in groups)

    def layer_groups(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """`module_groups` with only the modules of one layer."""
        modules = self.modules
        return tuple(tuple(m for m in group if modules[m].is_in(layer)) for group in self.module_groups)

    def geometry(self, kv_itemsize: int, adapter_itemsize: int) -> PageGeometry:
        """The geometry of the pool's pages for this decoder. K and V of one byte per element are int8 codes."""
        head_dims = (heads.head_dim for heads in self.attention.layer_heads)
        return PageGeometry(
            num_layers=self.num_layers,
            num_kv_heads=self.attention.num_kv_heads,
            head_dim=self.attention.head_dim,
            kv_itemsize=kv_itemsize,
            adapter_itemsize=adapter_itemsize,
            elements_per_scale=math.gcd(*head_dims) if kv_itemsize == 1 else 0,
        )

    def num_state_pages(self, geometry: PageGeometry) -> int:
        """Number of pages for the state of one sequence of any length, or 0 if all layers have attention."""
        return 0 if self.delta is None else self.delta.spec.num_pages(geometry)

    @staticmethod
    def load(model_dir: Path) -> ModelConfig:
        """Read `config.json` and, if present, `generation_config.json` and the tokenizer's end token. Raises
        ModelNotSupported with the reason.
        """
        check_model_directory(model_dir)
        raw = _read_json(model_dir / "config.json") or {}
        generation = _read_json(model_dir / "generation_config.json") or {}
        eos = eos_of_tokenizer(lambda name: _read_json(model_dir / name) or {})
        try:
            return _parse(raw, generation, eos)
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


def _parse(raw: Mapping[str, Any], generation: dict[str, Any], tokenizer_eos: int | None) -> ModelConfig:
    if not raw.get("architectures"):
        raise ModelNotSupported('config.json has no architectures: add them, such as ["LlamaForCausalLM"] for a Llama')
    named = raw["architectures"][0]
    architecture = with_head(named, raw)
    found = text_decoder(architecture, raw)
    if found is None:
        feature = MISSING_FEATURES.get(architecture)
        reason = "; docs/models.md lists what is supported"
        if feature is not None:
            reason = f": loramux does not support {feature}"
        raise ModelNotSupported(f"the architecture {architecture} is not supported{reason}")
    family, raw = found
    refuse_what_is_not_computed(raw, architecture, family.reads)
    raw = {**family.assumed, **raw}
    if family.attention.has_gates and raw["attn_output_gate"] is not True:
        refuse_field("attn_output_gate", raw["attn_output_gate"], architecture)
    if raw.get("use_bidirectional_attention") == "all":
        refuse_field("use_bidirectional_attention", "all", architecture)
    if raw.get("rope_parameters") is None and "rope_parameters" in family.assumed:
        raw["rope_parameters"] = family.assumed["rope_parameters"]
    num_layers, hidden_size = positive(raw, "num_hidden_layers"), positive(raw, "hidden_size")
    if num_layers > MAX_LAYERS:
        raise ModelNotSupported(f"num_hidden_layers {num_layers} is above {MAX_LAYERS}")
    kinds = parse_kinds(raw, architecture, family, num_layers)
    attention = parse_attention(raw, architecture, family, kinds)
    sizes = intermediate_sizes(raw, family, attention.kv_sources)
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise ModelNotSupported(f"the dtype {dtype!r} in config.json is not one of {', '.join(DTYPES)}")
    try:
        quantization = parse_format(raw)
    except BaseNotSupported as error:
        raise ModelNotSupported(str(error)) from error
    max_model_len, stretched_model_len = longest_contexts(raw, attention.ropes)
    if CHUNKED in kinds:
        # Within the first chunk, a chunked layer sees the whole context.
        chunk = positive(raw, "attention_chunk_size")
        max_model_len, stretched_model_len = min(max_model_len, chunk), min(stretched_model_len, chunk)
    vocab_size = positive(raw, "vocab_size")
    is_headless, is_tied = architecture != named, bool(raw.get("tie_word_embeddings", False))
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        stretched_model_len=stretched_model_len,
        dtype=dtype,
        quantization=quantization,
        attention=attention,
        delta=parse_delta(raw, architecture, kinds),
        feed_forward=family.feed_forward.names,
        intermediate_size=max(sizes),
        layer_intermediate_sizes=sizes,
        mlp_bias=has_bias(raw, family.feed_forward.bias),
        activation=parse_activation(raw, family),
        clamped_gate=parse_clamped_gate(raw) if family.feed_forward.clamps_gate else None,
        mixture=None if family.mixture is None else parse_mixture(raw, family.mixture, num_layers),
        parallel_blocks=family.layers.wiring == PARALLEL,
        norms=family.norms.names,
        norm_eps=positive_float(raw, family.norms.eps_field),
        norm_offset=family.norms.offset,
        has_layer_norms=family.norms.subtracts_mean,
        has_norm_weights=family.norms.has_weights,
        has_norm_biases=family.norms.has_biases,
        final_norm=family.norms.final,
        layer_input_size=_layer_input_size(raw, family),
        layer_input_vocab_size=raw.get("vocab_size_per_layer_input") or 0,
        altup=parse_altup(raw, architecture, num_layers) if family.layers.wiring == STREAMS else None,
        has_layer_scalars=family.layers.wiring == SCALED,
        embedding_scale=hidden_size**0.5 if family.scales_embedding else factor(raw, "embedding_multiplier"),
        residual_scale=factor(raw, "residual_multiplier"),
        logit_scale=factor(raw, family.head.scale_field) / factor(raw, family.head.divisor_field),
        logit_soft_cap=optional_float(raw, "final_logit_softcapping"),
        head_bias=family.head.has_bias and not is_headless,
        # The embedding stands in for a head that the files lack. It takes no memory.
        tied_embeddings=is_tied or is_headless,
        has_head=not is_headless or (is_tied and not family.head.has_bias),
        eos_token_ids=end_tokens(raw, generation, tokenizer_eos, vocab_size),
        draft_tensors=(
            *family.draft_tensors,
            *_draft_layers(raw, num_layers),
            *_shared_tensors(attention.kv_sources),
        ),
        draft_head=_draft_head(raw, family, num_layers),
    )


def _draft_layers(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    """The prefixes of the tensors of extra layers that follow the last layer and predict further tokens."""
    count = _num_draft_layers(raw)
    return [f"model.layers.{num_layers + layer}." for layer in range(min(count, MAX_LAYERS))]


def _draft_head(raw: Mapping[str, Any], family: Family, num_layers: int) -> DraftHeadNames | None:
    if family.draft_head is None or not _num_draft_layers(raw):
        return None
    return replace(family.draft_head, prefix=family.draft_head.prefix.format(num_layers))


def _num_draft_layers(raw: Mapping[str, Any]) -> int:
    name = "num_nextn_predict_layers"
    return 0 if raw.get(name) is None else not_negative(raw, name)


def _shared_tensors(sources: Sequence[int]) -> list[str]:
    """Prefixes of unused tensors in published files: K and V projections and norms of layers that read the K and V of
    another layer.
    """
    parts = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    shared = [layer for layer, source in enumerate(sources) if layer != source]
    return [f"model.layers.{layer}.self_attn.{part}" for layer in shared for part in parts]


def _layer_input_size(raw: Mapping[str, Any], family: Family) -> int:
    if not raw.get("hidden_size_per_layer_input"):
        return 0
    size = positive(raw, "hidden_size_per_layer_input")
    own, usual = positive(raw, "vocab_size_per_layer_input"), positive(raw, "vocab_size")
    # With AltUp, the vocabulary of the layer inputs can be smaller. Tokens beyond it get the input of token 0.
    if own != usual and not (family.layers.wiring == STREAMS and own < usual):
        raise ModelNotSupported(
            f"vocab_size_per_layer_input = {raw['vocab_size_per_layer_input']} in config.json differs from vocab_size"
        )
    return size
