"""The rotary settings of a `config.json`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loramux.engine.architectures.config_fields import positive, positive_float, refuse_field
from loramux.engine.architectures.family import Family
from loramux.engine.architectures.layer_kinds import FULL, SLIDING
from loramux.engine.protocol.errors import ModelNotSupported

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "proportional": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "attention_factor",
        "attn_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    ),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "longrope": (
        "short_factor",
        "long_factor",
        "factor",
        "attention_factor",
        "original_max_position_embeddings",
    ),
}

MAX_CONTEXT = 1 << 26
"""Longest supported context of a model, in tokens. The rotary tables of a context this long take tens of gigabytes."""

QUERY_GROWTH = "llama_4_scaling_beta"
_TURNS = {"beta_fast": 32.0, "beta_slow": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    `kind` is one of:

    - `none`: q and k are not rotated.
    - `default`: frequencies are not scaled.
    - `linear` and `proportional`: all frequencies are divided by `factor`.
    - `dynamic`: `theta` grows with `factor` and the engine's longest context, if that exceeds `original_max_len`.
    - `llama3`: low frequencies are divided by `factor`. The two frequency factors bound the transition, in turns within
      `original_max_len`.
    - `yarn`: frequencies that make fewer than `slow_turns` turns within `original_max_len` are divided by `factor`, and
      frequencies that make more than `fast_turns` turns are not scaled. The transition in between is gradual.
    - `longrope`: each frequency is divided by its own factor.

    `attention_factor` multiplies cosine and sine. Only the first `rotary_fraction` of a head's channels are rotated or,
    with `proportional`, the first `rotary_fraction` of each half of the head. `query_growth` scales q at positions from
    `original_max_len` on.
    """

    theta: float
    kind: str = "default"
    rotary_fraction: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    truncates: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    query_growth: float = 0.0


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """q at position `p` is multiplied by `1 + growth * log(1 + floor((p + 1) / span))` (Nakanishi, 2025)."""

    growth: float
    span: int


NO_ROPE = RopeConfig(theta=1.0, kind="none")
"""The rotary embedding of layers that do not rotate q and k."""


