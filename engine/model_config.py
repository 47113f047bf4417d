"""What a Hugging Face model directory says about its decoder, read without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.engine.errors import ModelNotSupported
from loramux.kernels.layout import LinearShape, PageGeometry

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: `default`, `linear` or `llama3`, with the parameters of the last two."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder. `layer_windows` holds each layer's sliding window in tokens, None for the whole context."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    layer_windows: tuple[int | None, ...]
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def modules(self) -> tuple[LinearShape, ...]:
        """The linears of a layer that adapters may target, in the pool's fixed order, under PEFT's names."""
        q_out, kv_out = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (
            LinearShape("self_attn.q_proj", self.hidden_size, q_out),
            LinearShape("self_attn.k_proj", self.hidden_size, kv_out),
            LinearShape("self_attn.v_proj", self.hidden_size, kv_out),
            LinearShape("self_attn.o_proj", q_out, self.hidden_size),
            LinearShape("mlp.gate_proj", self.hidden_size, self.intermediate_size),
            LinearShape("mlp.up_proj", self.hidden_size, self.intermediate_size),
            LinearShape("mlp.down_proj", self.intermediate_size, self.hidden_size),
        )

    def geometry(self, kv_itemsize: int, adapter_itemsize: int) -> PageGeometry:
        """The pool's page for this decoder."""
        return PageGeometry(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            kv_itemsize=kv_itemsize,
            adapter_itemsize=adapter_itemsize,
        )

    @staticmethod
    def load(model_dir: Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json`); raises ModelNotSupported with the reason."""
        if not model_dir.is_dir():
            raise ModelNotSupported(f"the model directory {model_dir} does not exist")
        raw = _read_json(model_dir / "config.json")
        if raw is None:
            raise ModelNotSupported(f"{model_dir} has no config.json: name a Hugging Face model directory")
        generation = _read_json(model_dir / "generation_config.json") or {}
        try:
            return _parse(raw, generation)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelNotSupported(f"config.json of {model_dir} is incomplete or malformed: {error}") from error


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ModelNotSupported(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelNotSupported(f"{path} does not hold a JSON object")
    return value


def _parse(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ModelNotSupported(
            f"the architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    if raw.get("quantization_config"):
        raise ModelNotSupported("quantized base models are not supported: use the float weights")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelNotSupported(f"the activation {activation!r} of {architecture} is not supported; silu is")
    num_heads = int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads)
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ModelNotSupported(f"head_dim {head_dim} is not a multiple of 8 in [8, {MAX_HEAD_DIM}]")
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ModelNotSupported(f"{num_heads} attention heads do not divide among {num_kv_heads} key/value heads")
    attention_bias = bool(raw.get("attention_bias", False))
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise ModelNotSupported(f"the dtype {dtype!r} in config.json is not one of {', '.join(DTYPES)}")
    return ModelConfig(
        architecture=architecture,
        num_layers=int(raw["num_hidden_layers"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=int(raw["vocab_size"]),
        max_model_len=int(raw["max_position_embeddings"]),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope=_parse_rope(raw),
        qkv_bias=is_qwen2 or attention_bias,
        o_bias=attention_bias and not is_qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        layer_windows=_parse_windows(raw, architecture),
        dtype=dtype,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_parse_eos(generation.get("eos_token_id", raw.get("eos_token_id"))),
    )


def _parse_rope(raw: dict[str, Any]) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelNotSupported("a partial rotary embedding is not supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, float(scaling["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            float(scaling["factor"]),
            float(scaling["low_freq_factor"]),
            float(scaling["high_freq_factor"]),
            int(scaling["original_max_position_embeddings"]),
        )
    raise ModelNotSupported(f"the rotary embedding {kind!r} is not supported; default, linear and llama3 are")


def _parse_windows(raw: dict[str, Any], architecture: str) -> tuple[int | None, ...]:
    num_layers = int(raw["num_hidden_layers"])
    window = raw.get("sliding_window")
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") and not raw.get("use_sliding_window", False):
        window = None
    if window is None or architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None and architecture != "MistralForCausalLM":
        first = int(raw.get("max_window_layers", num_layers))
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if kinds is None:
        return (int(window),) * num_layers
    if len(kinds) != num_layers:
        raise ModelNotSupported(f"layer_types names {len(kinds)} layers of {num_layers}")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _parse_eos(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)
