"""Converting a llama.cpp adapter restores the PEFT adapter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from loramux.adapter_store.errors import ConversionRefused
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.gguf.conversion import convert_gguf
from loramux.adapter_store.validation.peft_config import parse_peft_config
from tests.adapter_store.gguf.llama_cpp import rounded, write_gguf

SIZES: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HEAD_DIM = 16
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BASES: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=HEAD_DIM)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=HEAD_DIM)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0)),
}


def peft_adapter(directory: Path, architecture: str = "llama", **settings: Any) -> dict[str, torch.Tensor]:
    """Save a random adapter with peft and return its tensors."""
    torch.manual_seed(3)
    config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(BASES[architecture](), config)
    model.save_pretrained(directory, save_embedding_layers=False)
    return load_file(directory / TENSORS_FILE)


def converted(path: Path, head_dim: int | None = HEAD_DIM) -> tuple[dict[str, Any], Any]:
    """Convert a file, and return its tensors and parsed configuration."""
    directory = path.with_suffix("")
    directory.mkdir()
    convert_gguf(path, directory, head_dim)
    return load_arrays(directory / TENSORS_FILE), parse_peft_config((directory / CONFIG_FILE).read_bytes())


def refusal(path: Path, head_dim: int | None = HEAD_DIM) -> tuple[str, str | None]:
    """Return the code and the param of the refusal, and check that nothing was written."""
    directory = path.with_suffix("")
    directory.mkdir()
    with pytest.raises(ConversionRefused) as error:
        convert_gguf(path, directory, head_dim)
    assert list(directory.iterdir()) == []
    return error.value.code, error.value.param


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    ("architecture", "modules"),
    [
        ("llama", ["q_proj"]),
        ("llama", ["k_proj", "v_proj"]),
        ("llama", [*ALL, "lm_head", "embed_tokens"]),
        ("qwen3", ALL),
        ("gemma2", ALL),
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_tensors_return_unchanged(tmp_path: Path, architecture: str, modules: list[str], dtype: str) -> None:
    tensors = peft_adapter(tmp_path / "peft", architecture, r=4, lora_alpha=10, target_modules=modules)
    write_gguf(tmp_path / "a.gguf", tensors, alpha=10.0, architecture=architecture, dtype=dtype)
    found, config = converted(tmp_path / "a.gguf", HEAD_DIM if architecture == "llama" else None)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], rounded(tensor, dtype), err_msg=name)
    assert (config.rank, config.alpha, config.use_rslora) == (4, 10.0, False)
    assert {f"{key}.weight" for key in config.target_modules} == {
        name.removeprefix("base_model.model.").partition(".lora_")[0] + ".weight" for name in tensors
    }


def test_ranks_can_differ_by_module(tmp_path: Path) -> None:
    tensors = peft_adapter(
        tmp_path / "peft",
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 7},
    )
    write_gguf(tmp_path / "a.gguf", tensors, alpha=6.0)
    found, config = converted(tmp_path / "a.gguf")
    assert found["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (7, 64)
    assert (config.rank, config.alpha, config.rank_pattern) == (4, 6.0, (("model.layers.1.self_attn.q_proj", 7),))
    assert config.alpha_pattern == ()


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_alpha_of_zero_means_a_scale_of_one(tmp_path: Path, alpha: float | None) -> None:
    tensors = peft_adapter(
        tmp_path / "peft", r=4, target_modules=["v_proj", "o_proj"], rank_pattern={"layers.1.self_attn.v_proj": 3}
    )
    write_gguf(tmp_path / "a.gguf", tensors, alpha=alpha)
    _, config = converted(tmp_path / "a.gguf")
    assert (config.rank, config.alpha) == (4, 4.0)
    assert config.rank_pattern == (("model.layers.1.self_attn.v_proj", 3),)
    assert config.alpha_pattern == (("model.layers.1.self_attn.v_proj", 3.0),)


def test_invocation_tokens_reach_validation(tmp_path: Path) -> None:
    tensors = peft_adapter(tmp_path / "peft", r=4, target_modules=["v_proj"])
    write_gguf(tmp_path / "a.gguf", tensors, alpha=8.0, metadata={"adapter.alora.invocation_tokens": [5, 6]})
    (tmp_path / "a").mkdir()
    convert_gguf(tmp_path / "a.gguf", tmp_path / "a")
    text = (tmp_path / "a" / CONFIG_FILE).read_bytes()
    assert json.loads(text)["alora_invocation_tokens"] == [5, 6]
    assert parse_peft_config(text).invocation_tokens == (5, 6)


def test_q_and_k_of_a_llama_need_the_base(tmp_path: Path) -> None:
    tensors = peft_adapter(tmp_path / "peft", r=4, target_modules=["q_proj"])
    write_gguf(tmp_path / "a.gguf", tensors, alpha=8.0)
    assert refusal(tmp_path / "a.gguf", None) == ("base_needed", "blk.0.attn_q.weight.lora_b")


@pytest.mark.parametrize("head_dim", [48, 3])
def test_heads_of_another_base_are_refused(tmp_path: Path, head_dim: int) -> None:
    tensors = peft_adapter(tmp_path / "peft", r=4, target_modules=["q_proj"])
    write_gguf(tmp_path / "a.gguf", tensors, alpha=8.0)
    assert refusal(tmp_path / "a.gguf", head_dim) == ("base_mismatch", "blk.0.attn_q.weight.lora_b")


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"general.type": "model"}, "not_an_adapter", "general.type"),
        ({"general.type": None}, "not_an_adapter", "general.type"),
        ({"adapter.type": "control_vector"}, "not_an_adapter", "adapter.type"),
        ({"general.alignment": "32"}, "invalid_header", "general.alignment"),
    ],
)
def test_other_kinds_of_files_are_refused(tmp_path: Path, changes: dict[str, Any], code: str, param: str) -> None:
    write_gguf(tmp_path / "a.gguf", {V_A: torch.ones(2, 64), V_B: torch.ones(32, 2)}, alpha=8.0, metadata=changes)
    assert refusal(tmp_path / "a.gguf") == (code, param)


PREFIX = "base_model.model.model.layers.0.self_attn"
V_A, V_B = f"{PREFIX}.v_proj.lora_A.weight", f"{PREFIX}.v_proj.lora_B.weight"


@pytest.mark.parametrize("architecture", ["mamba", "llama4", "granite"])
def test_other_architectures_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    write_gguf(tmp_path / "a.gguf", {V_A: torch.ones(2, 64)}, alpha=8.0, architecture=architecture)
    assert refusal(tmp_path / "a.gguf") == ("unsupported_architecture", "general.architecture")


def test_quantised_adapter_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", {V_A: torch.ones(32, 64), V_B: torch.ones(32, 32)}, alpha=8.0, dtype="Q8_0")
    with pytest.raises(ConversionRefused, match=r"Q8_0 .* --outtype f16"):
        convert_gguf(tmp_path / "a.gguf", tmp_path)
    assert refusal(tmp_path / "a.gguf") == ("unsupported_dtype", "blk.0.attn_v.weight.lora_a")


def test_base_is_refused_as_a_whole_model_despite_its_tensor_types(tmp_path: Path) -> None:
    model = {"general.type": "model", "adapter.type": None}
    tensors = {V_A: torch.ones(32, 64), V_B: torch.ones(32, 32)}
    write_gguf(tmp_path / "a.gguf", tensors, alpha=8.0, dtype="Q8_0", metadata=model)
    with pytest.raises(ConversionRefused, match="contains a whole model, not an adapter"):
        convert_gguf(tmp_path / "a.gguf", tmp_path)
    assert refusal(tmp_path / "a.gguf") == ("not_an_adapter", "general.type")


@pytest.mark.parametrize("alpha", [-1.0, math.inf, math.nan])
def test_unusable_alpha_is_refused(tmp_path: Path, alpha: float) -> None:
    write_gguf(tmp_path / "a.gguf", {V_A: torch.ones(2, 64), V_B: torch.ones(32, 2)}, alpha=alpha)
    assert refusal(tmp_path / "a.gguf") == ("alpha_out_of_range", "adapter.lora.alpha")


@pytest.mark.parametrize(
    ("tensors", "code", "param"),
    [
        ({}, "missing_tensor", None),
        ({V_A: torch.ones(2, 64)}, "missing_tensor", "blk.0.attn_v.weight.lora_a"),
        ({V_A: torch.ones(2, 64), V_B: torch.ones(32, 3)}, "rank_mismatch", "blk.0.attn_v.weight.lora_a"),
        ({V_A: torch.ones(2, 2, 64)}, "tensor_not_2d", "blk.0.attn_v.weight.lora_a"),
        ({V_A: torch.ones(64)}, "tensor_not_2d", "blk.0.attn_v.weight.lora_a"),
        (
            {"model.layers.0.input_layernorm.lora_A.weight": torch.ones(2, 64)},
            "unexpected_tensor",
            "blk.0.attn_norm.weight.lora_a",
        ),
    ],
)
def test_tensors_that_are_no_pairs_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], code: str, param: str | None
) -> None:
    write_gguf(tmp_path / "a.gguf", tensors, alpha=8.0)
    assert refusal(tmp_path / "a.gguf") == (code, param)
