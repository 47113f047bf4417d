"""Determines which layers of a decoder have experts. The other layers have one feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loramux.engine.architectures.config_fields import not_negative, positive, shown
from loramux.engine.protocol.errors import ModelNotSupported

ExpertLayers = Callable[[Mapping[str, Any], int], list[bool]]
"""Returns whether each layer has experts, given `config.json` and the number of layers."""

DENSE, SPARSE = "dense", "sparse"
"""Kinds of layers in `mlp_layer_types`."""


def every_layer(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    return [True] * num_layers


def every_layer_if_enabled(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    return [bool(raw["enable_moe_block"])] * num_layers


def every_layer_if_any_experts(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """All layers, unless `num_local_experts` is 0."""
    return [raw.get("num_local_experts") != 0] * num_layers


def by_step(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Every `decoder_sparse_step`-th layer, except `mlp_only_layers`."""
    step = positive({"decoder_sparse_step": 1, **raw}, "decoder_sparse_step")
    dense = raw.get("mlp_only_layers") or []
    if any(type(layer) is not int or not 0 <= layer < num_layers for layer in dense):
        raise ModelNotSupported(
            f"mlp_only_layers = {shown(dense)} in config.json is not supported for a model with {num_layers} layers"
        )
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def after_dense(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """All layers after the first `first_k_dense_replace` layers."""
    num_dense = not_negative(raw, "first_k_dense_replace")
    return [layer >= num_dense for layer in range(num_layers)]


def listed_or_after_dense(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """The sparse layers of `mlp_layer_types`, or `after_dense` if the field is missing."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return after_dense(raw, num_layers)
    if len(kinds) != num_layers or any(kind not in (DENSE, SPARSE) for kind in kinds):
        raise ModelNotSupported(
            f"mlp_layer_types in config.json does not list {DENSE} or {SPARSE} for {num_layers} layers"
        )
    return [kind == SPARSE for kind in kinds]


def listed_or_every_step(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """The layers in `moe_layers`, or every `interleave_moe_layer_step`-th layer if the field is missing."""
    listed = raw.get("moe_layers")
    if listed is None:
        step = positive(raw, "interleave_moe_layer_step")
        listed = range(step - 1, num_layers, step)
    elif any(type(layer) is not int or not 0 <= layer < num_layers for layer in listed):
        raise ModelNotSupported(
            f"moe_layers = {shown(listed)} in config.json is not supported for a model with {num_layers} layers"
        )
    return [layer in listed for layer in range(num_layers)]


def by_interval(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Every `moe_layer_interval`-th layer in [`moe_layer_start_index`, `moe_layer_end_index`] (-1: the last layer)."""
    interval, start = positive(raw, "moe_layer_interval"), not_negative(raw, "moe_layer_start_index")
    end = num_layers - 1 if raw["moe_layer_end_index"] == -1 else not_negative(raw, "moe_layer_end_index")
    return [start <= layer <= end and (layer + 1) % interval == 0 for layer in range(num_layers)]
