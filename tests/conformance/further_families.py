"""Random tiny models of the families that `make campaign-parity` adds to those of every test run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Exaone4Config,
    Exaone4ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

MakeModel = Callable[[dict[str, Any], int], PreTrainedModel]
"""Makes a model from a shape and a window."""

MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}


def _granite(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return GraniteForCausalLM(GraniteConfig(**shape, **MULTIPLIERS, attention_bias=True))


def _hyperclovax(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return HyperCLOVAXForCausalLM(HyperCLOVAXConfig(**shape, **MULTIPLIERS, tie_word_embeddings=True))


def _smollm3(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """A SmolLM3 whose last layer has a window instead of positions."""
    rotated = [1] * (shape["num_hidden_layers"] - 1) + [0]
    windows = {"use_sliding_window": True, "sliding_window": window, "no_rope_layers": rotated}
    config = SmolLM3Config(**shape, **windows, pad_token_id=0, attn_implementation="eager")
    return SmolLM3ForCausalLM(config)


def _olmo2(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**shape))


def _mixed_windows(shape: dict[str, Any], window: int) -> dict[str, Any]:
    """Settings of a model whose last layer sees the whole context."""
    kinds = ["sliding_attention"] * (shape["num_hidden_layers"] - 1) + ["full_attention"]
    return {**shape, "layer_types": kinds, "sliding_window": window, "attn_implementation": "eager"}


def _olmo3(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """An OLMo 3 whose rotary embedding is scaled in the layers without a window."""
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    }
    return Olmo3ForCausalLM(Olmo3Config(**_mixed_windows(shape, window), rope_parameters=ropes))


def _exaone4(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return Exaone4ForCausalLM(Exaone4Config(**_mixed_windows(shape, window)))


FURTHER_FAMILIES: dict[str, MakeModel] = {
    "granite": _granite,
    "hyperclovax": _hyperclovax,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "exaone4": _exaone4,
}
