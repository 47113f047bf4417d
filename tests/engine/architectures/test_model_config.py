from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.engine.architectures.family import GEMMA_NORMS, HEAD_WIDE, OUTPUT_NORMS, PARALLEL_NORMS
from loramux.engine.architectures.feed_forward_config import GELU_TANH, RELU_SQUARED, SILU
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.rope_config import NO_ROPE, RopeConfig
from loramux.engine.architectures.weight_files import stored_tensors
from loramux.engine.architectures.weight_shapes import weight_shapes
from loramux.engine.decoder.rotary import in_halves, inverse_frequencies, rotary_tables
from loramux.engine.decoder.weights import open_weights
from loramux.engine.protocol.errors import ModelNotSupported

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


GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
QWEN35 = {"architectures": ["Qwen3_5ForCausalLM"]}
LONGROPE = {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
    "original_max_position_embeddings": 64,
}


WRAPPED = [("LlavaForConditionalGeneration", "llama"), ("LlavaNextForConditionalGeneration", "mistral")]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def load(tmp_path: Path, changes: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.load(tmp_path)


def test_llama_config_is_read(tmp_path: Path) -> None:
    config = load(tmp_path, {})
    assert (config.attention.head_dim, config.dtype, config.eos_token_ids) == (16, "bfloat16", (2,))
    assert [module.name for module in config.modules][:2] == ["self_attn.q_proj", "self_attn.k_proj"]
    assert config.geometry(2, 2).page_bytes == 16 * 2 * 2 * 16 * 2


def test_generation_config_sets_the_end_of_sequence_tokens(tmp_path: Path) -> None:
    assert load(tmp_path, {}, {"eos_token_id": [2, 5]}).eos_token_ids == (2, 5)


@pytest.mark.parametrize(("listed", "ends"), [(-1, ()), (100, ()), ([2, 99, 100, 1 << 70, -3], (2, 99)), (None, ())])
def test_end_tokens_that_the_model_lacks_are_left_out(tmp_path: Path, listed: Any, ends: tuple[int, ...]) -> None:
    """As indices, they would reach beyond the logits."""
    assert load(tmp_path, {"eos_token_id": listed}).eos_token_ids == ends


def test_a_null_in_the_generation_config_leaves_the_end_tokens_to_the_config(tmp_path: Path) -> None:
    assert load(tmp_path, {}, {"eos_token_id": None}).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        pytest.param({"tokenizer_config.json": {"eos_token": "</s>"}}, (2,), id="no such token"),
        pytest.param(
            {
                "tokenizer_config.json": {
                    "eos_token": {"content": "<end>"},
                    "added_tokens_decoder": {"6": {"content": "<end>"}},
                }
            },
            (2, 6),
            id="listed in the configuration",
        ),
        pytest.param(
            {
                "tokenizer_config.json": {"eos_token": "<end>"},
                "tokenizer.json": {"added_tokens": [{"id": 7, "content": "<end>"}]},
            },
            (2, 7),
            id="added token",
        ),
        pytest.param(
            {
                "special_tokens_map.json": {"eos_token": "<end>"},
                "tokenizer.json": {"model": {"vocab": {"<start>": 3, "<end>": 4}}},
            },
            (2, 4),
            id="ordinary token",
        ),
        pytest.param(
            {
                "tokenizer_config.json": {"eos_token": "<end>"},
                "tokenizer.json": {"model": {"vocab": [["<start>", 0.0], ["<end>", 0.0]]}},
            },
            (2, 1),
            id="unigram",
        ),
        pytest.param(
            {"tokenizer_config.json": {"eos_token": "<end>"}, "tokenizer.json": {"added_tokens": [1]}},
            (2,),
            id="malformed",
        ),
        pytest.param(
            {"tokenizer_config.json": {"eos_token": "<end>"}, "tokenizer.json": {"model": {"vocab": [[]]}}},
            (2,),
            id="malformed unigram",
        ),
        pytest.param({"tokenizer_config.json": [], "tokenizer.json": {}}, (2,), id="no object"),
    ],
)
def test_the_end_token_of_the_tokenizer_ends_answers_too(
    tmp_path: Path, files: dict[str, Any], ends: tuple[int, ...]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load(tmp_path, {}).eos_token_ids == ends


def test_gemma_2_defaults_match_transformers(tmp_path: Path) -> None:
    config = load(tmp_path, {**GEMMA2, "num_key_value_heads": 4})
    assert (config.activation, config.norm_offset, config.norms) == (GELU_TANH, 1.0, GEMMA_NORMS)
    assert config.attention.qk_norm is None
    assert (config.attention.soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert (config.attention.scale, config.embedding_scale) == (256**-0.5, 8.0)
    assert config.attention.windows == (4096, None, 4096, None)
    assert config.tied_embeddings
    plain = load(tmp_path, {**GEMMA2, "attn_logit_softcapping": None, "tie_word_embeddings": False})
    assert (plain.attention.soft_cap, plain.tied_embeddings) == (None, False)


def test_gemma_3_windowed_layers_use_their_own_rope(tmp_path: Path) -> None:
    before = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    now = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    local, whole = RopeConfig(theta=1e4), RopeConfig(theta=1e6, kind="linear", factor=8.0)
    for ropes in (before, now):
        config = load(tmp_path, {**GEMMA3, **ropes, "num_hidden_layers": 7, "sliding_window": 32})
        assert config.attention.ropes == (*[local] * 5, whole, local)
        assert config.attention.windows == (*[32] * 5, None, 32)
        assert (config.attention.qk_norm, config.attention.soft_cap, config.logit_soft_cap) == (HEAD_WIDE, None, None)
    by_pattern = load(tmp_path, {**GEMMA3, "sliding_window_pattern": 2})
    assert by_pattern.attention.windows == (4096, None, 4096, None)


def test_phi_3_has_fused_linears(tmp_path: Path) -> None:
    config = load(tmp_path, {**PHI3, "sliding_window": 32})
    assert [(module.name, module.in_features, module.out_features) for module in config.modules] == [
        ("self_attn.qkv_proj", 64, 64 + 2 * 32),
        ("self_attn.o_proj", 64, 64),
        ("mlp.gate_up_proj", 64, 2 * 96),
        ("mlp.down_proj", 96, 64),
    ]
    assert config.module_groups == ((0,), (1,), (2,), (3,), ())
    assert (config.attention.windows, config.activation) == ((32,) * 4, SILU)


def test_qwen_3_5_has_attention_in_every_fourth_layer(tmp_path: Path) -> None:
    config = load(tmp_path, {**QWEN35, "num_hidden_layers": 8})
    assert config.delta is not None
    assert (config.delta.layers, config.delta.attention_layers) == ((0, 1, 2, 4, 5, 6), (3, 7))
    assert (config.attention.head_dim, config.attention.qk_norm) == (256, HEAD_WIDE)
    assert (config.norm_offset, config.attention.has_gates) == (1.0, True)
    assert config.attention.ropes[0].rotary_fraction == 0.25
    assert [(module.name, module.out_features, module.layers) for module in config.modules] == [
        ("self_attn.q_proj", 2 * 4 * 256, (3, 7)),
        ("self_attn.k_proj", 512, (3, 7)),
        ("self_attn.v_proj", 512, (3, 7)),
        ("self_attn.o_proj", 64, (3, 7)),
        ("mlp.gate_proj", 96, None),
        ("mlp.up_proj", 96, None),
        ("mlp.down_proj", 64, None),
        ("linear_attn.in_proj_qkv", 2 * 16 * 128 + 32 * 128, config.delta.layers),
        ("linear_attn.in_proj_z", 32 * 128, config.delta.layers),
        ("linear_attn.in_proj_b", 32, config.delta.layers),
        ("linear_attn.in_proj_a", 32, config.delta.layers),
        ("linear_attn.out_proj", 64, config.delta.layers),
    ]
    assert config.module_groups == ((0, 1, 2, 7, 8, 9, 10), (3, 11), (4, 5), (6,), ())
    assert config.layer_groups(0) == ((7, 8, 9, 10), (11,), (4, 5), (6,), ())
    assert config.layer_groups(3) == ((0, 1, 2), (3,), (4, 5), (6,), ())


def test_the_state_of_qwen_3_5_takes_pages_of_the_pool(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 24, "num_attention_heads": 8, "linear_num_value_heads": 16}
    config = load(tmp_path, {**QWEN35, **sizes})
    geometry = config.geometry(2, 2)
    elements = 18 * (16 * 128 * 128 + 3 * (2 * 16 * 128 + 16 * 128))
    assert config.num_state_pages(geometry) == -(-elements * 4 // geometry.total_page_bytes) == 26


def test_qwen_3_5_without_layers_that_keep_a_state_is_served(tmp_path: Path) -> None:
    config = load(tmp_path, {**QWEN35, "layer_types": ["full_attention"] * 4})
    assert config.delta is None
    assert config.num_state_pages(config.geometry(2, 2)) == 0
    assert all(module.layers is None for module in config.modules)


def test_granite_multiplies_its_activations(tmp_path: Path) -> None:
    multipliers = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125}
    granite = {**multipliers, "logits_scaling": 8, "architectures": ["GraniteForCausalLM"]}
    config = load(tmp_path, granite)
    assert (config.embedding_scale, config.residual_scale, config.attention.scale) == (12, 0.22, 0.0078125)
    assert config.logit_scale == 1 / 8
    assert load(tmp_path, {"architectures": ["GraniteForCausalLM"]}).attention.scale == 1
    # HyperCLOVAX multiplies the logits by this field, while Granite divides them.
    clova = load(tmp_path, {**granite, "attention_multiplier": None, "architectures": ["HyperCLOVAXForCausalLM"]})
    assert (clova.logit_scale, clova.attention.scale) == (8, 16**-0.5)


COHERE2 = {"architectures": ["Cohere2ForCausalLM"]}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "rotated", "windows"),
    [
        (SMOLLM3, [True, True, True, False], [None] * 4),
        ({**SMOLLM3, "no_rope_layer_interval": 2}, [True, False] * 2, [None] * 4),
        (
            {**SMOLLM3, "no_rope_layers": [0, 1, 1, 1, 0], "sliding_window": 8, "use_sliding_window": True},
            [False, True, True, True],
            [8, None, None, None],
        ),
        ({"architectures": ["Exaone4ForCausalLM"]}, [True, True, True, False], [4096, 4096, 4096, None]),
        ({"architectures": ["Exaone4ForCausalLM"], "sliding_window": None}, [True] * 4, [None] * 4),
        (
            {"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LG"},
            [True, False] * 2,
            [4096, None] * 2,
        ),
    ],
    ids=["every fourth", "every second", "listed", "exaone4", "exaone4 without windows", "letters"],
)
def test_layers_without_positions(
    tmp_path: Path, changes: dict[str, Any], rotated: list[bool], windows: list[int | None]
) -> None:
    config = load(tmp_path, changes)
    assert [rope != NO_ROPE for rope in config.attention.ropes] == rotated
    assert list(config.attention.windows) == windows
    cos, sin = rotary_tables(NO_ROPE, config.attention.head_dim, 9)
    assert torch.equal(cos, torch.ones(9, 1))
    assert torch.equal(sin, torch.zeros(9, 1))


