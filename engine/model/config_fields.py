"""The fields of a `config.json`: which architectures support them, and which are refused by name.

`transformers` is the reference for the meaning and the default of each field. A field that changes the model's
computation is either supported or refused by name, so that no model is served with slightly wrong results.
"""

from __future__ import annotations

import math
from typing import Any

from loramux.engine.errors import ModelNotSupported

LLAMA, MISTRAL, PHI3 = "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
GEMMA2, GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"
QWEN, GEMMA = (QWEN2, QWEN3), (GEMMA2, GEMMA3)
ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3)

FULL, SLIDING = "full_attention", "sliding_attention"

# Defaults in transformers that depend on the architecture. Common defaults are in the code.
_GEMMA_ASSUMED: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
ASSUMED: dict[str, dict[str, Any]] = {
    LLAMA: {},
    MISTRAL: {"num_key_value_heads": 8, "sliding_window": 4096},
    QWEN2: {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    QWEN3: {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    GEMMA2: {**_GEMMA_ASSUMED, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    GEMMA3: _GEMMA_ASSUMED,
    PHI3: {"original_max_position_embeddings": 4096},
}

_OFF = (None, False)
_ONE = (None, 1)
_NONE: tuple[Any, ...] = (None, 0, [], {})

# Fields that change the computation: their neutral values, and the architectures that support other values.
_DECISIVE: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "attention_bias": (_OFF, (LLAMA, *QWEN, *GEMMA)),
    "mlp_bias": (_OFF, (LLAMA,)),
    "query_pre_attn_scalar": ((None,), GEMMA),
    "final_logit_softcapping": ((None,), GEMMA),
    # transformers has this field in Gemma 3's configuration, but its attention ignores it.
    "attn_logit_softcapping": ((None,), (GEMMA2,)),
    "partial_rotary_factor": (_ONE, (PHI3,)),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm"), (_OFF, (QWEN3, GEMMA3))),
    **dict.fromkeys(
        (
            "add_cross_attention",
            "alibi",
            "attn_output_gate",
            "attn_temperature_tuning",
            "is_encoder_decoder",
            "lm_head_bias",
            "rope_interleave",
            "rope_interleaved",
            "use_bidirectional_attention",
            "use_mrope",
            "use_parallel_residual",
        ),
        (_OFF, ()),
    ),
    **dict.fromkeys(
        (
            "embedding_multiplier",
            "lm_head_multiplier",
            "logit_scale",
            "logits_scaling",
            "residual_multiplier",
            "scale_depth",
            "scale_emb",
        ),
        (_ONE, ()),
    ),
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
            "n_routed_experts",
            "no_rope_layers",
            "num_experts",
            "num_kv_shared_layers",
            "num_local_experts",
            "per_layer_config",
            "q_lora_rank",
            "v_head_dim",
        ),
        (_NONE, ()),
    ),
}


def refuse_what_is_not_computed(raw: dict[str, Any], architecture: str) -> None:
    """Raise ModelNotSupported for the first field that the decoder does not support."""
    if raw.get("quantization_config"):
        raise ModelNotSupported(
            "quantization_config in config.json: quantized base models are not supported; use the float weights"
        )
    for name, (neutral, readers) in _DECISIVE.items():
        if architecture not in readers and raw.get(name) not in neutral:
            refuse_field(name, raw[name], architecture)


def refuse_field(name: str, value: Any, architecture: str) -> None:
    raise ModelNotSupported(f"{name} = {shown(value)} in config.json is not supported for {architecture}")


def positive(raw: dict[str, Any], name: str) -> int:
    """The field `name`. Raises KeyError if it is missing, or ValueError if it is not a positive integer."""
    value = raw[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {shown(value)}, not a positive integer")
    return value


def positive_float(raw: dict[str, Any], name: str) -> float:
    """The field `name`. Raises KeyError if it is missing, or ValueError if it is not a positive number."""
    value = raw[name]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {shown(value)}, not a positive number")
    return float(value)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