def parse_ropes(
    raw: Mapping[str, Any], architecture: str, family: Family, windows: Sequence[int | None], head_dim: int
) -> tuple[RopeConfig, ...]:
    """Each layer's rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""

    def parse(given: Mapping[str, Any]) -> RopeConfig:
        return _parse_rope(given, raw, architecture, family, head_dim)

    rotary, given = family.rotary, raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    theta = 10000.0 if raw.get("rope_theta") is None else raw["rope_theta"]
    if rotary.window_theta_field is None:
        rope = parse({"rope_theta": theta, **(scaling or given)})
        thetas = None if rotary.layer_theta_field is None else raw.get(rotary.layer_theta_field)
        if thetas is not None:
            if len(thetas) != len(windows) or any(type(one) not in (int, float) or one < 0 for one in thetas):
                refuse_field(rotary.layer_theta_field or "", thetas, architecture)
            return tuple(replace(rope, theta=float(one)) if one else NO_ROPE for one in thetas)
        return tuple(rope if is_rotated else NO_ROPE for is_rotated in rotary.layers(raw, windows))
    for name in given:
        if name not in (FULL, SLIDING):
            refuse_field(f"rope_parameters.{name}", given[name], architecture)
    whole = parse({"rope_theta": theta, **(given.get(FULL) or {}), **scaling})
    local = parse({"rope_theta": raw[rotary.window_theta_field], **(given.get(SLIDING) or {})})
    return tuple(whole if window is None else local for window in windows)


def _parse_rope(
    given: Mapping[str, Any], raw: Mapping[str, Any], architecture: str, family: Family, head_dim: int
) -> RopeConfig:
    supported = family.rotary.kinds
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "mrope" and kind in supported:
        # Early configurations of multimodal models use this name for the default kind.
        kind = "default"
    if kind in ("su", "yarn") and kind not in supported and "longrope" in supported:
        # Early Phi-3 configurations use these names for longrope.
        kind = "longrope"
    if kind not in supported:
        raise ModelNotSupported(
            f"the rotary embedding {kind!r} of {architecture} is not supported; supported: {', '.join(supported)}"
        )
    known = ("rope_theta", "rope_type", "type", "partial_rotary_factor", *_ROPE_FIELDS[kind], *family.rotary.fields)
    for name, value in given.items():
        if name not in known and value is not None:
            refuse_field(f"{name} of the rotary embedding {kind!r}", value, architecture)
    theta = positive_float(given, "rope_theta")
    if kind == "proportional":
        factor, fraction = (positive_float({name: 1.0, **given}, name) for name in ("factor", "partial_rotary_factor"))
        return RopeConfig(theta=theta, kind=kind, rotary_fraction=min(1.0, fraction), factor=factor)
    fraction = _rotary_fraction(given, raw, architecture, family, head_dim)
    if kind == "default":
        return RopeConfig(theta=theta, rotary_fraction=fraction)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, rotary_fraction=fraction, factor=positive_float(given, "factor"))
    if kind == "dynamic" and given.get("alpha") and "alpha" in family.rotary.fields:
        # NTK scaling for one length, which no other field changes.
        rotary_dim = head_dim * fraction
        stretch = positive_float(given, "alpha") ** (rotary_dim / (rotary_dim - 2))
        return RopeConfig(theta=theta * stretch, rotary_fraction=fraction)
    if kind == "dynamic":
        # As in transformers, theta depends on max_position_embeddings, and original_max_position_embeddings is ignored.
        if int(head_dim * fraction) <= 2:
            refuse_field("partial_rotary_factor", fraction, f"the rotary embedding {kind!r}")
        trained, growth = positive(raw, "max_position_embeddings"), positive_float(given, "factor")
        return RopeConfig(theta=theta, kind=kind, rotary_fraction=fraction, factor=growth, original_max_len=trained)
    if kind == "yarn":
        return _parse_yarn(given, raw, theta, fraction)
    original = _original_max_len(given, raw)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            rotary_fraction=fraction,
            factor=positive_float(given, "factor"),
            low_freq_factor=positive_float(given, "low_freq_factor"),
            high_freq_factor=positive_float(given, "high_freq_factor"),
            original_max_len=original,
        )
    num_pairs = int(head_dim * fraction) // 2
    return RopeConfig(
        theta=theta,
        kind=kind,
        rotary_fraction=fraction,
        original_max_len=original,
        short_factors=_pair_factors(given, "short_factor", num_pairs),
        long_factors=_pair_factors(given, "long_factor", num_pairs),
        attention_factor=_attention_factor(given, positive(raw, "max_position_embeddings") / original, original),
    )


def _parse_yarn(given: Mapping[str, Any], raw: Mapping[str, Any], theta: float, fraction: float) -> RopeConfig:
    """YaRN (Peng et al., 2023). As in transformers, the original length defaults to `max_position_embeddings`.

    As in vLLM and llama.cpp, `attn_factor` multiplies the default of `attention_factor`. transformers ignores it.
    """
    original = _original_max_len({"original_max_position_embeddings": raw["max_position_embeddings"], **given}, raw)
    if theta <= 1:
        raise ValueError(f"rope_theta is {theta}, which YaRN cannot scale")
    has_factor = given.get("factor") is not None
    factor = positive_float(given, "factor") if has_factor else positive(raw, "max_position_embeddings") / original
    if given.get("attention_factor") is not None:
        attention_factor = positive_float(given, "attention_factor")
    elif given.get("mscale") and given.get("mscale_all_dim"):
        scales = (positive_float(given, name) for name in ("mscale", "mscale_all_dim"))
        above, below = (1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1 for scale in scales)
        attention_factor = above / below
    else:
        attention_factor = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1
    if given.get("attn_factor") is not None:
        if given.get("attention_factor") is not None:
            refuse_field("attn_factor beside attention_factor", given["attn_factor"], "YaRN")
        attention_factor *= positive_float(given, "attn_factor")
    turns = {name: default if not given.get(name) else positive_float(given, name) for name, default in _TURNS.items()}
    return RopeConfig(
        theta=theta,
        kind="yarn",
        rotary_fraction=fraction,
        factor=factor,
        original_max_len=original,
        fast_turns=turns["beta_fast"],
        slow_turns=turns["beta_slow"],
        truncates=given.get("truncate") is not False,
        attention_factor=attention_factor,
        query_growth=positive_float(given, QUERY_GROWTH) if given.get(QUERY_GROWTH) else 0.0,
    )


def _rotary_fraction(
    given: Mapping[str, Any], raw: Mapping[str, Any], architecture: str, family: Family, head_dim: int
) -> float:
    found = [one["partial_rotary_factor"] for one in (given, raw) if one.get("partial_rotary_factor") is not None]
    if not found and raw.get("rotary_dim") is not None and "rotary_dim" in family.reads:
        found = [positive(raw, "rotary_dim") / head_dim]
    fraction = positive_float({"partial_rotary_factor": found[0] if found else 1.0}, "partial_rotary_factor")
    is_read = fraction == 1 or "partial_rotary_factor" in family.reads
    if fraction > 1 or head_dim * fraction < 1 or not is_read:
        refuse_field("partial_rotary_factor", fraction, architecture)
    return fraction


def _original_max_len(given: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    """The context length before scaling. As in transformers, a value outside the rotary settings takes precedence."""
    name = "original_max_position_embeddings"
    return positive(raw if raw.get(name) is not None else given, name)


def _attention_factor(given: Mapping[str, Any], stretch: float, original: int) -> float:
    """LongRoPE's factor for cosine and sine (Ding et al., 2024). It defaults to a function of the scaling factor."""
    if given.get("attention_factor") is not None:
        return positive_float(given, "attention_factor")
    factor = stretch if given.get("factor") is None else positive_float(given, "factor")
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _pair_factors(given: Mapping[str, Any], name: str, num_pairs: int) -> tuple[float, ...]:
    factors = tuple(positive_float({name: factor}, name) for factor in given[name])
    if len(factors) != num_pairs:
        raise ModelNotSupported(f"{name} in config.json has {len(factors)} factors for {num_pairs} pairs of channels")
    return factors


def longest_contexts(raw: Mapping[str, Any], ropes: Collection[RopeConfig]) -> tuple[int, int]:
    """The longest context by default, and the longest that the operator can allow.

    YaRN can extend both beyond `max_position_embeddings`. Dynamic NTK extends only the second, because allowing longer
    contexts changes the angles of short contexts too.
    """

    def stretched(kind: str) -> int:
        return max((int(rope.factor * rope.original_max_len) for rope in ropes if rope.kind == kind), default=0)

    usual = max(positive(raw, "max_position_embeddings"), stretched("yarn"))
    most = max(usual, stretched("dynamic"))
    if most > MAX_CONTEXT:
        raise ModelNotSupported(f"config.json describes a context of {most} tokens, above {MAX_CONTEXT}")
    return usual, most
