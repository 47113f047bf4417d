"""The heads of K and V in each layer, and the layers that read the K and V of another layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loramux.engine.architectures.config_fields import not_negative, positive, refuse_field, shown
from loramux.engine.architectures.layer_kinds import FULL
from loramux.engine.protocol.errors import ModelNotSupported

MAX_HEAD_DIM = 512

_HEAD_FIELDS = ("head_dim", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The heads of K and V in one layer. The heads of q have the same `head_dim`."""

    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Number of elements of a token's K."""
        return self.num_kv_heads * self.head_dim


def usual_heads(raw: Mapping[str, Any], num_heads: int) -> LayerHeads:
    """The heads that the top level of `config.json` describes for all layers. Raises ModelNotSupported."""
    head_dim = positive(raw, "hidden_size") // num_heads if raw.get("head_dim") is None else positive(raw, "head_dim")
    has_kv_heads = raw.get("num_key_value_heads") is not None
    return _checked(
        LayerHeads(positive(raw, "num_key_value_heads") if has_kv_heads else num_heads, head_dim), num_heads
    )


def heads_by_layer(
    raw: Mapping[str, Any], architecture: str, kinds: Sequence[str], num_heads: int
) -> tuple[LayerHeads, ...]:
    """The heads of each layer, for an architecture whose layers without windows can have different heads.

    transformers saves the heads in `per_layer_config`. Published files have `global_head_dim` and
    `num_global_key_value_heads` instead. The latter is used only if V equals K. Raises ModelNotSupported.
    """
    usual = usual_heads(raw, num_heads)
    given = raw.get("per_layer_config")
    if given is None:
        of_full = {"head_dim": raw["global_head_dim"]}
        if raw["attention_k_eq_v"] and raw.get("num_global_key_value_heads") is not None:
            of_full["num_key_value_heads"] = raw["num_global_key_value_heads"]
        given = {str(layer): of_full for layer, kind in enumerate(kinds) if kind == FULL}
    layers = [given.get(str(layer)) or {} for layer in range(len(kinds))]
    for layer, fields in enumerate(layers):
        for name in fields:
            if name not in _HEAD_FIELDS:
                refuse_field(f"per_layer_config.{layer}.{name}", fields[name], architecture)
    found = tuple(
        usual
        if not fields
        else _checked(
            LayerHeads(
                positive({"num_key_value_heads": usual.num_kv_heads, **fields}, "num_key_value_heads"),
                positive({"head_dim": usual.head_dim, **fields}, "head_dim"),
            ),
            num_heads,
        )
        for fields in layers
    )
    widest = max(heads.width for heads in found)
    if len(set(zip(kinds, found, strict=True))) > len(set(kinds)) or any(widest % heads.width for heads in found):
        raise ModelNotSupported(
            f"config.json describes K and V of {sorted({heads.width for heads in found})} elements: layers of one kind "
            "must have equal heads, and one size must be a multiple of the other"
        )
    return found


def kv_sources(raw: Mapping[str, Any], kinds: Sequence[str]) -> tuple[int, ...]:
    """For each layer, the layer whose K and V it reads, usually itself.

    The last `num_kv_shared_layers` layers have no K and V of their own. Each reads the K and V of the last layer of its
    kind that has them. Raises ModelNotSupported.
    """
    num_shared = not_negative(raw, "num_kv_shared_layers") if raw.get("num_kv_shared_layers") else 0
    num_own = len(kinds) - num_shared
    last = {kind: layer for layer, kind in enumerate(kinds[: max(0, num_own)])}
    missing = sorted(set(kinds) - last.keys())
    if missing:
        raise ModelNotSupported(
            f"num_kv_shared_layers = {shown(num_shared)} in config.json leaves no {missing[0]!r} layer with K and V of "
            "its own"
        )
    return tuple(layer if layer < num_own else last[kind] for layer, kind in enumerate(kinds))


def _checked(heads: LayerHeads, num_heads: int) -> LayerHeads:
    if heads.head_dim % 8 or not 8 <= heads.head_dim <= MAX_HEAD_DIM:
        raise ModelNotSupported(f"head_dim {heads.head_dim} is not a multiple of 8 in [8, {MAX_HEAD_DIM}]")
    if num_heads % heads.num_kv_heads:
        raise ModelNotSupported(
            f"{num_heads} attention heads cannot be divided among {heads.num_kv_heads} key/value heads"
        )
    return heads
