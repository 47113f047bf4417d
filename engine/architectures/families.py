"""Traits that `config.json` does not state, for architectures without experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loramux.engine.architectures.draft_head import MIMO_HEAD
from loramux.engine.architectures.family import (
    GEMMA_NORMS,
    HEAD_WIDE,
    OUTPUT_NORMS,
    PARALLEL,
    PARALLEL_NORMS,
    PROJECTION_WIDE,
    ROTATED,
    AttentionTraits,
    Family,
    FeedForwardTraits,
    HeadTraits,
    LayerTraits,
    NormNames,
    NormTraits,
    RotaryTraits,
)
from loramux.engine.architectures.feed_forward import FUSED_GATE, WITHOUT_GATE, FeedForwardNames
from loramux.engine.architectures.layer_kinds import (
    LINEAR,
    all_windowed,
    full_by_pattern,
    full_every,
    linear_in_between,
    rotated_if_listed,
    rotated_if_windowed,
    windowed_above,
    windowed_unless_rotated,
)

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
_COHERE_ASSUMED: dict[str, Any] = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
QK_NORM = ("use_qk_norm", "qk_norm", "qk_layernorm")
_GEMMA_READS = ("attention_bias", "query_pre_attn_scalar", "final_logit_softcapping")

_QWEN2 = Family(
    layers=LayerTraits(windowed_above, may_differ=True),
    assumed=_QWEN_ASSUMED,
    reads=("attention_bias",),
    attention=AttentionTraits(qkv_bias=True, o_bias=False),
)
_GEMMA2 = Family(
    layers=LayerTraits(full_every(2), may_differ=True),
    assumed={**_GEMMA_ASSUMED, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    reads=(*_GEMMA_READS, "attn_logit_softcapping"),
    norms=NormTraits(GEMMA_NORMS, offset=1.0),
    feed_forward=FeedForwardTraits(activation_field="hidden_activation"),
    scales_embedding=True,
)
_GLM = Family(
    assumed={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    reads=("attention_bias", "partial_rotary_factor"),
    attention=AttentionTraits(o_bias=False),
    rotary=RotaryTraits(is_interleaved=True),
    feed_forward=FeedForwardTraits(FUSED_GATE),
)

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        reads=("attention_bias", "mlp_bias"),
    ),
    "MistralForCausalLM": Family(
        layers=LayerTraits(all_windowed),
        assumed={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": _QWEN2,
    # The code of this architecture is not in transformers. Its base is a Qwen 2.
    "MiMoForCausalLM": replace(_QWEN2, draft_tensors=("model.mtp_layers.",), draft_head=MIMO_HEAD),
    "Qwen3ForCausalLM": Family(
        layers=LayerTraits(windowed_above, may_differ=True),
        assumed={**_QWEN_ASSUMED, "head_dim": 128},
        reads=("attention_bias", *QK_NORM),
        attention=AttentionTraits(qk_norm=HEAD_WIDE),
    ),
    "Qwen3_5ForCausalLM": Family(
        layers=LayerTraits(linear_in_between, may_differ=True, other=LINEAR),
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
        norms=NormTraits(offset=1.0),
        attention=AttentionTraits(qk_norm=HEAD_WIDE, has_gates=True),
        rotary=RotaryTraits(fields=("mrope_section", "mrope_interleaved")),
        feed_forward=FeedForwardTraits(bias=False),
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    # transformers has attn_logit_softcapping in Gemma 3's configuration, but its attention ignores it.
    "Gemma3ForCausalLM": Family(
        layers=LayerTraits(full_by_pattern, may_differ=True),
        assumed={**_GEMMA_ASSUMED, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        reads=(*_GEMMA_READS, *QK_NORM),
        norms=NormTraits(GEMMA_NORMS, offset=1.0),
        attention=AttentionTraits(qk_norm=HEAD_WIDE),
        rotary=RotaryTraits(window_theta_field="rope_local_base_freq"),
        feed_forward=FeedForwardTraits(activation_field="hidden_activation"),
        scales_embedding=True,
    ),
    "Phi3ForCausalLM": Family(
        layers=LayerTraits(all_windowed),
        assumed={"original_max_position_embeddings": 4096},
        reads=("partial_rotary_factor",),
        attention=AttentionTraits(fused_qkv=True),
        rotary=RotaryTraits(kinds=("default", "longrope")),
        feed_forward=FeedForwardTraits(FUSED_GATE),
    ),
    "GraniteForCausalLM": Family(
        assumed={"attention_multiplier": 1.0},
        reads=("attention_bias", "mlp_bias", *MULTIPLIERS),
        head=HeadTraits(divisor_field="logits_scaling"),
    ),
    "HyperCLOVAXForCausalLM": Family(
        reads=("attention_bias", "mlp_bias", *MULTIPLIERS),
        norms=NormTraits(NormNames("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")),
        # Unlike Granite, this architecture multiplies the logits by the field.
        head=HeadTraits(scale_field="logits_scaling"),
    ),
    "SmolLM3ForCausalLM": Family(
        layers=LayerTraits(windowed_unless_rotated, may_differ=True),
        assumed={
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        reads=("attention_bias", "mlp_bias", "no_rope_layers"),
        rotary=RotaryTraits(layers=rotated_if_listed),
    ),
    "Olmo2ForCausalLM": Family(
        reads=("attention_bias",),
        norms=NormTraits(OUTPUT_NORMS),
        attention=AttentionTraits(qk_norm=PROJECTION_WIDE),
    ),
    "Olmo3ForCausalLM": Family(
        layers=LayerTraits(full_every(4), may_differ=True),
        assumed={"sliding_window": 4096, "rope_theta": 500000.0},
        reads=("attention_bias",),
        norms=NormTraits(OUTPUT_NORMS),
        attention=AttentionTraits(qk_norm=PROJECTION_WIDE),
        rotary=RotaryTraits(window_theta_field="rope_theta"),
    ),
    "Exaone4ForCausalLM": Family(
        layers=LayerTraits(full_by_pattern, may_differ=True),
        assumed={"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        norms=NormTraits(OUTPUT_NORMS),
        attention=AttentionTraits(qk_norm=HEAD_WIDE),
        rotary=RotaryTraits(layers=rotated_if_windowed),
    ),
    "MinistralForCausalLM": Family(
        layers=LayerTraits(all_windowed, may_differ=True),
        assumed={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Ministral3ForCausalLM": Family(
        layers=LayerTraits(all_windowed),
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
        rotary=RotaryTraits(kinds=("yarn",), fields=("llama_4_scaling_beta", "max_position_embeddings")),
    ),
    "CwmForCausalLM": Family(
        layers=LayerTraits(full_every(4, first=0), may_differ=True),
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
    "HunYuanDenseV1ForCausalLM": Family(
        assumed={"rms_norm_eps": 1e-5},
        # Published configurations say that there is one expert.
        reads=("attention_bias", "num_experts", *QK_NORM),
        attention=AttentionTraits(qk_norm=ROTATED),
        rotary=RotaryTraits(
            kinds=("default", "dynamic"), fields=("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        ),
        feed_forward=FeedForwardTraits(bias=False),
    ),
    "SeedOssForCausalLM": Family(
        assumed={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        reads=("attention_bias", "mlp_bias"),
        attention=AttentionTraits(o_bias="attention_out_bias"),
    ),
    "GemmaForCausalLM": Family(
        assumed={
            "head_dim": 256,
            "num_key_value_heads": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        reads=("attention_bias",),
        norms=NormTraits(offset=1.0),
        feed_forward=FeedForwardTraits(gelu_means_tanh=True),
        scales_embedding=True,
    ),
    "VaultGemmaForCausalLM": replace(
        _GEMMA2, norms=NormTraits(NormNames("input_layernorm", None, "pre_feedforward_layernorm", None), offset=1.0)
    ),
    "HeliumForCausalLM": Family(
        assumed={"num_key_value_heads": 20, "head_dim": 128, "rope_theta": 100000.0},
        reads=("attention_bias", "mlp_bias"),
        attention=AttentionTraits(o_bias=False),
        rotary=RotaryTraits(is_interleaved=True),
    ),
    "Ernie4_5ForCausalLM": Family(
        assumed={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        reads=("use_bias",),
        attention=AttentionTraits(qkv_bias="use_bias", o_bias="use_bias"),
        rotary=RotaryTraits(is_interleaved=True),
        feed_forward=FeedForwardTraits(bias="use_bias"),
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(
        _GLM,
        norms=NormTraits(
            NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
        ),
    ),
    "CohereForCausalLM": Family(
        layers=LayerTraits(wiring=PARALLEL),
        assumed={**_COHERE_ASSUMED, "rope_theta": 500000.0},
        reads=("attention_bias", "logit_scale"),
        norms=NormTraits(PARALLEL_NORMS, eps_field="layer_norm_eps", subtracts_mean=True),
        rotary=RotaryTraits(is_interleaved=True),
        head=HeadTraits(scale_field="logit_scale"),
    ),
    "Cohere2ForCausalLM": Family(
        layers=LayerTraits(full_by_pattern, may_differ=True, wiring=PARALLEL),
        assumed={**_COHERE_ASSUMED, "sliding_window": 4096, "sliding_window_pattern": 4},
        reads=("attention_bias", "logit_scale"),
        norms=NormTraits(PARALLEL_NORMS, eps_field="layer_norm_eps", subtracts_mean=True),
        rotary=RotaryTraits(layers=rotated_if_windowed, is_interleaved=True),
        head=HeadTraits(scale_field="logit_scale"),
    ),
    "StableLmForCausalLM": Family(
        assumed={"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        reads=("partial_rotary_factor",),
        norms=NormTraits(eps_field="layer_norm_eps", subtracts_mean=True, has_biases=True),
        attention=AttentionTraits(qkv_bias="use_qkv_bias", o_bias=False),
    ),
    "Starcoder2ForCausalLM": Family(
        layers=LayerTraits(all_windowed),
        assumed={
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        reads=("use_bias",),
        norms=NormTraits(eps_field="norm_epsilon", subtracts_mean=True, has_biases=True),
        attention=AttentionTraits(qkv_bias="use_bias", o_bias="use_bias"),
        feed_forward=FeedForwardTraits(FeedForwardNames(("mlp.c_fc",), "mlp.c_proj", has_gate=False), bias="use_bias"),
    ),
    "OlmoForCausalLM": Family(
        assumed={"layer_norm_eps": 1e-5},
        reads=("attention_bias", "clip_qkv"),
        norms=NormTraits(eps_field="layer_norm_eps", subtracts_mean=True, has_weights=False),
        feed_forward=FeedForwardTraits(bias=False),
    ),
    "PhiForCausalLM": Family(
        layers=LayerTraits(wiring=PARALLEL),
        assumed={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        reads=("partial_rotary_factor",),
        norms=NormTraits(
            PARALLEL_NORMS,
            eps_field="layer_norm_eps",
            subtracts_mean=True,
            has_biases=True,
            final="model.final_layernorm",
        ),
        attention=AttentionTraits(qkv_bias=True, o_bias=True, o_name="self_attn.dense"),
        feed_forward=FeedForwardTraits(FeedForwardNames(("mlp.fc1",), "mlp.fc2", has_gate=False), bias=True),
        head=HeadTraits(has_bias=True),
    ),
    "ApertusForCausalLM": Family(
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
        norms=NormTraits(NormNames("attention_layernorm", None, "feedforward_layernorm", None)),
        attention=AttentionTraits(qk_norm=HEAD_WIDE),
        feed_forward=FeedForwardTraits(WITHOUT_GATE, bias=False),
    ),
    "GraniteSWAForCausalLM": Family(
        layers=LayerTraits(full_every(4, first=0), may_differ=True),
        assumed={"attention_multiplier": 1.0, "sliding_window": 128, "tie_word_embeddings": True},
        reads=("attention_bias", "mlp_bias", *MULTIPLIERS),
        attention=AttentionTraits(has_sinks=True),
        rotary=RotaryTraits(layer_theta_field="layer_rope_theta"),
        head=HeadTraits(divisor_field="logits_scaling"),
    ),
    "ArceeForCausalLM": Family(
        assumed={"hidden_act": "relu2"},
        reads=("attention_bias", "mlp_bias"),
        feed_forward=FeedForwardTraits(WITHOUT_GATE),
    ),
    "NemotronForCausalLM": Family(
        assumed={"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        reads=("attention_bias", "mlp_bias", "partial_rotary_factor"),
        norms=NormTraits(eps_field="norm_eps", offset=1.0, subtracts_mean=True, has_biases=True),
        feed_forward=FeedForwardTraits(WITHOUT_GATE),
    ),
    "Jais2ForCausalLM": Family(
        assumed={"hidden_act": "relu2", "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
        reads=("attention_bias", "mlp_bias"),
        norms=NormTraits(eps_field="layer_norm_eps", subtracts_mean=True, has_biases=True),
        feed_forward=FeedForwardTraits(WITHOUT_GATE),
    ),
}
"""The supported architectures without experts, except Gemma 3n and Gemma 4, which are in `gemma4_families.py`."""
