from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loramux.engine.architectures.layer_heads import LayerHeads
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.rope_config import RopeConfig
from loramux.engine.architectures.weight_shapes import weight_shapes
from loramux.engine.decoder.rotary import inverse_frequencies
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.kernels.layout import LinearShape

# As published: layers without a window have heads of their own, and the last layers have no K and V.
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": 100,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
PLAIN = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
MIXTURE = {
    **PLAIN,
    "enable_moe_block": True,
    "use_double_wide_mlp": False,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
}


def load(tmp_path: Path, changes: dict[str, Any]) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA4, **changes}))
    return ModelConfig.load(tmp_path)


def test_the_last_layers_read_the_k_and_v_of_earlier_ones(tmp_path: Path) -> None:
    config = load(tmp_path, {})
    assert config.attention.kv_sources == (*range(8), 7, 7, 7, 5)
    assert config.attention.layer_heads[4:6] == (LayerHeads(2, 16), LayerHeads(2, 32))
    assert (config.attention.num_kv_heads, config.attention.head_dim) == (2, 32)
    assert config.geometry(2, 2).page_bytes == 16 * 2 * 2 * 32 * 2
    assert config.layer_intermediate_sizes == (96,) * 8 + (192,) * 4
    assert [name for name, _ in config.attention.norm_sizes(8)] == ["q_norm"]
    assert (config.attention.scale, config.embedding_scale, config.norm_offset) == (1.0, 8.0, 0.0)
    assert [config.modules[index].out_features for index in config.layer_groups(8)[0]] == [64]
    assert "model.layers.8.self_attn.k_proj." in config.draft_tensors


def test_linears_that_differ_by_layer_have_the_same_name(tmp_path: Path) -> None:
    modules = load(tmp_path, {"num_hidden_layers": 6, "num_kv_shared_layers": 0}).modules
    windowed = (0, 1, 2, 3, 4)
    assert modules[:4] == (
        LinearShape("self_attn.q_proj", 64, 64, layers=windowed),
        LinearShape("self_attn.q_proj", 64, 128, layers=(5,)),
        LinearShape("self_attn.k_proj", 64, 32, layers=windowed),
        LinearShape("self_attn.k_proj", 64, 64, layers=(5,)),
    )
    assert modules[-3:] == (
        LinearShape("per_layer_input_gate", 64, 24),
        LinearShape("per_layer_projection", 24, 64),
        LinearShape("model.per_layer_model_projection", 64, 6 * 24, layers=(0,)),
    )


def test_k_is_also_v_in_layers_without_a_window(tmp_path: Path) -> None:
    few = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_hidden_layers": 6}
    config = load(tmp_path, {**PLAIN, **few})
    assert config.attention.layer_heads[4:] == (LayerHeads(2, 16), LayerHeads(1, 32))
    assert config.attention.layers_without_v == (5,)
    names = weight_shapes(config)
    assert "model.layers.4.self_attn.v_proj.weight" in names
    assert "model.layers.5.self_attn.v_proj.weight" not in names
    # Without the first field, transformers ignores the second.
    assert load(tmp_path, {**PLAIN, **few, "attention_k_eq_v": False}).attention.layer_heads[5] == LayerHeads(2, 32)


def test_heads_by_layer_replace_the_fields_of_published_files(tmp_path: Path) -> None:
    saved = {"per_layer_config": {"5": {"head_dim": 64}}, "num_hidden_layers": 6, **PLAIN}
    assert load(tmp_path, saved).attention.layer_heads == (LayerHeads(2, 16),) * 5 + (LayerHeads(2, 64),)


@pytest.mark.parametrize("ropes", [{}, {"rope_parameters": None}], ids=["absent", "null"])
def test_layers_without_a_window_rotate_a_quarter_of_each_half(ropes: dict[str, Any], tmp_path: Path) -> None:
    config = load(tmp_path, {**ropes, "num_hidden_layers": 6, **PLAIN})
    whole = RopeConfig(theta=1e6, kind="proportional", rotary_fraction=0.25)
    assert config.attention.ropes == (*[RopeConfig(theta=1e4)] * 5, whole)
    frequencies = inverse_frequencies(whole, 32, 256)
    assert frequencies.tolist() == pytest.approx([1e6 ** (-2 * i / 32) for i in range(4)] + [0.0] * 12)


