"""Traits of each supported architecture that are not in its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loramux.engine.model.feed_forward import FUSED_GATE, GATED, WITHOUT_GATE, FeedForward
from loramux.engine.model.layer_kinds import (
    LayerKinds,
    RotatedLayers,
    all_rotated,
    all_windowed,
    full_by_pattern,
    full_every,
    linear_in_between,
    rotated_if_listed,
    rotated_if_windowed,
    windowed_above,
    windowed_unless_rotated,
    without_windows,
)
from loramux.engine.model.mixture_config import MixtureTraits

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
    """The traits of one architecture.

    `assumed` contains the defaults in transformers that differ from other architectures' defaults. `reads` names the
    fields of `config_fields.DECISIVE` that this architecture supports. `layer_kinds` applies if `config.json` has no
    `layer_types`. With `has_layer_types`, `layer_types` may differ from it. The field `qk_norm_field` turns the norms
    of q and k on or off; without it, they are always on. `qkv_bias`, `o_bias` and `mlp_bias` are True, False, or the
    name of the field that decides. With `window_theta_field`, windowed layers have their own rotary embedding, whose
    default theta is in that field. With `interleaved_rotary`, neighbouring channels are rotated together instead of
    channels from the two halves of a head. With `parallel_blocks`, attention and feed-forward read the same normed
    residual. With `gates_attention`, the query projection also yields a gate for each output of attention. With
    `has_delta_layers`, `layer_types` may name layers with a gated delta rule. With `has_layer_heads`, the heads of K
    and V can differ between layers with and without windows. With `has_value_norm`, V is normed without a weight. With
    `has_l2_norms`, so
    are q and k of rotated layers. With `has_chunks`, `layer_types` may name layers that see only tokens of their own
    chunk, and contexts end with the first chunk. With `scales_unrotated`, layers without rotation scale q by a factor
    that grows with the position. `dense_size_field` names the field with the inner size of a feed-forward without
    experts. The field `layer_theta_field`, if any, lists each layer's theta, or 0 for no rotation. With `has_altup`, a
    layer has several residuals. `o_name` is the projection of attention's output, and `final_norm` the norm after the
    last layer. With `has_layer_scalars`, a tensor scales each layer's output. Tensors whose names begin with one of
    `draft_tensors` predict further tokens, and the decoder does not read them.
    """

    layer_kinds: LayerKinds
    has_layer_types: bool = False
    rotated_layers: RotatedLayers = all_rotated
    assumed: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    norms: NormNames = PRE_NORMS
    norm_eps_field: str = "rms_norm_eps"
    norm_offset: float = 0.0
    has_layer_norms: bool = False
    has_norm_biases: bool = False
    qk_norm: str | None = None
    qk_norm_field: str | None = None
    qkv_bias: str | bool = "attention_bias"
    o_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = "mlp_bias"
    fused_qkv: bool = False
    feed_forward: FeedForward = GATED
    parallel_blocks: bool = False
    interleaved_rotary: bool = False
    activation_field: str = "hidden_act"
    gelu_means_tanh: bool = False
    scales_embedding: bool = False
    logit_scale_field: str | None = None
    logit_divisor_field: str | None = None
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "dynamic")
    rope_fields: tuple[str, ...] = ()
    window_theta_field: str | None = None
    mixture: MixtureTraits | None = None
    gates_attention: bool = False
    has_delta_layers: bool = False
    has_layer_heads: bool = False
    has_value_norm: bool = False
    has_l2_norms: bool = False
    has_chunks: bool = False
    scales_unrotated: bool = False
    dense_size_field: str = "intermediate_size"
    layer_theta_field: str | None = None
    has_norm_weights: bool = True
    o_name: str = "self_attn.o_proj"
    final_norm: str = "model.norm"
    has_head_bias: bool = False
    has_altup: bool = False
    has_layer_scalars: bool = False
    draft_tensors: tuple[str, ...] = ()
    has_sinks: bool = False
    clamps_gate: bool = False


_QWEN_ASSUMED: dict[str, Any] = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_GEMMA_ASSUMED: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GLM_ASSUMED: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_COHERE_ASSUMED: dict[str, Any] = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
QK_NORM = ("use_qk_norm", "qk_norm", "qk_layernorm")
_GEMMA_READS = ("attention_bias", "query_pre_attn_scalar", "final_logit_softcapping")

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(layer_kinds=without_windows, reads=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": Family(layer_kinds=all_windowed, assumed={"num_key_value_heads": 8, "sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(
        layer_kinds=windowed_above,
        has_layer_types=True,
        assumed=_QWEN_ASSUMED,
        reads=("attention_bias",),
        qkv_bias=True,
        o_bias=False,
    ),
    "Qwen3ForCausalLM": Family(
        layer_kinds=windowed_above,
        has_layer_types=True,
        assumed={**_QWEN_ASSUMED, "head_dim": 128},
        reads=("attention_bias", *QK_NORM),
        qk_norm=HEAD_WIDE,
    ),
    "Qwen3_5ForCausalLM": Family(
        layer_kinds=linear_in_between,
        has_layer_types=True,
        assumed={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            "attn_output_gate": True,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
        reads=("attention_bias", "attn_output_gate", "partial_rotary_factor"),
        norm_offset=1.0,
        qk_norm=HEAD_WIDE,
        mlp_bias=False,
        rope_fields=("mrope_section", "mrope_interleaved"),
        gates_attention=True,
        has_delta_layers=True,
    ),
    "Gemma2ForCausalLM": Family(
        layer_kinds=full_every(2),
        has_layer_types=True,
        assumed={**_GEMMA_ASSUMED, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        reads=(*_GEMMA_READS, "attn_logit_softcapping"),
        norms=GEMMA_NORMS,
        norm_offset=1.0,
        activation_field="hidden_activation",
        scales_embedding=True,
    ),
    # transformers has attn_logit_softcapping in Gemma 3's configuration, but its attention ignores it.
    "Gemma3ForCausalLM": Family(
        layer_kinds=full_by_pattern,
        has_layer_types=True,
        assumed={**_GEMMA_ASSUMED, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        reads=(*_GEMMA_READS, *QK_NORM),
        norms=GEMMA_NORMS,
        norm_offset=1.0,
        qk_norm=HEAD_WIDE,
        activation_field="hidden_activation",
        scales_embedding=True,
        window_theta_field="rope_local_base_freq",
    ),
    "Phi3ForCausalLM": Family(
        layer_kinds=all_windowed,
        assumed={"original_max_position_embeddings": 4096},
        reads=("partial_rotary_factor",),
        fused_qkv=True,
        feed_forward=FUSED_GATE,
        ropes=("default", "longrope"),
    ),
    "GraniteForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={"attention_multiplier": 1.0},
        reads=("attention_bias", "mlp_bias", *MULTIPLIERS),
        logit_divisor_field="logits_scaling",
    ),
    "HyperCLOVAXForCausalLM": Family(
        layer_kinds=without_windows,
        reads=("attention_bias", "mlp_bias", *MULTIPLIERS),
        norms=NormNames("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
        # Unlike Granite, this architecture multiplies the logits by the field.
        logit_scale_field="logits_scaling",
    ),
    "SmolLM3ForCausalLM": Family(
        layer_kinds=windowed_unless_rotated,
        has_layer_types=True,
        rotated_layers=rotated_if_listed,
        assumed={
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        reads=("attention_bias", "mlp_bias", "no_rope_layers"),
    ),
    "Olmo2ForCausalLM": Family(
        layer_kinds=without_windows,
        reads=("attention_bias",),
        norms=OUTPUT_NORMS,
        qk_norm=PROJECTION_WIDE,
    ),
    "Olmo3ForCausalLM": Family(
        layer_kinds=full_every(4),
        has_layer_types=True,
        assumed={"sliding_window": 4096, "rope_theta": 500000.0},
        reads=("attention_bias",),
        norms=OUTPUT_NORMS,
        qk_norm=PROJECTION_WIDE,
        window_theta_field="rope_theta",
    ),
    "Exaone4ForCausalLM": Family(
        layer_kinds=full_by_pattern,
        has_layer_types=True,
        rotated_layers=rotated_if_windowed,
        assumed={"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        norms=OUTPUT_NORMS,
        qk_norm=HEAD_WIDE,
    ),
    "MinistralForCausalLM": Family(
        layer_kinds=all_windowed,
        has_layer_types=True,
        assumed={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Ministral3ForCausalLM": Family(
        layer_kinds=all_windowed,
        assumed={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        ropes=("yarn",),
        rope_fields=("llama_4_scaling_beta", "max_position_embeddings"),
    ),
    "CwmForCausalLM": Family(
        layer_kinds=full_every(4, first=0),
        has_layer_types=True,
        assumed={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 8192,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e6,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "SeedOssForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        reads=("attention_bias", "mlp_bias"),
        o_bias="attention_out_bias",
    ),
    "GemmaForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={
            "head_dim": 256,
            "num_key_value_heads": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        reads=("attention_bias",),
        norm_offset=1.0,
        gelu_means_tanh=True,
        scales_embedding=True,
    ),
    "VaultGemmaForCausalLM": Family(
        layer_kinds=full_every(2),
        has_layer_types=True,
        assumed={**_GEMMA_ASSUMED, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        reads=(*_GEMMA_READS, "attn_logit_softcapping"),
        norms=NormNames("input_layernorm", None, "pre_feedforward_layernorm", None),
        norm_offset=1.0,
        activation_field="hidden_activation",
        scales_embedding=True,
    ),
    "HeliumForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={"num_key_value_heads": 20, "head_dim": 128, "rope_theta": 100000.0},
        reads=("attention_bias", "mlp_bias"),
        o_bias=False,
        interleaved_rotary=True,
    ),
    "Ernie4_5ForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        reads=("use_bias",),
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        interleaved_rotary=True,
    ),
    "GlmForCausalLM": Family(
        layer_kinds=without_windows,
        assumed=_GLM_ASSUMED,
        reads=("attention_bias", "partial_rotary_factor"),
        o_bias=False,
        feed_forward=FUSED_GATE,
        interleaved_rotary=True,
    ),
    "Glm4ForCausalLM": Family(
        layer_kinds=without_windows,
        assumed=_GLM_ASSUMED,
        reads=("attention_bias", "partial_rotary_factor"),
        norms=NormNames(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
        o_bias=False,
        feed_forward=FUSED_GATE,
        interleaved_rotary=True,
    ),
    "CohereForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={**_COHERE_ASSUMED, "rope_theta": 500000.0},
        reads=("attention_bias", "logit_scale"),
        norms=PARALLEL_NORMS,
        norm_eps_field="layer_norm_eps",
        has_layer_norms=True,
        parallel_blocks=True,
        interleaved_rotary=True,
        logit_scale_field="logit_scale",
    ),
    "Cohere2ForCausalLM": Family(
        layer_kinds=full_by_pattern,
        has_layer_types=True,
        rotated_layers=rotated_if_windowed,
        assumed={**_COHERE_ASSUMED, "sliding_window": 4096, "sliding_window_pattern": 4},
        reads=("attention_bias", "logit_scale"),
        norms=PARALLEL_NORMS,
        norm_eps_field="layer_norm_eps",
        has_layer_norms=True,
        parallel_blocks=True,
        interleaved_rotary=True,
        logit_scale_field="logit_scale",
    ),
    "StableLmForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        reads=("partial_rotary_factor",),
        norm_eps_field="layer_norm_eps",
        has_layer_norms=True,
        has_norm_biases=True,
        qkv_bias="use_qkv_bias",
        o_bias=False,
    ),
    "Starcoder2ForCausalLM": Family(
        layer_kinds=all_windowed,
        assumed={
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        reads=("use_bias",),
        norm_eps_field="norm_epsilon",
        has_layer_norms=True,
        has_norm_biases=True,
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        feed_forward=FeedForward(("mlp.c_fc",), "mlp.c_proj", has_gate=False),
    ),
    "OlmoForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={"layer_norm_eps": 1e-5},
        reads=("attention_bias", "clip_qkv"),
        norm_eps_field="layer_norm_eps",
        has_layer_norms=True,
        has_norm_weights=False,
        mlp_bias=False,
    ),
    "PhiForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        reads=("partial_rotary_factor",),
        norms=PARALLEL_NORMS,
        norm_eps_field="layer_norm_eps",
        has_layer_norms=True,
        has_norm_biases=True,
        parallel_blocks=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        feed_forward=FeedForward(("mlp.fc1",), "mlp.fc2", has_gate=False),
        o_name="self_attn.dense",
        final_norm="model.final_layernorm",
        has_head_bias=True,
    ),
    "ApertusForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={
            "hidden_act": "xielu",
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        reads=("attention_bias", *QK_NORM),
        norms=NormNames("attention_layernorm", None, "feedforward_layernorm", None),
        qk_norm=HEAD_WIDE,
        mlp_bias=False,
        feed_forward=WITHOUT_GATE,
    ),
    "GraniteSWAForCausalLM": Family(
        layer_kinds=full_every(4, first=0),
        has_layer_types=True,
        assumed={"attention_multiplier": 1.0, "sliding_window": 128, "tie_word_embeddings": True},
        reads=("attention_bias", "mlp_bias", *MULTIPLIERS),
        logit_divisor_field="logits_scaling",
        layer_theta_field="layer_rope_theta",
        has_sinks=True,
    ),
    "ArceeForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={"hidden_act": "relu2"},
        reads=("attention_bias", "mlp_bias"),
        feed_forward=WITHOUT_GATE,
    ),
    "NemotronForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        reads=("attention_bias", "mlp_bias", "partial_rotary_factor"),
        norm_eps_field="norm_eps",
        norm_offset=1.0,
        has_layer_norms=True,
        has_norm_biases=True,
        feed_forward=WITHOUT_GATE,
    ),
    "Jais2ForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={"hidden_act": "relu2", "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
        reads=("attention_bias", "mlp_bias"),
        norm_eps_field="layer_norm_eps",
        has_layer_norms=True,
        has_norm_biases=True,
        feed_forward=WITHOUT_GATE,
    ),
}
"""The supported architectures without experts, except Gemma 3n and Gemma 4, which are in `gemma4_families.py`."""
