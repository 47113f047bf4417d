"""Random tiny models of Gemma 3n and Gemma 4."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    Gemma3nConfig,
    Gemma3nForCausalLM,
    Gemma3nForConditionalGeneration,
    Gemma3nTextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    PreTrainedModel,
)
from transformers.models.gemma3n import modeling_gemma3n

from tests.conformance.further_families import MakeModel


def _text(shape: dict[str, Any], window: int, num_layers: int) -> dict[str, Any]:
    """Layers that alternate between a window and none. Their heads differ in size."""
    return {
        **shape,
        "num_hidden_layers": num_layers,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": window,
        "pad_token_id": 0,
        # Scores are not divided by the size of a head, so larger weights would make attention choose single tokens.
        "initializer_range": 0.15,
        "attn_implementation": "eager",
    }


def _small(shape: dict[str, Any], window: int) -> dict[str, Any]:
    """Per-layer embeddings, and two layers that read the K and V of earlier layers and have wider feed-forwards."""
    inputs = {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": shape["vocab_size"]}
    return {**_text(shape, window, 6), **inputs, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}


def _large(shape: dict[str, Any], window: int) -> dict[str, Any]:
    """Layers without a window use K as V. Their K is half as wide as in the other layers."""
    shape = {**shape, "num_key_value_heads": 4}
    few = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
    return {**_text(shape, window, 4), **few, "final_logit_softcapping": 8.0}


def _scaled(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(1))
    return model


def _gemma4(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return _scaled(Gemma4ForCausalLM(Gemma4TextConfig(**_small(shape, window))))


def _gemma4_large(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return _scaled(Gemma4ForCausalLM(Gemma4TextConfig(**_large(shape, window))))


def _gemma4_moe(shape: dict[str, Any], window: int) -> PreTrainedModel:
    experts = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 72}
    return _scaled(Gemma4ForCausalLM(Gemma4TextConfig(**_large(shape, window), **experts)))


def _unified(shape: dict[str, Any], window: int) -> dict[str, Any]:
    return {name: value for name, value in _large(shape, window).items() if name != "hidden_size_per_layer_input"}


def _gemma4_unified(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return _scaled(Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**_unified(shape, window))))


def _gemma4_unified_multimodal(shape: dict[str, Any], window: int) -> PreTrainedModel:
    config = Gemma4UnifiedConfig(  # type: ignore[call-arg]
        text_config=_unified(shape, window),
        vision_config={"patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16},
        audio_config=None,
        attn_implementation="eager",
    )
    return _scaled(Gemma4UnifiedForConditionalGeneration(config))


def _gemma4_multimodal(shape: dict[str, Any], window: int) -> PreTrainedModel:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    vision |= {"num_key_value_heads": 2, "head_dim": 8}
    config = Gemma4Config(  # type: ignore[call-arg]
        text_config=_small(shape, window), vision_config=vision, audio_config=None, attn_implementation="eager"
    )
    return _scaled(Gemma4ForConditionalGeneration(config))


def _gemma3n_text(shape: dict[str, Any], window: int) -> dict[str, Any]:
    """Feed-forwards of different sizes, some of them sparse, and per-layer embeddings for only some of the tokens."""
    settings = _text(shape, window, 6)
    del settings["global_head_dim"]
    return {
        **settings,
        "intermediate_size": [208, 176, 208, 176, 208, 144],
        "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": shape["vocab_size"] - 20,
        "num_kv_shared_layers": 2,
        "altup_num_inputs": 3,
        "laurel_rank": 12,
        "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0, 0.0],
        "final_logit_softcapping": 8.0,
    }


def _gemma3n(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return Gemma3nForCausalLM(Gemma3nTextConfig(**_gemma3n_text(shape, window)))


def _gemma3n_multimodal(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """Its towers do nothing: the vision tower is from timm, which is not installed, and text passes through neither."""
    config = Gemma3nConfig(  # type: ignore[call-arg]
        text_config=_gemma3n_text(shape, window),
        vision_config={"hidden_size": 16},
        audio_config={"hidden_size": 16},
        attn_implementation="eager",
    )
    make = modeling_gemma3n.AutoModel.from_config

    def only_text(config: Any, **settings: Any) -> Any:
        return make(config=config, **settings) if isinstance(config, Gemma3nTextConfig) else torch.nn.Linear(2, 2)

    with patch.object(modeling_gemma3n.AutoModel, "from_config", only_text):
        return Gemma3nForConditionalGeneration(config)


GEMMA4_FAMILIES: dict[str, MakeModel] = {
    "gemma3n": _gemma3n,
    "gemma3n-multimodal": _gemma3n_multimodal,
    "gemma4": _gemma4,
    "gemma4_large": _gemma4_large,
    "gemma4_unified": _gemma4_unified,
    "gemma4-multimodal": _gemma4_multimodal,
    "gemma4_unified-multimodal": _gemma4_unified_multimodal,
}

GEMMA4_MIXTURES: dict[str, MakeModel] = {"gemma4_moe": _gemma4_moe}