def test_experts_stand_beside_the_block_of_all_tokens(tmp_path: Path) -> None:
    config = load(tmp_path, {**MIXTURE, "num_hidden_layers": 6})
    assert config.mixture is not None
    assert config.mixture.routing.normalizes
    shapes = weight_shapes(config)
    assert shapes["model.layers.0.experts.gate_up_proj"] == (4, 80, 64)
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (96, 64)
    assert {f"model.layers.0.{name}" for name in ("router.scale", "router.per_expert_scale")} < shapes.keys()
    assert load(tmp_path, PLAIN).mixture is None


GEMMA3N: dict[str, Any] = {
    "architectures": ["Gemma3nForCausalLM"],
    "intermediate_size": [96] * 10 + [80] * 2,
    "use_double_wide_mlp": None,
    "use_bidirectional_attention": None,
    "global_head_dim": None,
    "vocab_size_per_layer_input": 90,
}


def test_gemma_3n_has_streams_and_sparse_layers(tmp_path: Path) -> None:
    config = load(tmp_path, GEMMA3N)
    assert config.altup is not None
    assert (config.altup.num_streams, config.altup.laurel_rank, config.altup.scales_output) == (4, 64, True)
    assert config.altup.sparsities == (0.95,) * 10 + (0.0,) * 2
    assert config.layer_intermediate_sizes == (96,) * 10 + (80,) * 2
    assert (config.attention.windows[3:5], config.attention.kv_sources[8:]) == ((512, None), (7, 4, 7, 7))
    shapes = weight_shapes(config)
    assert shapes["model.altup_projections.2.weight"] == (64, 64)
    assert shapes["model.layers.0.altup.prediction_coefs.weight"] == (16, 4)
    assert shapes["model.embed_tokens_per_layer.weight"] == (90, 12 * 24)
    assert "model.layers.0.layer_scalar" not in shapes
    dense = load(tmp_path, {**GEMMA3N, "activation_sparsity_pattern": [0.0] * 12}).altup
    assert dense is not None
    assert set(dense.sparsities) == {0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**GEMMA3N, "altup_active_idx": 1}, "altup_active_idx = 1"),
        ({**GEMMA3N, "altup_num_inputs": 17}, "altup_num_inputs 17 with altup_active_idx 0"),
        ({**GEMMA3N, "activation_sparsity_pattern": [1.0] * 12}, "activation_sparsity_pattern"),
        ({**GEMMA3N, "activation_sparsity_pattern": [0.5]}, "for each of 12 layers"),
        ({**GEMMA3N, "intermediate_size": [96]}, "intermediate_size has 1 entries for 12 layers"),
        ({**GEMMA3N, "intermediate_size": [0] * 12}, "intermediate_size is 0"),
        ({**GEMMA3N, "vocab_size_per_layer_input": 101}, "vocab_size_per_layer_input = 101"),
        ({"num_kv_shared_layers": 12}, "leaves no 'full_attention' layer"),
        ({"num_kv_shared_layers": 7}, "leaves no 'full_attention' layer"),
        ({"num_kv_shared_layers": -1}, "not an integer of at least 0"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"layer_types": ["full_attention"] * 11 + ["sliding_attention"]}, r"layer_types\[-1\]"),
        ({"global_head_dim": 24}, "one size must be a multiple of the other"),
        ({"global_head_dim": 520}, r"head_dim 520 is not a multiple of 8 in \[8, 512\]"),
        ({"per_layer_config": {"5": {"head_dim": 32}}}, "layers of one kind must have equal heads"),
        ({"per_layer_config": {"5": {"intermediate_size": 32}}}, "per_layer_config.5.intermediate_size"),
        ({"per_layer_config": {"5": {"num_key_value_heads": 3}}}, "4 attention heads cannot be divided among 3"),
        ({"per_layer_config": [1]}, "incomplete or malformed"),
        ({"vocab_size_per_layer_input": 90}, "vocab_size_per_layer_input = 90"),
        ({**MIXTURE, "use_double_wide_mlp": True}, "both use_double_wide_mlp and enable_moe_block"),
        ({**MIXTURE, "top_k_experts": 5}, "top_k_experts is 5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "the rotary embedding 'yarn'"),
    ],
)
def test_what_contradicts_itself_or_is_not_computed_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelNotSupported, match=message):
        load(tmp_path, changes)
