from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.module_places import module_places
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import pack
from loramux.adapter_store.validation.validation import validate_files
from loramux.kernels.layout import LinearShape, part_layout

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


@pytest.fixture
def target(target: PackTarget) -> PackTarget:
    vocab_size, hidden_size = SIZES["vocab_size"], SIZES["hidden_size"]
    embedding = LinearShape("model.embed_tokens", vocab_size, hidden_size, is_embedding=True)
    return replace(target, outer_modules=(embedding, LinearShape("lm_head", hidden_size, vocab_size)))


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
        pytest.param(
            {
                "r": 3,
                "target_modules": ["lm_head", "embed_tokens", "v_proj"],
                "rank_pattern": {"lm_head": 5},
                "alpha_pattern": {"embed_tokens": 4},
                "use_rslora": True,
            },
            "float32",
            id="outer modules",
        ),
        pytest.param(
            {"r": 2, "target_modules": ["lm_head", "embed_tokens", "k_proj"], "layers_to_transform": [1]},
            "float32",
            id="one layer and the head",
        ),
        pytest.param(
            {
                "r": 4,
                "target_modules": ["q_proj", "k_proj", "v_proj", "up_proj"],
                "rank_pattern": {r".*\.layers\.1\..*v_proj": 6, "v_proj": 3},
                "alpha_pattern": {r".*\.layers\.1\..*(q_proj|k_proj)$": 3, r"^model\.layers\.0\..*": 9, "q_proj": 5},
            },
            "float32",
            id="expressions",
        ),
        pytest.param({"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "mica"}, "float32", id="MiCA"),
        pytest.param(
            {"r": 4, "target_modules": ["q_proj"], "velora_config": {"num_groups": 8}}, "float32", id="VeLoRA"
        ),
        pytest.param(
            {"r": 4, "target_modules": ["up_proj"], "monteclora_config": {"num_samples": 2, "buffer_size": 2}},
            "float32",
            id="MonteCLoRA",
        ),
        pytest.param({"r": 4, "target_modules": ["q_proj"], "bias": "all"}, "float32", id="biases of a base without"),
    ],
)
def test_saved_adapter_packs_to_the_same_products(
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
        model.save_pretrained(tmp_path, save_embedding_layers=False)
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
    tolerance = 1e-6 if dtype == "float32" else 1e-2
    for place in module_places(target):
        rank, begins = packed.layout.rank_and_offsets(place.layer, place.module)
        if not rank:
            continue
        is_outer = place.layer is None
        stream = (pages[: packed.layout.num_outer_pages] if is_outer else pages[:, place.layer]).reshape(-1)
        geometry = target.geometry.flat if is_outer else target.geometry
        halves = []
        for half, begin in enumerate(begins[:2]):
            part = part_layout(place.shape, half, rank, geometry.adapter_elements)
            rows = stream[begin : begin + part.num_elements].reshape(part.num_rows, part.row.padded_len)
            halves.append(rows[:, : part.row.row_len])
        scales = packed.outer_scales if is_outer else packed.scales[place.layer]
        a = halves[0].T if place.shape.is_embedding else halves[0]  # [rank, in_features]
        product = scales[place.module] * (halves[1].T @ a)
        # An embedding's weight is [tokens, hidden_size].
        delta = wanted.pop(place.key).T if place.shape.is_embedding else wanted.pop(place.key)
        np.testing.assert_allclose(product, delta, rtol=tolerance, atol=tolerance * np.abs(delta).max())
    assert not wanted
