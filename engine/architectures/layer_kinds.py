"""Kinds of decoder layers: with attention or a delta rule, with or without a window, and with or without rotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loramux.engine.architectures.config_fields import positive

FULL, SLIDING, LINEAR, CHUNKED = "full_attention", "sliding_attention", "linear_attention", "chunked_attention"
"""Kinds of layers in `layer_types`."""

OLDER_NAMES = {"attention": FULL, "mamba": LINEAR}
"""Names of kinds in Granite 4's `layer_types` before transformers 5."""

LayerKinds = Callable[[Mapping[str, Any], int], list[str]]
"""Returns the kind of each layer, given `config.json` and the number of layers."""

RotatedLayers = Callable[[Mapping[str, Any], Sequence[int | None]], list[bool]]
"""Returns whether each layer rotates q and k, given `config.json` and each layer's window."""


def without_windows(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    return [FULL] * num_layers


def all_recurrent(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    return [LINEAR] * num_layers


def all_windowed(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    return [FULL if raw.get("sliding_window") is None else SLIDING] * num_layers


def windowed_from(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    """Windows from layer `max_window_layers` on."""
    if raw["sliding_window"] is None:
        return [FULL] * num_layers
    return [SLIDING if layer >= int(raw["max_window_layers"]) else FULL for layer in range(num_layers)]


def windowed_above(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    """`windowed_from` if `use_sliding_window` is set, otherwise no windows."""
    return windowed_from(raw, num_layers) if raw["use_sliding_window"] else [FULL] * num_layers


def all_windowed_if_used(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    return all_windowed(raw, num_layers) if raw["use_sliding_window"] else [FULL] * num_layers


def windowed_in_turn(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    """Windows in even layers below layer `max_window_layers` if `use_sliding_window` is set, otherwise no windows."""
    last = int(raw["max_window_layers"]) if raw["use_sliding_window"] else 0
    return [SLIDING if layer % 2 == 0 and layer < last else FULL for layer in range(num_layers)]


def full_every(period: int, first: int | None = None) -> LayerKinds:
    """Windows in all layers except `first` (by default `period - 1`) and every `period`-th layer after it."""
    first = period - 1 if first is None else first
    return lambda raw, num_layers: [FULL if layer % period == first else SLIDING for layer in range(num_layers)]


def full_every_sixth_and_last(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    return [*full_every(6)(raw, num_layers)[: num_layers - 1], FULL]


def full_by_pattern(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    """`full_every(sliding_window_pattern)`, or no windows if `sliding_window` is null.

    A pattern of letters, such as `LLLG`, is repeated: layers with L have windows, layers with G have none.
    """
    if raw.get("sliding_window") is None:
        return [FULL] * num_layers
    pattern = raw.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return [FULL if pattern[layer % len(pattern)] == "G" else SLIDING for layer in range(num_layers)]
    return full_every(positive(raw, "sliding_window_pattern"))(raw, num_layers)


def linear_in_between(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    """Attention in every `full_attention_interval`-th layer, and a gated delta rule in the other layers."""
    interval = positive(raw, "full_attention_interval")
    return [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]


def windowed_unless_rotated(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    if raw["sliding_window"] is None or not raw["use_sliding_window"]:
        return [FULL] * num_layers
    return [FULL if is_rotated else SLIDING for is_rotated in _listed(raw, num_layers)]


def chunked_if_rotated(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    return [CHUNKED if is_rotated else FULL for is_rotated in _listed(raw, num_layers)]


def all_rotated(raw: Mapping[str, Any], windows: Sequence[int | None]) -> list[bool]:
    return [True] * len(windows)


def rotated_if_windowed(raw: Mapping[str, Any], windows: Sequence[int | None]) -> list[bool]:
    """True for windowed layers, or for all layers if `sliding_window` is null."""
    return [window is not None or raw["sliding_window"] is None for window in windows]


def rotated_if_rope(raw: Mapping[str, Any], windows: Sequence[int | None]) -> list[bool]:
    """True for all layers if `position_embedding_type` is `rope`."""
    return [raw.get("position_embedding_type") == "rope"] * len(windows)


def rotated_if_listed(raw: Mapping[str, Any], windows: Sequence[int | None]) -> list[bool]:
    return _listed(raw, len(windows))


def _listed(raw: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Whether each layer rotates q and k, as listed in `no_rope_layers` (1: rotation, 0: no rotation).

    By default, every `no_rope_layer_interval`-th layer has no rotation.
    """
    listed = raw.get("no_rope_layers")
    if not listed:
        interval = positive(raw, "no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(listed) < num_layers or any(one not in (0, 1) for one in listed):
        raise ValueError(f"no_rope_layers does not list a 0 or 1 for each of {num_layers} layers")
    return [bool(one) for one in listed[:num_layers]]
