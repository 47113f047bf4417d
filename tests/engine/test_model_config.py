"""What a model directory may say, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loramux.engine.errors import ModelNotSupported
from loramux.engine.model_config import ModelConfig, RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def load(tmp_path: Path, changes: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.load(tmp_path)


def test_llama(tmp_path: Path) -> None:
    config = load(tmp_path, {})
    assert (config.head_dim, config.dtype, config.eos_token_ids) == (16, "bfloat16", (2,))
    assert [module.name for module in config.modules][:2] == ["self_attn.q_proj", "self_attn.k_proj"]
    assert config.geometry(2, 2).page_bytes == 16 * 2 * 2 * 16 * 2


def test_generation_config_decides_what_ends_a_sequence(tmp_path: Path) -> None:
    assert load(tmp_path, {}, {"eos_token_id": [2, 5]}).eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}}, RopeConfig(7e3)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(1e4, "linear", 2.0)),
    ],
    ids=["theta alone", "transformers 5", "before transformers 5"],
)
def test_rope(tmp_path: Path, changes: dict[str, Any], expected: RopeConfig) -> None:
    assert load(tmp_path, changes).rope == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, (32,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}, (None,) * 4),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 32,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 32),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 8, None, 8),
        ),
    ],
    ids=["mistral", "qwen2 without", "qwen2 from a layer on", "qwen3 by layer"],
)
def test_sliding_windows(tmp_path: Path, changes: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert load(tmp_path, changes).layer_windows == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported"),
        ({"architectures": None}, "none is not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"head_dim": 20}, "head_dim 20"),
        ({"head_dim": 512}, "head_dim 512"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"dtype": "float8_e4m3fn"}, "dtype"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"vocab_size": None}, "malformed"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value).split()[0],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelNotSupported, match=message):
        load(tmp_path, changes)


@pytest.mark.parametrize("text", [None, "{", "[1]"], ids=["absent", "not JSON", "no object"])
def test_a_directory_without_a_usable_config_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelNotSupported, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="does not exist"):
        ModelConfig.load(tmp_path / "none")
