"""What the real peft library saves is understood: names, ranks, scales, chosen modules, and the very products B A."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.canonical import write_canonical
from loramux.adapter_store.packing import pack
from loramux.adapter_store.records import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.target import PackTarget
from loramux.adapter_store.validation import validate_files
from loramux.kernels.layout import row_layout

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def base() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.fixture(scope="module")
def fused_base() -> Any:
    import torch
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    return Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0))


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        pytest.param({"r": 8, "target_modules": ["q_proj", "v_proj"]}, "float32", id="plain"),
        pytest.param(
            {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "use_rslora": True}, "float32", id="rsLoRA"
        ),
        pytest.param(
            {
                "r": 4,
                "target_modules": ["gate_proj", "o_proj"],
                "rank_pattern": {"layers.1.mlp.gate_proj": 7},
                "alpha_pattern": {"o_proj": 2},
            },
            "float32",
            id="patterns",
        ),
        pytest.param({"r": 2, "target_modules": ["down_proj"], "layers_to_transform": [1]}, "float32", id="one layer"),
        pytest.param(
            {"r": 4, "target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
            "float32",
            id="exclusion",
        ),
        pytest.param({"r": 16, "target_modules": ["up_proj"]}, "bfloat16", id="bfloat16"),
    ],
)
def test_a_saved_adapter_packs_to_its_own_products(
    base: Any, target: PackTarget, tmp_path: Path, settings: dict[str, Any], dtype: str
) -> None:
    assert_packs_to_its_own_products(base, target, tmp_path, settings, dtype)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "use_rslora": True}, id="rsLoRA"),
        pytest.param(
            {
                "r": 4,
                "target_modules": ["qkv_proj", "gate_up_proj"],
                "rank_pattern": {"layers.1.self_attn.qkv_proj": 7},
                "alpha_pattern": {"gate_up_proj": 2},
            },
            id="patterns",
        ),
    ],
)
def test_a_fused_linear_has_one_adapter(
    fused_base: Any, fused_target: PackTarget, tmp_path: Path, settings: dict[str, Any]
) -> None:
    assert_packs_to_its_own_products(fused_base, fused_target, tmp_path, settings, "float32")


def assert_packs_to_its_own_products(
    base: Any, target: PackTarget, tmp_path: Path, settings: dict[str, Any], dtype: str
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    try:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
                parameter.data = parameter.data.to(getattr(torch, dtype))
        model.save_pretrained(tmp_path)
        wanted = {
            name.removeprefix("base_model.model."): module.get_delta_weight("default").detach().float().numpy()
            for name, module in model.named_modules()
            if hasattr(module, "get_delta_weight")
        }
    finally:
        model.unload()
    report = validate_files((tmp_path / CONFIG_FILE).read_bytes(), tmp_path / TENSORS_FILE, target)
    write_canonical(tmp_path / TENSORS_FILE, report.scales, tmp_path / "canonical")
    packed = pack(tmp_path / "canonical", target)
    assert wanted.keys() == report.scales.keys()
    pages = packed.payload.view(target.storage_dtype)
    for layer in range(target.geometry.num_layers):
        stream = pages[:, layer].reshape(-1)
        for m, module in enumerate(target.modules):
            rank = int(packed.layout.ranks[layer, m])
            if not rank:
                continue
            halves = []
            for half, row_len in enumerate((module.in_features, module.out_features)):
                padded_len = row_layout(row_len, target.geometry.adapter_elements).padded_len
                begin = packed.layout.offsets[layer, m, half]
                halves.append(stream[begin : begin + rank * padded_len].reshape(rank, padded_len)[:, :row_len])
            product = packed.scales[layer, m] * (halves[1].T @ halves[0])
            delta = wanted.pop(f"model.layers.{layer}.{module.name}")
            tolerance = 1e-6 if dtype == "float32" else 1e-2
            np.testing.assert_allclose(product, delta, rtol=tolerance, atol=tolerance * np.abs(delta).max())
    assert not wanted