def test_olmo_3_scales_only_layers_that_see_the_whole_context(tmp_path: Path) -> None:
    olmo3 = {"architectures": ["Olmo3ForCausalLM"], "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = load(tmp_path, {**olmo3, "rope_theta": 5e5, "sliding_window": 32})
    local, whole = RopeConfig(theta=5e5), RopeConfig(theta=5e5, kind="linear", factor=8.0)
    assert config.attention.ropes == (local, local, local, whole)
    assert config.attention.windows == (32, 32, 32, None)
    assert (config.norms, config.attention.norm_sizes(0)) == (OUTPUT_NORMS, (("q_norm", 64), ("k_norm", 32)))


def test_hunyuan_stretches_theta_once_and_weights_q_after_the_rotation(tmp_path: Path) -> None:
    hunyuan = {"architectures": ["HunYuanDenseV1ForCausalLM"], "num_experts": 1, "use_qk_norm": True}
    scaling = {"type": "dynamic", "alpha": 50.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
    config = load(tmp_path, {**hunyuan, "rope_scaling": {**scaling, "mscale_all_dim": 1.0}, "rope_theta": 1e4})
    assert set(config.attention.ropes) == {RopeConfig(theta=1e4 * 50 ** (16 / 14))}
    assert (config.attention.has_l2_norms, config.attention.has_rotated_norms) == (True, True)
    # Adapters cannot replace the norms of q and k.
    assert not any("self_attn" in norm.name for norm in config.norm_shapes)
    plain = load(tmp_path, {**hunyuan, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert plain.attention.ropes[0].kind == "dynamic"


def test_cohere_2_runs_its_blocks_in_parallel(tmp_path: Path) -> None:
    config = load(tmp_path, {**COHERE2, "sliding_window_pattern": 2})
    assert (config.parallel_blocks, config.has_layer_norms, config.has_norm_biases) == (True, True, False)
    assert (config.norms, config.norm_eps, config.logit_scale) == (PARALLEL_NORMS, 1e-5, 0.0625)
    assert config.attention.windows == (4096, None, 4096, None)
    assert [rope != NO_ROPE for rope in config.attention.ropes] == [True, False, True, False]
    assert (config.attention.interleaved_rotary, config.tied_embeddings) == (True, True)


def test_feed_forward_without_a_gate_has_one_linear_before_the_activation(tmp_path: Path) -> None:
    config = load(tmp_path, {"architectures": ["Starcoder2ForCausalLM"], "norm_epsilon": 1e-3})
    assert [(module.name, module.in_features, module.out_features) for module in config.modules[3:]] == [
        ("self_attn.o_proj", 64, 64),
        ("mlp.c_fc", 64, 96),
        ("mlp.c_proj", 96, 64),
    ]
    assert config.module_groups == ((0, 1, 2), (3,), (4,), (5,), ())
    assert (config.activation, config.norm_eps, config.has_norm_biases) == (GELU_TANH, 1e-3, True)
    assert (config.attention.qkv_bias, config.attention.o_bias, config.mlp_bias) == (True, True, True)
    nemotron = load(tmp_path, {"architectures": ["NemotronForCausalLM"]})
    assert (nemotron.activation, nemotron.norm_offset) == (RELU_SQUARED, 1.0)
    assert nemotron.attention.ropes[0].rotary_fraction == 0.5


def test_gemma_means_the_tanh_form_by_gelu(tmp_path: Path) -> None:
    assert load(tmp_path, {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"}).activation == GELU_TANH


def test_halves_of_reordered_heads_are_the_pairs() -> None:
    heads = torch.arange(20.0).view(1, 2, 10)
    assert in_halves(heads, 3).tolist() == [[[0, 2, 4, 1, 3, 5, 6, 7, 8, 9], [10, 12, 14, 11, 13, 15, 16, 17, 18, 19]]]
    assert torch.equal(in_halves(in_halves(heads, 5), 1), in_halves(heads, 5))


def test_gemma_3_text_config_is_read_with_its_own_defaults(tmp_path: Path) -> None:
    """The text part of the published 4B model names only what differs from the defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    document = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = ModelConfig.load(tmp_path)
    assert (config.attention.num_heads, config.attention.num_kv_heads, config.attention.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_model_len, config.dtype) == (262208, 131072, "bfloat16")
    assert config.attention.windows[:6] == (*[1024] * 5, None)
    assert (config.attention.ropes[0].kind, config.attention.ropes[5].kind) == ("default", "linear")
    assert (config.eos_token_ids, config.tied_embeddings) == ((1, 106), True)


def test_qwen_2_5_vl_config_without_text_config_is_read(tmp_path: Path) -> None:
    flat = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"hidden_size": 1280},
    }
    config = load(tmp_path, flat)
    assert (set(config.attention.ropes), config.attention.qkv_bias) == ({RopeConfig(theta=1e6)}, True)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_longrope_scales_phi_3_beyond_its_original_context(tmp_path: Path, name: str) -> None:
    scaling = {**LONGROPE["rope_scaling"], "type": name}
    config = load(tmp_path, {**PHI3, **LONGROPE, "rope_scaling": scaling})
    (rope,) = set(config.attention.ropes)
    assert (rope.kind, rope.original_max_len, rope.rotary_fraction) == ("longrope", 64, 1.0)
    assert rope.attention_factor == math.sqrt(1 + math.log(256 / 64) / math.log(64))
    usual = inverse_frequencies(RopeConfig(theta=1e4), 16, 256)
    torch.testing.assert_close(inverse_frequencies(rope, 16, 64), usual)
    torch.testing.assert_close(inverse_frequencies(rope, 16, 65), usual / 4)
    cos, sin = rotary_tables(rope, 16, 65)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((65, 8), rope.attention_factor**2))


def test_phi_3_rotates_part_of_each_head(tmp_path: Path) -> None:
    scaling = {**LONGROPE["rope_scaling"], "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "attention_factor": 1.5}
    config = load(tmp_path, {**PHI3, **LONGROPE, "rope_scaling": scaling, "partial_rotary_factor": 0.75})
    assert (config.attention.ropes[0].rotary_fraction, config.attention.ropes[0].attention_factor) == (0.75, 1.5)
    assert rotary_tables(config.attention.ropes[0], config.attention.head_dim, 65)[0].shape == (65, 6)
    plain = load(tmp_path, {**PHI3, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}})
    assert rotary_tables(plain.attention.ropes[0], plain.attention.head_dim, 65)[0].shape == (65, 4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeConfig(theta=1e4)),
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}}, RopeConfig(theta=7e3)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(theta=1e4, kind="linear", factor=2.0)),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            RopeConfig(theta=1e4, kind="dynamic", factor=2.0, original_max_len=256),
        ),
    ],
    ids=["nothing said", "theta alone", "transformers 5", "before transformers 5", "dynamic"],
)
def test_each_kind_of_rope_is_read(tmp_path: Path, changes: dict[str, Any], expected: RopeConfig) -> None:
    assert load(tmp_path, changes).attention.ropes == (expected,) * 4


def test_dynamic_ntk_stretches_the_context_on_request(tmp_path: Path) -> None:
    config = load(tmp_path, {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert (config.max_model_len, config.stretched_model_len) == (256, 1024)
    [rope] = set(config.attention.ropes)
    plain = inverse_frequencies(RopeConfig(theta=1e4), 16, 256)
    assert torch.equal(inverse_frequencies(rope, 16, 256), plain)
    assert (inverse_frequencies(rope, 16, 1024)[1:] < plain[1:]).all()


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = load(tmp_path, {"rope_scaling": yarn})
    (rope,) = set(config.attention.ropes)
    assert (config.max_model_len, rope.attention_factor) == (1024, 0.1 * math.log(4) + 1)
    usual, scaled = (inverse_frequencies(one, 64, 1024) for one in (RopeConfig(theta=1e4), rope))
    # The fastest pair turns 40 times in 256 positions, the slowest less than once.
    assert (scaled[0], scaled[-1]) == (usual[0], usual[-1] / 4)
    assert (scaled[:-1] > scaled[1:]).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, (4, 4, 16)),
        ({"architectures": ["Phi3ForCausalLM"]}, (4, 4, 16)),
        ({"architectures": ["MistralForCausalLM"], "num_attention_heads": 8}, (8, 8, 8)),
        ({"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 32}, (32, 32, 128)),
        ({"architectures": ["Gemma2ForCausalLM"]}, (4, 4, 256)),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else None,
)
def test_default_head_counts_match_transformers(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    silent = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    (tmp_path / "config.json").write_text(json.dumps({**silent, **changes}))
    config = ModelConfig.load(tmp_path)
    assert (config.attention.num_heads, config.attention.num_kv_heads, config.attention.head_dim) == expected


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
def test_each_layer_uses_the_configured_window(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert load(tmp_path, changes).attention.windows == expected


def test_default_window_matches_transformers(tmp_path: Path) -> None:
    assert load(tmp_path, {"architectures": ["MistralForCausalLM"]}).attention.windows == (4096,) * 4
    assert (
        load(tmp_path, {"architectures": ["MistralForCausalLM"], "sliding_window": None}).attention.windows
        == (None,) * 4
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"architectures": ["DeepseekV3ForCausalLM"]},
        r"DeepseekV3ForCausalLM is not supported: .* latent attention \(MLA\)",
    ),
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported: .* recurrent state"),
    ({"architectures": ["UnheardOfForCausalLM"]}, "UnheardOfForCausalLM is not supported; docs/models.md"),
    (
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "llama"}},
        "the text decoder 'llama' of Gemma3ForConditionalGeneration is not supported; supported: gemma3_text",
    ),
    ({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": 5}, "malformed"),
    (
        {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {"model_type": ["qwen3_vl_text"]}},
        "malformed|not supported",
    ),
    ({"architectures": ["Gemma3ForConditionalGeneration"], "quantization_config": {"bits": 4}}, "quantization_config"),
    ({"quantization_config": {"quant_method": "exl2"}}, "'exl2' .* use the float weights with --quantization"),
    ({"architectures": None}, "config.json has no architectures: add them"),
    ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ({**GEMMA2, "hidden_activation": "gelu"}, r"activation 'gelu' \(hidden_activation"),
    ({"head_dim": 20}, "head_dim 20"),
    ({"head_dim": 520}, "head_dim 520"),
    ({"head_dim": [16, 16, 32, 32]}, "head_dim is .*, not a positive integer"),
    ({"num_attention_heads": [4, 4, 8, 8]}, "num_attention_heads is .*, not a positive integer"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"num_key_value_heads": 3}, "cannot be divided"),
    ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
    ({"layer_types": ["linear_attention"] * 4}, "loramux does not support the layers with a recurrent state"),
    ({**QWEN35, "layer_types": ["sliding_attention"] * 4}, "'sliding_attention'; full_attention and linear_attention"),
    ({**QWEN35, "layer_types": ["linear_attention"] * 4}, "config.json has no 'full_attention' layer"),
    ({**QWEN35, "full_attention_interval": 0}, "full_attention_interval is 0"),
    ({**QWEN35, "full_attention_interval": 5}, "config.json has no 'full_attention' layer"),
    ({**QWEN35, "attn_output_gate": False}, "attn_output_gate = False"),
    ({**QWEN35, "attn_output_gate": "yes"}, "attn_output_gate = 'yes'"),
    ({**QWEN35, "hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh'"),
    ({**QWEN35, "linear_num_key_heads": 5}, "32 value heads cannot be divided among 5 key heads"),
    ({**QWEN35, "linear_num_value_heads": 10**12}, r"linear_num_value_heads 1000000000000 in config.json is not in"),
    ({**QWEN35, "linear_key_head_dim": 0}, "linear_key_head_dim is 0, not a positive integer"),
    ({**QWEN35, "linear_key_head_dim": 257}, r"linear_key_head_dim 257 in config.json is not in \[1, 256\]"),
    ({**QWEN35, "linear_value_head_dim": 1.5}, "linear_value_head_dim is 1.5, not a positive integer"),
    ({**QWEN35, "linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim 1 in config.json is not in \[2, 16\]"),
    ({**QWEN35, "linear_conv_kernel_dim": 10**6}, r"linear_conv_kernel_dim 1000000 in config.json is not in"),
    (
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {"model_type": "qwen3_5_moe_text"}},
        "the text decoder 'qwen3_5_moe_text' of Qwen3_5ForConditionalGeneration is not supported",
    ),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    ({"dtype": "float8_e4m3fn"}, "dtype"),
    ({"vocab_size": None}, "malformed"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    # Unsupported settings that change the computation, and the name in the error.
    ({"rope_scaling": {"rope_type": "proportional"}}, "'proportional' of LlamaForCausalLM is not supported"),
    ({"rope_scaling": {"rope_type": "dynamic"}}, "malformed: 'factor'"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e300}}, "a context of [0-9]+ tokens, above"),
    (
        {"architectures": ["StableLmForCausalLM"], "partial_rotary_factor": 0.15, "rope_scaling": DYNAMIC},
        "partial_rotary_factor = 0.15",
    ),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor is 0"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 1e30}}, "a context of [0-9]+ tokens, above 67108864"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": -1}}, "beta_slow is -1"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "finetuned": True}}, "finetuned of the rotary embedding"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1}, "rope_theta is 1.0, which YaRN"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
    ({"max_position_embeddings": 10**12}, "a context of 1000000000000 tokens, above"),
    (LONGROPE, "'longrope' of LlamaForCausalLM is not supported"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1]}}, "mrope_section of the rotary embedding"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
    ({"rope_scaling": {"rope_type": "linear"}}, "malformed: 'factor'"),
    ({"rope_theta": math.inf}, "rope_theta is inf"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ({**PHI3, "partial_rotary_factor": 2.0}, "partial_rotary_factor = 2.0"),
    ({**PHI3, "partial_rotary_factor": 0.01}, "partial_rotary_factor = 0.01"),
    ({**PHI3, "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' of Phi3ForCausalLM is not supported"),
    ({**PHI3, **LONGROPE, "partial_rotary_factor": 0.5}, "short_factor in config.json has 8 factors for 4"),
    (
        {**PHI3, **LONGROPE, "rope_scaling": {**LONGROPE["rope_scaling"], "short_mscale": 1.2}},
        "short_mscale of the rotary embedding 'longrope'",
    ),
    ({**GEMMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters.rope_type"),
    ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ({**GEMMA2, "attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
    ({**GEMMA2, "final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
    ({**GEMMA2, "query_pre_attn_scalar": None}, "query_pre_attn_scalar is None"),
    ({**GEMMA2, "sliding_window": None}, "no sliding_window is in use"),
    ({**GEMMA2, "sliding_window": 0}, "sliding_window is 0"),
    ({**GEMMA2, "layer_types": ["full_attention", "chunked_attention"] * 2}, "layer_types names 'chunked_attention'"),
    ({**GEMMA2, "layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
    ({**GEMMA2, "use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ({"architectures": ["Qwen2ForCausalLM"], "is_causal": False}, "is_causal = False"),
    ({**GEMMA3, "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types = "),
    (
        {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
        "no sliding_window is in use",
    ),
    ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias = True"),
    ({**PHI3, "attention_bias": True}, "attention_bias = True"),
    ({**GEMMA2, "mlp_bias": True}, "mlp_bias = True"),
    ({**PHI3, "lm_head_bias": True}, "lm_head_bias = True"),
    ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar = 256"),
    ({"use_qk_norm": True}, "use_qk_norm = True"),
    ({"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ({"attention_multiplier": 0.0078125}, "attention_multiplier"),
    ({"embedding_multiplier": 12}, "embedding_multiplier"),
    ({"residual_multiplier": 0.22}, "residual_multiplier"),
    ({"logits_scaling": 8.0}, "logits_scaling"),
    ({"logit_scale": 0.0625}, "logit_scale"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"num_experts": 64}, "num_experts"),
    ({"n_routed_experts": 256}, "n_routed_experts"),
    ({"kv_lora_rank": 512}, "kv_lora_rank"),
    ({"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0}, "residual_multiplier is 0"),
    ({"architectures": ["GraniteForCausalLM"], "attention_multiplier": "1"}, "attention_multiplier is '1'"),
    ({"architectures": ["HyperCLOVAXForCausalLM"], "use_post_norm": False}, "use_post_norm = False"),
    ({**SMOLLM3, "no_rope_layers": [1, 1]}, "no_rope_layers does not list a 0 or 1 for each of 4 layers"),
    ({**SMOLLM3, "no_rope_layers": [1, 1, 2, 1]}, "no_rope_layers does not list"),
    ({**SMOLLM3, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
    ({"architectures": ["Olmo2ForCausalLM"], "clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ({**COHERE2, "use_qk_norm": True}, "use_qk_norm = True"),
    ({**COHERE2, "layer_norm_eps": 0}, "layer_norm_eps is 0"),
    ({**COHERE2, "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ({**COHERE2, "sliding_window_pattern": "LX"}, "sliding_window_pattern is 'LX'"),
    ({"architectures": ["StableLmForCausalLM"], "use_parallel_residual": True}, "use_parallel_residual = True"),
    ({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}, "qk_layernorm = True"),
    ({"architectures": ["ArceeForCausalLM"], "hidden_act": "silu"}, "activation 'silu'.* supported: gelu_py.*, relu2"),
    ({"architectures": ["GlmForCausalLM"], "mlp_bias": True}, "mlp_bias = True"),
    ({"per_layer_config": {"0": {}}}, "per_layer_config"),
    ({"block_configs": [{}]}, "block_configs"),
]


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED, ids=lambda value: None if isinstance(value, dict) else str(value)
)
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelNotSupported, match=message):
        load(tmp_path, changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": False, "mlp_bias": False, "rope_scaling": None, "pretraining_tp": 1, "layer_types": None},
        {"layer_types": ["full_attention"] * 4, "sliding_window": 32, "use_cache": True, "head_dim": None},
        {"residual_multiplier": 1.0, "logits_scaling": 1, "clip_qkv": None, "quantization_config": None},
        {"num_experts": 0, "attn_logit_softcapping": None, "partial_rotary_factor": 1.0, "use_mrope": False},
        {**GEMMA2, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
        {**GEMMA3, "rope_scaling": None, "use_bidirectional_attention": False, "attn_logit_softcapping": None},
        {**PHI3, "rope_scaling": None, "lm_head_bias": False, "full_attn_mod": 1, "attention_bias": False},
    ],
    ids=["llama 2", "llama, saved by transformers 5", "multipliers of 1", "zeros", "gemma 2", "gemma 3", "phi 3"],
)
def test_fields_without_effect_are_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert load(tmp_path, changes).num_layers == 4


@pytest.mark.parametrize("text", [None, "{", "[1]"], ids=["absent", "not JSON", "no object"])
def test_directory_without_usable_config_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelNotSupported, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="there is no directory"):
        ModelConfig.load(tmp_path / "none")


def read(model_dir: Path, *names: str) -> None:
    with open_weights(model_dir) as weights:
        for name in names:
            weights.tensor(name, (4, 2))


def test_unused_tensor_is_refused(tmp_path: Path) -> None:
    used, inverse = "model.embed_tokens.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({used: torch.ones(4, 2), inverse: torch.ones(3)}, tmp_path / "model.safetensors")
    read(tmp_path, used)
    save_file({used: torch.ones(4, 2), "model.layers.0.x.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotSupported, match=r"does not use, such as model\.layers\.0\.x\.bias"):
        read(tmp_path, used)


@pytest.mark.parametrize("is_same", [True, False])
def test_tied_head_must_equal_the_embedding(tmp_path: Path, is_same: bool) -> None:
    embedding = torch.randn(4, 2)
    head = embedding.clone() if is_same else embedding + 1
    names = "model.embed_tokens.weight", "lm_head.weight"
    save_file(dict(zip(names, (embedding, head), strict=True)), tmp_path / "model.safetensors")
    read(tmp_path, *names)
    if is_same:
        read(tmp_path, names[0])
    else:
        with pytest.raises(ModelNotSupported, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
            read(tmp_path, names[0])


@pytest.mark.parametrize(
    ("stored", "vision"),
    [
        ("model.language_model.embed_tokens.weight", "model.vision_tower.a"),
        ("language_model.model.embed_tokens.weight", "multi_modal_projector.a"),
        ("model.embed_tokens.weight", "visual.a"),
        ("model.text_model.embed_tokens.weight", "model.connector.a"),
        ("language_model.model.embed_tokens.weight", "image_newline"),
        ("embed_tokens.weight", "visual.a"),
    ],
)
def test_text_decoder_inside_a_multimodal_checkpoint_is_read(tmp_path: Path, stored: str, vision: str) -> None:
    save_file({stored: torch.ones(4, 2), vision: torch.ones(3)}, tmp_path / "model.safetensors")
    read(tmp_path, "model.embed_tokens.weight")
    assert list(stored_tensors(tmp_path)) == ["model.embed_tokens.weight"]
    assert BaseWeights(tmp_path).rows("model.embed_tokens", 1, 3).shape == (2, 2)


@pytest.mark.parametrize(("architecture", "kind"), WRAPPED, ids=[kind for _, kind in WRAPPED])
def test_short_text_config_has_the_sizes_that_transformers_assumes(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    """Checkpoints such as LLaVA 1.5 store only the fields that differ from the defaults."""
    raw = {"architectures": [architecture], "text_config": {"model_type": kind}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found, wanted = ModelConfig.load(tmp_path), CONFIG_MAPPING[kind]()
    assert (found.num_layers, found.hidden_size) == (wanted.num_hidden_layers, wanted.hidden_size)
    heads = wanted.num_attention_heads, wanted.num_key_value_heads
    assert (found.attention.num_heads, found.attention.num_kv_heads) == heads
    assert (found.intermediate_size, found.vocab_size) == (wanted.intermediate_size, wanted.vocab_size)
    assert (found.max_model_len, found.norm_eps) == (wanted.max_position_embeddings, wanted.rms_norm_eps)
    assert found.attention.windows == (getattr(wanted, "sliding_window", None),) * found.num_layers


def test_wrapped_cohere_2_does_not_scale_its_logits(tmp_path: Path) -> None:
    text = {**LLAMA, "model_type": "cohere2", "logit_scale": 0.25, "sliding_window_pattern": 4}
    config = load(tmp_path, {"architectures": ["AyaVisionForConditionalGeneration"], "text_config": text})
    assert config.logit_scale == 1.0


def test_another_text_decoder_is_refused_by_name(tmp_path: Path) -> None:
    text = {**LLAMA, "model_type": "bloom"}
    with pytest.raises(ModelNotSupported, match=r"text decoder 'bloom' of LlavaFor.* supported: llama, mistral, qwen2"):
        load(tmp_path, {"architectures": ["LlavaForConditionalGeneration"], "text_config": text})


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    names = "model.language_model.norm.weight", "model.norm.weight"
    save_file({name: torch.ones(4) for name in names}, tmp_path / "model.safetensors")
    for reading in (stored_tensors, read):
        with pytest.raises(ModelNotSupported, match=r"two tensors named model\.norm\.weight"):
            reading(tmp_path)


def test_missing_tensor_is_reported_before_unused_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4, 2), "b": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotSupported, match="no tensor c"):
        read(tmp_path, "a", "c")


def test_format_of_quantized_weights_is_named(tmp_path: Path) -> None:
    assert load(tmp_path, {}).quantization is None
    found = load(tmp_path, {"quantization_config": {"quant_method": "fp8"}}).quantization
    assert found is not None
    assert found.name == "fp8"


def test_a_directory_with_a_gguf_file_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotSupported, match=r"to serve a GGUF model, name its file, .*/model\.gguf"):
        ModelConfig.load(tmp_path)


def test_a_file_of_a_model_directory_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotSupported, match=r"model\.safetensors is a file: use a Hugging Face model directory"):
        ModelConfig.load(tmp_path / "model.safetensors")


def test_weights_of_a_dtype_that_nothing_explains_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotSupported, match="a has dtype float8_e4m3fn, which quantization_config"):
        read(tmp_path, "a")


def test_weights_of_a_decoder_saved_without_a_head_are_read(tmp_path: Path) -> None:
    names = ("embed_tokens.weight", "layers.0.input_layernorm.weight", "norm.weight")
    save_file({name: torch.ones(4, 2) for name in names}, tmp_path / "model.safetensors")
    read(tmp_path, *(f"model.{name}" for name in names))
    assert sorted(stored_tensors(tmp_path)) == sorted(f"model.{name}" for name in names)
    assert BaseWeights(tmp_path).rows("model.embed_tokens", 1, 3).shape == (2, 2)


def test_a_prefix_is_put_only_before_names_of_which_none_has_it(tmp_path: Path) -> None:
    tensors = {name: torch.ones(4, 2) for name in ("model.embed_tokens.weight", "norm.weight")}
    save_file(tensors, tmp_path / "model.safetensors")
    assert sorted(stored_tensors(tmp_path)) == sorted(tensors)
    read(tmp_path, *tensors)


@pytest.mark.parametrize("architecture", ["Qwen3Model", "MistralModel", "Gemma3TextModel"])
def test_the_architecture_of_a_decoder_saved_without_a_head_is_served(tmp_path: Path, architecture: str) -> None:
    config = load(tmp_path, {"architectures": [architecture], "tie_word_embeddings": False})
    assert (config.tied_embeddings, config.has_head) == (True, False)
    assert load(tmp_path, {"architectures": [architecture], "tie_word_embeddings": True}).has_head
    assert "lm_head.weight" not in weight_shapes(config)


def test_a_multimodal_model_saved_without_a_head_is_not_its_text_decoder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="the architecture Gemma3Model is not supported"):
        load(tmp_path, {"architectures": ["Gemma3Model"], "text_config": {}})


def test_mamba_layers_are_not_a_gated_delta_rule(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="layer_types names 'mamba'"):
        load(tmp_path, {**QWEN35, "layer_types": ["mamba", "mamba", "mamba", "full_attention"]})


def test_the_encoder_of_a_name_that_is_not_a_decoders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="the architecture BertModel is not supported"):
        load(tmp_path, {"architectures": ["BertModel"]})


def test_a_missing_head_is_explained(tmp_path: Path) -> None:
    save_file({"embed_tokens.weight": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotSupported, match=r"no tensor lm_head\.weight.* name a decoder without a head"):
        read(tmp_path, "model.embed_tokens.weight", "lm_head.weight")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_attn_factor_multiplies_yarns_default(tmp_path: Path) -> None:
    """DeepSeek-R1-0528-Qwen3-8B cancels the default."""
    cancelled = load(tmp_path, {"rope_scaling": {**YARN, "attn_factor": 0.8782488562869419}})
    assert cancelled.attention.ropes[0].attention_factor == pytest.approx(1.0)
    twice = load(tmp_path, {"rope_scaling": {**YARN, "attn_factor": 2.0}})
    assert twice.attention.ropes[0].attention_factor == pytest.approx(2 * (0.1 * math.log(4) + 1))
    with pytest.raises(ModelNotSupported, match="attn_factor beside attention_factor"):
        load(tmp_path, {"rope_scaling": {**YARN, "attn_factor": 2.0, "attention_factor": 1.0}})
