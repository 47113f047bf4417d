"""Random tiny models of families with a unique part: an activation, norms without weights, or a biased head."""

from __future__ import annotations

from typing import Any

from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from tests.conformance.further_families import MULTIPLIERS, MakeModel


def _olmo(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return OlmoForCausalLM(OlmoConfig(**shape, pad_token_id=0, clip_qkv=2.0))


def _phi(shape: dict[str, Any], _: int) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return PhiForCausalLM(PhiConfig(**shape, rope_parameters=rope))


def _apertus(shape: dict[str, Any], _: int) -> PreTrainedModel:
    # The activation is quadratic, so larger weights would make attention choose single tokens.
    settings = {**shape, "initializer_range": 0.12, "pad_token_id": 0}
    return ApertusForCausalLM(ApertusConfig(**settings, dtype="float32"))


def _granite_swa(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """Theta is set for each layer. The second layer is not rotated."""
    thetas = [1e6, 0, *[1e4] * (shape["num_hidden_layers"] - 2)]
    config = GraniteSWAConfig(  # type: ignore[call-arg]
        **shape, **MULTIPLIERS, sliding_window=window, layer_rope_theta=thetas, attn_implementation="eager"
    )
    return GraniteSWAForCausalLM(config)


SINGULAR_FAMILIES: dict[str, MakeModel] = {
    "olmo": _olmo,
    "phi": _phi,
    "apertus": _apertus,
    "granite_swa": _granite_swa,
}
