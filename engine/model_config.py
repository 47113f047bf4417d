"""What a Hugging Face model directory says about its decoder, read without torch.

`transformers` is the reference for what a field means and for what holds where a `config.json` is silent. A field that
changes what a model computes is either understood or refused by name: a base that is nearly right would be served as if
it were.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.engine.errors import ModelNotSupported
from loramux.kernels.layout import LinearShape, PageGeometry

LLAMA, MISTRAL, PHI3 = "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
GEMMA2, GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"
QWEN, GEMMA = (QWEN2, QWEN3), (GEMMA2, GEMMA3)
ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3)
DTYPES = ("float32", "bfloat16", "float16")
MAX_HEAD_DIM = 256

SILU, GELU_TANH = "silu", "gelu_tanh"
_ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}

FULL, SLIDING = "full_attention", "sliding_attention"

# Where a config.json is silent, transformers takes these; what it takes for every architecture stands in the code.
_ASSUMED_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_ASSUMED: dict[str, dict[str, Any]] = {
    LLAMA: {},
    MISTRAL: {"num_key_value_heads": 8, "sliding_window": 4096},
    QWEN2: {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    QWEN3: {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    GEMMA2: {**_ASSUMED_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    GEMMA3: _ASSUMED_GEMMA,
    PHI3: {"original_max_position_embeddings": 4096},
}

_OFF = (None, False)
_ONE = (None, 1)
_NONE: tuple[Any, ...] = (None, 0, [], {})

# Fields that change what a model computes: the values that change nothing, and who understands others.
_DECISIVE: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "attention_bias": (_OFF, (LLAMA, *QWEN, *GEMMA)),
    "mlp_bias": (_OFF, (LLAMA,)),
    "query_pre_attn_scalar": ((None,), GEMMA),
    "final_logit_softcapping": ((None,), GEMMA),
    # transformers has this field in Gemma 3's configuration and leaves it out of its attention.
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

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": (
        "short_factor",
        "long_factor",
        "factor",
        "attention_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    `kind` is `default`, `linear` (by `factor`), `llama3` (by `factor` and the two frequency factors, beyond
    `original_max_len`) or `longrope` (each frequency by its own factor, and cosine and sine times `attention_factor`).
    Only the first `rotary_fraction` of a head's channels turn.
    """

    theta: float
    kind: str = "default"
    rotary_fraction: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder.

    `layer_windows` holds each layer's sliding window in tokens, None for the whole context; `layer_ropes` each layer's
    rotary embedding. `norm_offset` is added to every norm's weight. With `output_norms` the outputs of attention and
    feed-forward are normed before they are added. With `fused_projections` q/k/v and gate/up are one linear each, for
    adapters too. A soft cap is None where there is none.
    """

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
    norm_offset: float
    output_norms: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    fused_projections: bool
    activation: str
    embedding_scale: float
    attention_scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    tied_embeddings: bool
    layer_windows: tuple[int | None, ...]
    layer_ropes: tuple[RopeConfig, ...]
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def modules(self) -> tuple[LinearShape, ...]:
        """The linears of a layer that adapters may target, in the pool's fixed order, under PEFT's names."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_out, kv_out = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        o = LinearShape("self_attn.o_proj", q_out, hidden)
        down = LinearShape("mlp.down_proj", inner, hidden)
        if self.fused_projections:
            qkv = LinearShape("self_attn.qkv_proj", hidden, q_out + 2 * kv_out)
            return (qkv, o, LinearShape("mlp.gate_up_proj", hidden, 2 * inner), down)
        return (
            LinearShape("self_attn.q_proj", hidden, q_out),
            LinearShape("self_attn.k_proj", hidden, kv_out),
            LinearShape("self_attn.v_proj", hidden, kv_out),
            o,
            LinearShape("mlp.gate_proj", hidden, inner),
            LinearShape("mlp.up_proj", hidden, inner),
            down,
        )

    @property
    def module_groups(self) -> tuple[tuple[int, ...], ...]:
        """Indices of `modules` that share an input: those of q/k/v, of o, of gate/up, of down."""
        return ((0,), (1,), (2,), (3,)) if self.fused_projections else ((0, 1, 2), (3,), (4, 5), (6,))

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
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
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
    _refuse_what_is_not_computed(raw, architecture)
    raw = {**_ASSUMED[architecture], **raw}
    is_gemma = architecture in GEMMA
    num_layers, hidden_size = _positive(raw, "num_hidden_layers"), _positive(raw, "hidden_size")
    num_heads = _positive(raw, "num_attention_heads")
    head_dim = hidden_size // num_heads if raw.get("head_dim") is None else _positive(raw, "head_dim")
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ModelNotSupported(f"head_dim {head_dim} is not a multiple of 8 in [8, {MAX_HEAD_DIM}]")
    has_kv_heads = raw.get("num_key_value_heads") is not None
    num_kv_heads = _positive(raw, "num_key_value_heads") if has_kv_heads else num_heads
    if num_heads % num_kv_heads:
        raise ModelNotSupported(f"{num_heads} attention heads do not divide among {num_kv_heads} key/value heads")
    attention_bias = bool(raw.get("attention_bias", False))
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise ModelNotSupported(f"the dtype {dtype!r} in config.json is not one of {', '.join(DTYPES)}")
    windows = _parse_windows(raw, architecture, num_layers)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_positive(raw, "vocab_size"),
        max_model_len=_positive(raw, "max_position_embeddings"),
        rms_norm_eps=_positive_float(raw, "rms_norm_eps"),
        norm_offset=1.0 if is_gemma else 0.0,
        output_norms=is_gemma,
        qk_norm=architecture in (QWEN3, GEMMA3),
        qkv_bias=architecture == QWEN2 or attention_bias,
        o_bias=attention_bias and architecture != QWEN2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        fused_projections=architecture == PHI3,
        activation=_parse_activation(raw, "hidden_activation" if is_gemma else "hidden_act"),
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        attention_scale=(_positive_float(raw, "query_pre_attn_scalar") if is_gemma else head_dim) ** -0.5,
        attention_soft_cap=_soft_cap(raw, "attn_logit_softcapping"),
        logit_soft_cap=_soft_cap(raw, "final_logit_softcapping"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        layer_windows=windows,
        layer_ropes=_parse_ropes(raw, architecture, windows, head_dim),
        dtype=dtype,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_parse_eos(generation.get("eos_token_id", raw.get("eos_token_id"))),
    )


