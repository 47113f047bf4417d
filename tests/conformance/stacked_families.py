"""Random tiny mixtures of experts whose files stack the experts' weights, and their multimodal wrappers."""

from __future__ import annotations

from typing import Any

from transformers import (
    GraniteMoeSWAConfig,
    GraniteMoeSWAForCausalLM,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    PreTrainedModel,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests.conformance.further_families import MULTIPLIERS, MakeModel
from tests.conformance.hybrid_families import hybrid_text

_DEPTH = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 128}


def _llama4_text(shape: dict[str, Any]) -> dict[str, Any]:
    """The second layer is dense and has no positions. In it, q grows every 32 tokens."""
    return {
        **shape,
        "head_dim": 16,
        "intermediate_size_mlp": 176,
        "num_local_experts": 5,
        "moe_layers": [0, *range(2, shape["num_hidden_layers"])],
        "no_rope_layers": [1, 0, *[1] * (shape["num_hidden_layers"] - 2)],
        "floor_scale": 32,
        "attn_scale": 0.4,
        "pad_token_id": 0,
        # The routers' outputs are not normed, so larger weights would saturate them.
        "initializer_range": 0.15,
        "attn_implementation": "eager",
    }


def _llama4(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return Llama4ForCausalLM(Llama4TextConfig(**_llama4_text(shape)))


def _llama4_two_experts(shape: dict[str, Any], _: int) -> PreTrainedModel:
    """Two experts for each token, and no norms of q and k."""
    return Llama4ForCausalLM(Llama4TextConfig(**_llama4_text(shape), num_experts_per_tok=2, use_qk_norm=False))


def _llama4_multimodal(shape: dict[str, Any], _: int) -> PreTrainedModel:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    vision |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16}
    config = Llama4Config(  # type: ignore[call-arg]
        text_config=_llama4_text(shape),
        vision_config={**vision, "projector_output_dim": 16},
        attn_implementation="eager",
    )
    return Llama4ForConditionalGeneration(config)


def _qwen3_vl_moe(shape: dict[str, Any], _: int) -> PreTrainedModel:
    text = {
        **shape,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 56,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    vision = {**_DEPTH, "deepstack_visual_indexes": [0]}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision))


def _qwen3_5_moe_text(shape: dict[str, Any]) -> dict[str, Any]:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 56}
    return {**hybrid_text(shape), **experts, "shared_expert_intermediate_size": 72}


def _qwen3_5_moe(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**_qwen3_5_moe_text(shape)))


def _qwen3_5_moe_multimodal(shape: dict[str, Any], _: int) -> PreTrainedModel:
    config = Qwen3_5MoeConfig(text_config=_qwen3_5_moe_text(shape), vision_config=_DEPTH)
    return Qwen3_5MoeForConditionalGeneration(config)


def _granite_moe_swa(shape: dict[str, Any], window: int) -> PreTrainedModel:
    config = GraniteMoeSWAConfig(  # type: ignore[call-arg]
        **shape,
        **MULTIPLIERS,
        num_local_experts=5,
        shared_intermediate_size=72,
        sliding_window=window,
        attn_implementation="eager",
    )
    return GraniteMoeSWAForCausalLM(config)


STACKED_FAMILIES: dict[str, MakeModel] = {
    "llama4": _llama4,
    "llama4-two-experts": _llama4_two_experts,
    "llama4-multimodal": _llama4_multimodal,
    "granite_moe_swa": _granite_moe_swa,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_moe-multimodal": _qwen3_5_moe_multimodal,
}
