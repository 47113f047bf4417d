"""The supported architectures with mixtures of experts, except Gemma 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loramux.engine.architectures.draft_head import GLM_HEAD
from loramux.engine.architectures.expert_layers import (
    after_dense,
    by_interval,
    by_step,
    every_layer,
    every_layer_if_any_experts,
    listed_or_after_dense,
    listed_or_every_step,
)
from loramux.engine.architectures.families import FAMILIES, MULTIPLIERS, QK_NORM
from loramux.engine.architectures.family import (
    HEAD_WIDE,
    OUTPUT_NORMS,
    PROJECTION_WIDE,
    WEIGHTLESS,
    AttentionTraits,
    Family,
    FeedForwardTraits,
    HeadTraits,
    LayerTraits,
    NormTraits,
    RotaryTraits,
)
from loramux.engine.architectures.feed_forward import FeedForwardNames
from loramux.engine.architectures.layer_kinds import (
    CHUNKED,
    all_recurrent,
    all_windowed,
    all_windowed_if_used,
    chunked_if_rotated,
    full_by_pattern,
    full_every,
    rotated_if_listed,
    rotated_if_rope,
    rotated_if_windowed,
    windowed_from,
    windowed_in_turn,
)
from loramux.engine.architectures.mixture_config import NUM_EXPERTS, ExpertNames, MixtureTraits, SharedTraits

_QWEN_ASSUMED: dict[str, Any] = {"sliding_window": 4096, "use_sliding_window": False}
_QWEN_NAMES = ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj", "mlp.gate", "mlp.experts")
_MIXTRAL_NAMES = ExpertNames(
    "block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2", "mlp.gate", "mlp.experts"
)
_GRANITE_NAMES = ExpertNames(
    "block_sparse_moe.router.layer",
    "block_sparse_moe",
    "input_linear",
    None,
    "output_linear",
    "block_sparse_moe.router",
    "block_sparse_moe.experts",
)
_GLM_NAMES = replace(_QWEN_NAMES, choice_bias="mlp.gate.e_score_correction_bias")

_GPT_OSS_NAMES = ExpertNames(
    "mlp.router", "mlp.experts", "gate_up_proj", None, "down_proj", "mlp.router", "mlp.experts", has_biases=True
)

_SHARED_EXPERT = FeedForwardNames(
    ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), "mlp.shared_expert.down_proj"
)
_SHARED_EXPERTS = FeedForwardNames(
    ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), "mlp.shared_experts.down_proj"
)
_LLAMA4_DENSE = FeedForwardNames(("feed_forward.gate_proj", "feed_forward.up_proj"), "feed_forward.down_proj")
_LLAMA4_SHARED = FeedForwardNames(
    ("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    "feed_forward.shared_expert.down_proj",
)
_SHARED_MLP = FeedForwardNames(("shared_mlp.input_linear",), "shared_mlp.output_linear")

_GLM_MIXTURE = MixtureTraits(
    names=_GLM_NAMES,
    assumed_experts=128,
    layers=after_dense,
    size_field="moe_intermediate_size",
    shared=SharedTraits(_SHARED_EXPERTS, "moe_intermediate_size", "n_shared_experts"),
    has_sigmoid=True,
    has_groups=True,
)

_GRANITE_MIXTURE = MixtureTraits(names=_GRANITE_NAMES, assumed_experts=8, always_normalizes=True)
_GRANITE = Family(
    assumed={"attention_multiplier": 1.0, "num_experts_per_tok": 2},
    reads=("attention_bias", *MULTIPLIERS, *NUM_EXPERTS),
    mixture=_GRANITE_MIXTURE,
    head=HeadTraits(divisor_field="logits_scaling"),
)

MIXTURE_FAMILIES: dict[str, Family] = {
    "Qwen2MoeForCausalLM": Family(
        layers=LayerTraits(windowed_in_turn, may_differ=True),
        assumed={
            **_QWEN_ASSUMED,
            "num_key_value_heads": 16,
            "max_window_layers": 28,
            "qkv_bias": True,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        reads=NUM_EXPERTS,
        attention=AttentionTraits(qkv_bias="qkv_bias", o_bias=False),
        mixture=MixtureTraits(
            names=_QWEN_NAMES,
            assumed_experts=60,
            layers=by_step,
            size_field="moe_intermediate_size",
            shared=SharedTraits(_SHARED_EXPERT, "shared_expert_intermediate_size", gate="mlp.shared_expert_gate"),
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        layers=LayerTraits(all_windowed_if_used),
        assumed={
            **_QWEN_ASSUMED,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        reads=("attention_bias", *QK_NORM, *NUM_EXPERTS),
        attention=AttentionTraits(qk_norm=HEAD_WIDE),
        mixture=MixtureTraits(
            names=_QWEN_NAMES, assumed_experts=128, layers=by_step, size_field="moe_intermediate_size"
        ),
    ),
    "Qwen3_5MoeForCausalLM": replace(
        FAMILIES["Qwen3_5ForCausalLM"],
        assumed={
            **FAMILIES["Qwen3_5ForCausalLM"].assumed,
            "num_key_value_heads": 2,
            # Unused, because no layer is dense.
            "intermediate_size": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        reads=(*FAMILIES["Qwen3_5ForCausalLM"].reads, *NUM_EXPERTS),
        mixture=MixtureTraits(
            names=_QWEN_NAMES,
            assumed_experts=256,
            size_field="moe_intermediate_size",
            shared=SharedTraits(_SHARED_EXPERT, "shared_expert_intermediate_size", gate="mlp.shared_expert_gate"),
            always_normalizes=True,
        ),
    ),
    "MixtralForCausalLM": Family(
        layers=LayerTraits(all_windowed),
        assumed={"num_key_value_heads": 8, "rope_theta": 1e6, "num_experts_per_tok": 2},
        reads=NUM_EXPERTS,
        mixture=MixtureTraits(names=_MIXTRAL_NAMES, assumed_experts=8, always_normalizes=True),
    ),
    "OlmoeForCausalLM": Family(
        assumed={"num_experts_per_tok": 8},
        reads=("attention_bias", *NUM_EXPERTS),
        attention=AttentionTraits(qk_norm=PROJECTION_WIDE),
        mixture=MixtureTraits(names=_QWEN_NAMES, assumed_experts=64),
    ),
    "FlexOlmoForCausalLM": Family(
        assumed={"rope_theta": 500000.0, "num_experts_per_tok": 5},
        reads=("attention_bias", *NUM_EXPERTS),
        norms=NormTraits(OUTPUT_NORMS),
        attention=AttentionTraits(qk_norm=PROJECTION_WIDE),
        mixture=MixtureTraits(names=_QWEN_NAMES, assumed_experts=7),
    ),
    "GraniteMoeForCausalLM": _GRANITE,
    "GraniteMoeSharedForCausalLM": replace(
        _GRANITE,
        assumed={**_GRANITE.assumed, "shared_intermediate_size": 0},
        mixture=replace(_GRANITE_MIXTURE, shared=SharedTraits(_SHARED_MLP, "shared_intermediate_size")),
    ),
    # Granite 4 without Mamba layers: Micro, 350M and 1B, which have no experts either.
    "GraniteMoeHybridForCausalLM": replace(
        _GRANITE,
        layers=LayerTraits(all_recurrent, may_differ=True),
        assumed={**_GRANITE.assumed, "shared_intermediate_size": 1024},
        rotary=RotaryTraits(layers=rotated_if_rope),
        feed_forward=FeedForwardTraits(_SHARED_MLP, bias=False, size_field="shared_intermediate_size"),
        mixture=replace(
            _GRANITE_MIXTURE,
            layers=every_layer_if_any_experts,
            shared=SharedTraits(_SHARED_MLP, "shared_intermediate_size"),
        ),
    ),
    "GraniteMoeSWAForCausalLM": replace(
        _GRANITE,
        layers=LayerTraits(full_every(4, first=0), may_differ=True),
        assumed={**_GRANITE.assumed, "shared_intermediate_size": 0, "sliding_window": 128},
        attention=AttentionTraits(has_sinks=True),
        rotary=RotaryTraits(layer_theta_field="layer_rope_theta"),
        mixture=replace(
            _GRANITE_MIXTURE,
            names=ExpertNames(
                "block_sparse_moe.router",
                "block_sparse_moe.experts",
                "gate_up_proj",
                None,
                "down_proj",
                "block_sparse_moe.router",
                "block_sparse_moe.experts",
                stack_suffix="",
            ),
            shared=SharedTraits(_SHARED_MLP, "shared_intermediate_size"),
        ),
    ),
    "Glm4MoeForCausalLM": Family(
        assumed={
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
        },
        reads=("attention_bias", "partial_rotary_factor", "n_shared_experts", *QK_NORM, *NUM_EXPERTS),
        attention=AttentionTraits(qk_norm=HEAD_WIDE, qk_norm_field="use_qk_norm", o_bias=False),
        mixture=_GLM_MIXTURE,
        draft_head=GLM_HEAD,
    ),
    "SolarOpenForCausalLM": Family(
        assumed={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1e6,
            # Unused, because no layer is dense.
            "intermediate_size": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
        reads=("attention_bias", "partial_rotary_factor", "n_shared_experts", *NUM_EXPERTS),
        attention=AttentionTraits(o_bias=False),
        mixture=replace(_GLM_MIXTURE, layers=every_layer),
    ),
    "Dots1ForCausalLM": Family(
        layers=LayerTraits(windowed_from, may_differ=True),
        assumed={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0,
        },
        reads=("attention_bias", "n_shared_experts", *QK_NORM, *NUM_EXPERTS),
        attention=AttentionTraits(qk_norm=HEAD_WIDE),
        mixture=_GLM_MIXTURE,
    ),
    "ExaoneMoeForCausalLM": Family(
        layers=LayerTraits(full_by_pattern, may_differ=True),
        assumed={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        reads=NUM_EXPERTS,
        attention=AttentionTraits(qk_norm=HEAD_WIDE),
        rotary=RotaryTraits(layers=rotated_if_windowed),
        mixture=replace(
            _GLM_MIXTURE,
            names=replace(_QWEN_NAMES, choice_bias="mlp.e_score_correction_bias"),
            assumed_experts=64,
            layers=listed_or_after_dense,
            shared=SharedTraits(_SHARED_EXPERTS, "moe_intermediate_size", "num_shared_experts"),
        ),
        draft_tensors=("mtp.",),
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        assumed={
            "num_key_value_heads": 4,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        # use_bias is refused, because it also gives the head a bias.
        reads=NUM_EXPERTS,
        rotary=RotaryTraits(is_interleaved=True),
        mixture=MixtureTraits(
            names=replace(_QWEN_NAMES, choice_bias="mlp.moe_statics.e_score_correction_bias", choice_bias_in_row=True),
            assumed_experts=64,
            layers=by_interval,
            size_field="moe_intermediate_size",
            top_k_field="moe_k",
            shared=SharedTraits(_SHARED_EXPERTS, "moe_intermediate_size", "moe_num_shared_experts"),
            always_normalizes=True,
            min_total_field="moe_norm_min",
        ),
        draft_tensors=("model.mtp_", "mtp_"),
    ),
    "MiniMaxM2ForCausalLM": Family(
        assumed={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6, "num_experts_per_tok": 8},
        reads=("partial_rotary_factor", "rotary_dim", *QK_NORM, *NUM_EXPERTS),
        attention=AttentionTraits(qk_norm=PROJECTION_WIDE),
        mixture=MixtureTraits(
            names=replace(_MIXTRAL_NAMES, choice_bias="block_sparse_moe.e_score_correction_bias"),
            assumed_experts=256,
            always_normalizes=True,
            has_sigmoid=True,
        ),
        draft_tensors=("model.mtp_",),
    ),
    "MellumForCausalLM": Family(
        layers=LayerTraits(may_differ=True),
        assumed={
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_theta": 500000.0,
            "window_rope_theta": 10000.0,
            "sliding_window": 1024,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
            "first_k_dense_replace": 0,
        },
        reads=("attention_bias", *NUM_EXPERTS),
        attention=AttentionTraits(qk_norm=HEAD_WIDE),
        # Each kind of layer has its own entry in rope_parameters. This field is the default for windowed layers.
        rotary=RotaryTraits(window_theta_field="window_rope_theta"),
        mixture=MixtureTraits(
            names=_QWEN_NAMES,
            assumed_experts=64,
            layers=listed_or_after_dense,
            size_field="moe_intermediate_size",
        ),
        draft_tensors=("mtp.",),
    ),
    # Contexts are limited to one chunk.
    "Llama4ForCausalLM": Family(
        layers=LayerTraits(chunked_if_rotated, may_differ=True, other=CHUNKED),
        assumed={
            "num_key_value_heads": 8,
            "rope_theta": 500000.0,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "intermediate_size_mlp": 16384,
            "interleave_moe_layer_step": 1,
            "num_experts_per_tok": 1,
        },
        reads=(
            "attention_bias",
            "attention_chunk_size",
            "attn_temperature_tuning",
            "no_rope_layers",
            *QK_NORM,
            *NUM_EXPERTS,
        ),
        attention=AttentionTraits(qk_norm=WEIGHTLESS, qk_norm_field="use_qk_norm", scales_unrotated=True),
        rotary=RotaryTraits(layers=rotated_if_listed, is_interleaved=True),
        feed_forward=FeedForwardTraits(_LLAMA4_DENSE, size_field="intermediate_size_mlp"),
        mixture=MixtureTraits(
            names=ExpertNames(
                "feed_forward.router",
                "feed_forward.experts",
                "gate_up_proj",
                None,
                "down_proj",
                "feed_forward.router",
                "feed_forward.experts",
                stack_suffix="",
                is_transposed=True,
                takes_adapters=False,
            ),
            assumed_experts=16,
            layers=listed_or_every_step,
            shared=SharedTraits(_LLAMA4_SHARED, "intermediate_size"),
            has_sigmoid=True,
            scales_input=True,
        ),
    ),
    "GptOssForCausalLM": Family(
        layers=LayerTraits(full_every(2), may_differ=True),
        assumed={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        reads=("attention_bias", *NUM_EXPERTS),
        attention=AttentionTraits(has_sinks=True),
        feed_forward=FeedForwardTraits(clamps_gate=True),
        mixture=MixtureTraits(names=_GPT_OSS_NAMES, assumed_experts=128, always_normalizes=True),
    ),
}

INNER_FAMILIES: dict[str, Family] = {
    "Qwen3VLMoeText": Family(
        assumed={
            "num_key_value_heads": 16,
            "rope_theta": 500000.0,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
        reads=("attention_bias", *QK_NORM, *NUM_EXPERTS),
        attention=AttentionTraits(qk_norm=HEAD_WIDE),
        mixture=MixtureTraits(
            names=_QWEN_NAMES,
            assumed_experts=60,
            layers=by_step,
            size_field="moe_intermediate_size",
            always_normalizes=True,
        ),
    ),
}
"""Text decoders that exist only inside multimodal architectures."""
