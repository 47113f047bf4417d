"""Random tiny models of the families that `make campaign-parity` adds to those of every test run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    PreTrainedModel,
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


FURTHER_FAMILIES: dict[str, MakeModel] = {
    "granite": _granite,
    "hyperclovax": _hyperclovax,
}
