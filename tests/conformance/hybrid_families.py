"""Random tiny models in which most layers keep a state instead of K and V."""

from __future__ import annotations

from typing import Any

from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from tests.conformance.further_families import MakeModel


def hybrid_text(shape: dict[str, Any]) -> dict[str, Any]:
    """Attention in the second layer only. Two value heads share a key head, and keys are longer than values."""
    kinds = ["full_attention" if layer == 1 else "linear_attention" for layer in range(shape["num_hidden_layers"])]
    return {
        **shape,
        # With larger weights, the rule by chunks, with which transformers computes prompts, is less exact than loramux.
        "initializer_range": 0.1,
        "head_dim": 32,
        "layer_types": kinds,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }


def _qwen3_5(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**hybrid_text(shape), tie_word_embeddings=True))


def _qwen3_5_multimodal(shape: dict[str, Any], _: int) -> PreTrainedModel:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 128}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=hybrid_text(shape), vision_config=vision))


HYBRID_FAMILIES: dict[str, MakeModel] = {"qwen3_5": _qwen3_5, "qwen3_5-multimodal": _qwen3_5_multimodal}
