"""The fields of a `config.json` that change the computation.

`transformers` is the reference for the meaning and the default of each field. Each of these fields is either supported
or refused by name, so that no model is served with slightly wrong results.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from loramux.engine.protocol.errors import ModelNotSupported

_OFF = (None, False)
_ONE = (None, 1)
_NONE: tuple[Any, ...] = (None, 0, [], {})

DECISIVE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "add_cross_attention",
            "alibi",
            "attention_bias",
            "attention_k_eq_v",
            "attn_output_gate",
            "attn_temperature_tuning",
            "enable_moe_block",
            "is_encoder_decoder",
            "lm_head_bias",
            "mlp_bias",
            "qk_layernorm",
            "qk_norm",
            "rope_interleave",
            "rope_interleaved",
            "use_bias",
            "use_bidirectional_attention",
            "use_double_wide_mlp",
            "use_mrope",
            "use_parallel_residual",
            "use_qk_norm",
        ),
        _OFF,
    ),
    **dict.fromkeys(
        (
            "embedding_multiplier",
            "lm_head_multiplier",
            "logit_scale",
            "logits_scaling",
            "partial_rotary_factor",
            "residual_multiplier",
            "scale_depth",
            "scale_emb",
        ),
        _ONE,
    ),
    **dict.fromkeys(("is_causal", "use_post_norm"), (None, True)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), (None,)),
    **dict.fromkeys(
        (
            "attention_chunk_size",
            "attention_multiplier",
            "block_configs",
            "clip_qkv",
            "dim_model_base",
            "global_head_dim",
            "head_dims",
            "hidden_size_per_layer_input",
            "kv_lora_rank",
            "llama_4_scaling",
            "moe_num_experts",
            "n_routed_experts",
            "n_shared_experts",
            "no_rope_layers",
            "num_experts",
            "num_kv_shared_layers",
            "num_local_experts",
            "per_layer_config",
            "q_lora_rank",
            "v_head_dim",
        ),
        _NONE,
    ),
}
"""Fields that change the computation, each with its neutral values. Other values are refused unless the architecture's
`Family.reads` names the field.
"""


def refuse_what_is_not_computed(raw: Mapping[str, Any], architecture: str, reads: Collection[str]) -> None:
    """Raise ModelNotSupported for the first field outside `reads` whose value is not neutral."""
    for name, neutral in DECISIVE.items():
        if name not in reads and raw.get(name) not in neutral:
            refuse_field(name, raw[name], architecture)


def refuse_field(name: str, value: Any, architecture: str) -> None:
    raise ModelNotSupported(f"{name} = {shown(value)} in config.json is not supported for {architecture}")


def positive(raw: Mapping[str, Any], name: str) -> int:
    """The field `name`. Raises KeyError if it is missing, or ValueError if it is not a positive integer."""
    value = raw[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {shown(value)}, not a positive integer")
    return value


def not_negative(raw: Mapping[str, Any], name: str) -> int:
    """The field `name`. Raises KeyError if it is missing, or ValueError if it is not an integer of at least 0."""
    value = raw[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {shown(value)}, not an integer of at least 0")
    return value


def positive_float(raw: Mapping[str, Any], name: str) -> float:
    """The field `name`. Raises KeyError if it is missing, or ValueError if it is not a positive number."""
    value = raw[name]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {shown(value)}, not a positive number")
    return float(value)


def optional_float(raw: Mapping[str, Any], name: str) -> float | None:
    """The field `name`, or None if it is absent or null. Raises ValueError if it is not a positive number."""
    return None if raw.get(name) is None else positive_float(raw, name)


def has_bias(raw: Mapping[str, Any], bias: str | bool) -> bool:
    """True if a linear layer has a bias. `bias` is the name of the field that decides, or the answer for all models."""
    return bias if isinstance(bias, bool) else bool(raw.get(bias, False))


def factor(raw: Mapping[str, Any], name: str | None) -> float:
    """The field `name`, or 1 if `name` is None or the field is absent or null.

    Raises ValueError if it is not a positive number.
    """
    return 1.0 if name is None or raw.get(name) is None else positive_float(raw, name)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