def _refuse_what_is_not_computed(raw: dict[str, Any], architecture: str) -> None:
    if raw.get("quantization_config"):
        raise ModelNotSupported(
            "quantization_config in config.json: quantized base models are not supported, use the float weights"
        )
    for name, (neutral, readers) in _DECISIVE.items():
        if architecture not in readers and raw.get(name) not in neutral:
            _refuse_field(name, raw[name], architecture)


def _refuse_field(name: str, value: Any, architecture: str) -> None:
    raise ModelNotSupported(f"{name} = {_shown(value)} in config.json is not supported for {architecture}")


def _parse_activation(raw: dict[str, Any], name: str) -> str:
    activation = raw.get(name, "silu")
    if activation not in _ACTIVATIONS:
        raise ModelNotSupported(
            f"the activation {activation!r} ({name} in config.json) is not supported; {', '.join(_ACTIVATIONS)} are"
        )
    return _ACTIVATIONS[activation]


def _parse_windows(raw: dict[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window; `layer_types` decides for Qwen and Gemma and must agree with the rest elsewhere."""
    is_windowed = raw.get("sliding_window") is not None and architecture != LLAMA
    if architecture in QWEN:
        is_windowed = is_windowed and bool(raw.get("use_sliding_window", False))
    if architecture == GEMMA2:
        usual = [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
    elif architecture == GEMMA3:
        pattern = _positive({"sliding_window_pattern": 6, **raw}, "sliding_window_pattern")
        usual = [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    else:
        first = int(raw["max_window_layers"]) if architecture in QWEN else 0
        usual = [SLIDING if is_windowed and layer >= first else FULL for layer in range(num_layers)]
    kinds = usual if raw.get("layer_types") is None else raw["layer_types"]
    if len(kinds) != num_layers:
        raise ModelNotSupported(f"layer_types names {len(kinds)} layers of {num_layers}")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ModelNotSupported(f"layer_types names {kind!r}; {FULL} and {SLIDING} are supported")
    if kinds != usual and architecture not in (*QWEN, *GEMMA):
        _refuse_field("layer_types", kinds, architecture)
    if SLIDING in kinds and not is_windowed:
        raise ModelNotSupported("layer_types in config.json names sliding layers, but no sliding_window is in use")
    window = _positive(raw, "sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _parse_ropes(
    raw: dict[str, Any], architecture: str, windows: Sequence[int | None], head_dim: int
) -> tuple[RopeConfig, ...]:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = raw.get("rope_parameters") or {}
    if architecture != GEMMA3:
        given = raw.get("rope_scaling") or given
        theta = raw.get("rope_theta")
        rope = _parse_rope({"rope_theta": 10000.0 if theta is None else theta, **given}, raw, architecture, head_dim)
        return (rope,) * len(windows)
    # Gemma 3 turns its windowed layers faster, and only the others are scaled to a longer context.
    for name in given:
        if name not in (FULL, SLIDING):
            _refuse_field(f"rope_parameters.{name}", given[name], architecture)
    whole = {"rope_theta": raw.get("rope_theta", 1e6), **(given.get(FULL) or {}), **(raw.get("rope_scaling") or {})}
    local = {"rope_theta": raw.get("rope_local_base_freq", 1e4), **(given.get(SLIDING) or {})}
    whole_rope, local_rope = (_parse_rope(one, raw, architecture, head_dim) for one in (whole, local))
    return tuple(whole_rope if window is None else local_rope for window in windows)


def _parse_rope(given: dict[str, Any], raw: dict[str, Any], architecture: str, head_dim: int) -> RopeConfig:
    kind = given.get("rope_type") or given.get("type") or "default"
    if architecture == PHI3 and kind in ("su", "yarn"):
        # Names that Phi-3's first configurations gave it.
        kind = "longrope"
    kinds = ("default", "longrope") if architecture == PHI3 else ("default", "linear", "llama3")
    if kind not in kinds:
        raise ModelNotSupported(
            f"the rotary embedding {kind!r} of {architecture} is not supported; {', '.join(kinds)} are"
        )
    known = ("rope_theta", "rope_type", "type", "partial_rotary_factor", *_ROPE_FIELDS[kind])
    for name, value in given.items():
        if name not in known and value is not None:
            _refuse_field(f"{name} of the rotary embedding {kind!r}", value, architecture)
    theta = _positive_float(given, "rope_theta")
    fraction = _rotary_fraction(given, raw, architecture)
    if kind == "default":
        return RopeConfig(theta=theta, rotary_fraction=fraction)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_positive_float(given, "factor"))
    original = _original_max_len(given, raw)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=_positive_float(given, "factor"),
            low_freq_factor=_positive_float(given, "low_freq_factor"),
            high_freq_factor=_positive_float(given, "high_freq_factor"),
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
        attention_factor=_attention_factor(given, _positive(raw, "max_position_embeddings") / original, original),
    )


def _rotary_fraction(given: dict[str, Any], raw: dict[str, Any], architecture: str) -> float:
    found = [one["partial_rotary_factor"] for one in (given, raw) if one.get("partial_rotary_factor") is not None]
    fraction = _positive_float({"partial_rotary_factor": found[0] if found else 1.0}, "partial_rotary_factor")
    if fraction > 1 or (fraction != 1 and architecture != PHI3):
        _refuse_field("partial_rotary_factor", fraction, architecture)
    return fraction


def _original_max_len(given: dict[str, Any], raw: dict[str, Any]) -> int:
    """The context before it was stretched; outside the rotary settings it takes precedence, as in transformers."""
    name = "original_max_position_embeddings"
    return _positive(raw if raw.get(name) is not None else given, name)


def _attention_factor(given: dict[str, Any], stretch: float, original: int) -> float:
    """What LongRoPE multiplies cosine and sine by (Ding et al., 2024): by default from how far the context grew."""
    if given.get("attention_factor") is not None:
        return _positive_float(given, "attention_factor")
    factor = stretch if given.get("factor") is None else _positive_float(given, "factor")
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _pair_factors(given: dict[str, Any], name: str, num_pairs: int) -> tuple[float, ...]:
    factors = tuple(_positive_float({name: factor}, name) for factor in given[name])
    if len(factors) != num_pairs:
        raise ModelNotSupported(f"{name} in config.json has {len(factors)} factors for {num_pairs} pairs of channels")
    return factors


def _soft_cap(raw: dict[str, Any], name: str) -> float | None:
    return None if raw.get(name) is None else _positive_float(raw, name)


def _parse_eos(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)


def _positive(raw: dict[str, Any], name: str) -> int:
    value = raw[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {_shown(value)}, not a positive integer")
    return value


def _positive_float(raw: dict[str, Any], name: str) -> float:
    value = raw[name]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {_shown(value)}, not a positive number")
    return float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
