"""The supported architectures with mixtures of experts."""

from __future__ import annotations

from typing import Any

from loramux.engine.model.families import HEAD_WIDE, MULTIPLIERS, PROJECTION_WIDE, QK_NORM, Family
from loramux.engine.model.layer_kinds import all_windowed, all_windowed_if_used, windowed_in_turn, without_windows
from loramux.engine.model.mixture_config import ExpertNames, MixtureTraits

_NUM_EXPERTS = ("num_experts", "num_local_experts")
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

MIXTURE_FAMILIES: dict[str, Family] = {
    "Qwen2MoeForCausalLM": Family(
        layer_kinds=windowed_in_turn,
        has_layer_types=True,
        assumed={
            **_QWEN_ASSUMED,
            "num_key_value_heads": 16,
            "max_window_layers": 28,
            "qkv_bias": True,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        reads=_NUM_EXPERTS,
        qkv_bias="qkv_bias",
        o_bias=False,
        mixture=MixtureTraits(
            _QWEN_NAMES,
            assumed_experts=60,
            size_field="moe_intermediate_size",
            shared_size_field="shared_expert_intermediate_size",
            has_dense_layers=True,
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        layer_kinds=all_windowed_if_used,
        assumed={
            **_QWEN_ASSUMED,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        reads=("attention_bias", *QK_NORM, *_NUM_EXPERTS),
        qk_norm=HEAD_WIDE,
        mixture=MixtureTraits(
            _QWEN_NAMES, assumed_experts=128, size_field="moe_intermediate_size", has_dense_layers=True
        ),
    ),
    "MixtralForCausalLM": Family(
        layer_kinds=all_windowed,
        assumed={"num_key_value_heads": 8, "rope_theta": 1e6, "num_experts_per_tok": 2},
        reads=_NUM_EXPERTS,
        mixture=MixtureTraits(_MIXTRAL_NAMES, assumed_experts=8, always_normalizes=True),
    ),
    "OlmoeForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={"num_experts_per_tok": 8},
        reads=("attention_bias", *_NUM_EXPERTS),
        qk_norm=PROJECTION_WIDE,
        mixture=MixtureTraits(_QWEN_NAMES, assumed_experts=64),
    ),
    "GraniteMoeForCausalLM": Family(
        layer_kinds=without_windows,
        assumed={"attention_multiplier": 1.0, "num_experts_per_tok": 2},
        reads=("attention_bias", *MULTIPLIERS, *_NUM_EXPERTS),
        logit_divisor_field="logits_scaling",
        mixture=MixtureTraits(_GRANITE_NAMES, assumed_experts=8, always_normalizes=True),
    ),
}
