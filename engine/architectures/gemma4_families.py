"""The architectures of Gemma 3n and Gemma 4."""

from __future__ import annotations

from dataclasses import replace

from loramux.engine.architectures.expert_layers import every_layer_if_enabled
from loramux.engine.architectures.family import (
    GEMMA_NORMS,
    HEAD_WIDE,
    SCALED,
    STREAMS,
    AttentionTraits,
    Family,
    FeedForwardTraits,
    LayerTraits,
    NormTraits,
    RotaryTraits,
)
from loramux.engine.architectures.feed_forward import GATED
from loramux.engine.architectures.layer_kinds import full_every, full_every_sixth_and_last
from loramux.engine.architectures.mixture_config import (
    NUM_EXPERTS,
    BranchNorms,
    ExpertNames,
    MixtureTraits,
    SharedTraits,
)

_MIXTURE = MixtureTraits(
    names=ExpertNames(
        "router.proj",
        "experts",
        "gate_up_proj",
        None,
        "down_proj",
        "router.proj",
        "experts",
        stack_suffix="",
        router_scale="router.scale",
        expert_scales="router.per_expert_scale",
        branch_norms=BranchNorms(
            "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
        ),
    ),
    assumed_experts=0,
    layers=every_layer_if_enabled,
    size_field="moe_intermediate_size",
    top_k_field="top_k_experts",
    shared=SharedTraits(GATED, "intermediate_size"),
    always_normalizes=True,
)

_GEMMA4 = Family(
    layers=LayerTraits(full_every_sixth_and_last, may_differ=True, wiring=SCALED),
    assumed={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_multiplier": 1.0,
        "attention_k_eq_v": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "enable_moe_block": False,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        # rope_parameters takes precedence over this field.
        "rope_local_base_freq": 1e4,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    },
    reads=(
        "attention_bias",
        "attention_k_eq_v",
        "attention_multiplier",
        "enable_moe_block",
        "final_logit_softcapping",
        "global_head_dim",
        "hidden_size_per_layer_input",
        "num_kv_shared_layers",
        "per_layer_config",
        "use_bidirectional_attention",
        "use_double_wide_mlp",
        *NUM_EXPERTS,
    ),
    norms=NormTraits(GEMMA_NORMS),
    attention=AttentionTraits(qk_norm=HEAD_WIDE, has_layer_heads=True, has_value_norm=True),
    rotary=RotaryTraits(kinds=("default", "proportional"), window_theta_field="rope_local_base_freq"),
    feed_forward=FeedForwardTraits(activation_field="hidden_activation"),
    mixture=_MIXTURE,
    scales_embedding=True,
)

GEMMA4_FAMILIES: dict[str, Family] = {
    "Gemma3nForCausalLM": Family(
        layers=LayerTraits(full_every(5), may_differ=True, wiring=STREAMS),
        assumed={
            "num_key_value_heads": 2,
            "head_dim": 256,
            "attention_multiplier": 1.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "num_kv_shared_layers": 15,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "final_logit_softcapping": 30.0,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
            "laurel_rank": 64,
            "activation_sparsity_pattern": None,
        },
        reads=(
            "attention_bias",
            "attention_multiplier",
            "final_logit_softcapping",
            "hidden_size_per_layer_input",
            "num_kv_shared_layers",
        ),
        norms=NormTraits(GEMMA_NORMS),
        attention=AttentionTraits(qk_norm=HEAD_WIDE, has_value_norm=True),
        rotary=RotaryTraits(window_theta_field="rope_local_base_freq"),
        feed_forward=FeedForwardTraits(activation_field="hidden_activation"),
        scales_embedding=True,
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForCausalLM": replace(
        _GEMMA4,
        assumed={**_GEMMA4.assumed, "hidden_size_per_layer_input": 0, "sliding_window": 1024},
        reads=tuple(
            name
            for name in _GEMMA4.reads
            if name not in ("enable_moe_block", "hidden_size_per_layer_input", *NUM_EXPERTS)
        ),
    ),
}
