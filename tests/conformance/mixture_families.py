"""Random tiny models with mixtures of experts."""

from __future__ import annotations

from typing import Any

from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.conformance.corrected_families import CORRECTED_FAMILIES
from tests.conformance.further_families import MakeModel
from tests.conformance.gemma4_families import GEMMA4_MIXTURES
from tests.conformance.stacked_families import STACKED_FAMILIES


def _qwen2_moe(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """A Qwen2-MoE with shared experts, a dense layer, and layers with and without a window."""
    config = Qwen2MoeConfig(  # type: ignore[call-arg]
        **shape,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=72,
        shared_expert_intermediate_size=88,
        mlp_only_layers=[0],
        use_sliding_window=True,
        sliding_window=window,
        attn_implementation="eager",
    )
    return Qwen2MoeForCausalLM(config)


def _qwen3_moe(shape: dict[str, Any], _: int) -> PreTrainedModel:
    """A Qwen3-MoE with a dense layer."""
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        **shape,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=56,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config)


def _mixtral(shape: dict[str, Any], window: int) -> PreTrainedModel:
    config = MixtralConfig(**shape, num_local_experts=4, sliding_window=window, attn_implementation="eager")  # type: ignore[call-arg]
    return MixtralForCausalLM(config)


def _olmoe(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return OlmoeForCausalLM(OlmoeConfig(**shape, num_experts=8, num_experts_per_tok=4, pad_token_id=0))


def _granite_moe(shape: dict[str, Any], _: int) -> PreTrainedModel:
    config = GraniteMoeConfig(
        **shape,
        num_local_experts=5,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=2.5,
        tie_word_embeddings=True,
    )
    return GraniteMoeForCausalLM(config)


MIXTURE_FAMILIES: dict[str, MakeModel] = {
    "qwen2-moe": _qwen2_moe,
    "granite-moe": _granite_moe,
    "qwen3-moe": _qwen3_moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    **CORRECTED_FAMILIES,
    **GEMMA4_MIXTURES,
    **STACKED_FAMILIES,
}

FREQUENT_MIXTURES = ("qwen2-moe", "gpt-oss")
"""Families for every test run: one with a dense layer and shared experts, and one with stacked experts that have
biases, and with attention sinks."""
