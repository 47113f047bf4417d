"""Configurations of released mixtures of experts are read, and contradictory ones are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loramux.engine.architectures.family import HEAD_WIDE, PROJECTION_WIDE
from loramux.engine.architectures.feed_forward import ClampedGate
from loramux.engine.architectures.mixture_config import MAX_EXPERTS
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.rope_config import NO_ROPE, QueryScaling
from loramux.engine.architectures.weight_shapes import weight_shapes
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.kernels.routing_spec import RoutingSpec

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
QWEN2_MOE = {"architectures": ["Qwen2MoeForCausalLM"]}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16}
MIXTRAL = {"architectures": ["MixtralForCausalLM"]}
OLMOE = {"architectures": ["OlmoeForCausalLM"]}
GRANITE = {"architectures": ["GraniteMoeForCausalLM"]}
GRANITE_SHARED = {"architectures": ["GraniteMoeSharedForCausalLM"]}
GRANITE_HYBRID = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["attention"] * 4,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 88,
    "position_embedding_type": "rope",
}
GLM4_MOE = {"architectures": ["Glm4MoeForCausalLM"]}
SOLAR = {"architectures": ["SolarOpenForCausalLM"]}
DOTS1 = {"architectures": ["Dots1ForCausalLM"], "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2}
EXAONE_MOE = {"architectures": ["ExaoneMoeForCausalLM"]}
ERNIE_MOE = {"architectures": ["Ernie4_5_MoeForCausalLM"]}
MINIMAX_M2 = {"architectures": ["MiniMaxM2ForCausalLM"]}
FLEX_OLMO = {"architectures": ["FlexOlmoForCausalLM"]}
MELLUM = {"architectures": ["MellumForCausalLM"]}
GPT_OSS = {"architectures": ["GptOssForCausalLM"]}
QWEN3_5_MOE = {"architectures": ["Qwen3_5MoeForCausalLM"]}
LLAMA4 = {"architectures": ["Llama4ForCausalLM"], "intermediate_size_mlp": 80, "attention_chunk_size": 128}


def load(tmp_path: Path, changes: dict[str, Any]) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **changes}))
    return ModelConfig.load(tmp_path)


DEFAULTS = {
    "qwen2-moe": (QWEN2_MOE, RoutingSpec(60, 4, normalizes=False), 1408, 5632),
    "qwen3-moe": (QWEN3_MOE, RoutingSpec(128, 8, normalizes=False), 768, None),
    "mixtral": (MIXTRAL, RoutingSpec(8, 2, normalizes=True), 96, None),
    "olmoe": (OLMOE, RoutingSpec(64, 8, normalizes=False), 96, None),
    "granite-moe": (GRANITE, RoutingSpec(8, 2, normalizes=True), 96, None),
    "granite-moe-shared": (GRANITE_SHARED, RoutingSpec(8, 2, normalizes=True), 96, None),
    "solar-open": (SOLAR, RoutingSpec(128, 8, normalizes=True, has_sigmoid=True), 1280, 1280),
    "minimax-m2": (MINIMAX_M2, RoutingSpec(256, 8, normalizes=True, has_sigmoid=True), 96, None),
    "flex-olmo": (FLEX_OLMO, RoutingSpec(7, 5, normalizes=False), 96, None),
    "qwen3.5-moe": (QWEN3_5_MOE, RoutingSpec(256, 8, normalizes=True), 512, 512),
    "gpt-oss": (GPT_OSS, RoutingSpec(128, 4, normalizes=True), 96, None),
    "mellum": (MELLUM, RoutingSpec(64, 8, normalizes=True), 896, None),
}


@pytest.mark.parametrize(("changes", "routing", "expert_size", "shared_size"), DEFAULTS.values(), ids=DEFAULTS)
def test_absent_fields_have_the_defaults_of_transformers(
    tmp_path: Path, changes: dict[str, Any], routing: RoutingSpec, expert_size: int, shared_size: int | None
) -> None:
    mixture = load(tmp_path, changes).mixture
    assert mixture is not None
    assert (mixture.layers, mixture.routing) == ((0, 1, 2, 3), routing)
    assert mixture.expert_size == expert_size
    assert (None if mixture.shared is None else mixture.shared.size) == shared_size


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("family", [QWEN3_MOE, MIXTRAL, OLMOE], ids=["qwen3-moe", "mixtral", "olmoe"])
def test_both_names_of_the_number_of_experts_are_read(tmp_path: Path, family: dict[str, Any], field: str) -> None:
    mixture = load(tmp_path, {**family, field: 12, "norm_topk_prob": True}).mixture
    assert mixture is not None
    assert (mixture.routing.num_experts, mixture.routing.normalizes) == (12, True)


WITH_DENSE_LAYERS = {
    "glm4-moe": (GLM4_MOE, (1, 2, 3), RoutingSpec(128, 8, normalizes=True, has_sigmoid=True), 1408),
    "dots1": (DOTS1, (0, 1, 2, 3), RoutingSpec(16, 4, normalizes=False, has_sigmoid=True), 2816),
    "exaone-moe": (EXAONE_MOE, (1, 2, 3), RoutingSpec(64, 8, normalizes=True, has_sigmoid=True, scale=2.5), 1024),
    "ernie4_5-moe": (ERNIE_MOE, (1, 2, 3), RoutingSpec(64, 6, normalizes=True, min_total=1e-12), 3072),
}


@pytest.mark.parametrize(("changes", "layers", "routing", "shared"), WITH_DENSE_LAYERS.values(), ids=WITH_DENSE_LAYERS)
def test_first_layers_may_be_dense_by_default(
    tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...], routing: RoutingSpec, shared: int
) -> None:
    mixture = load(tmp_path, changes).mixture
    assert mixture is not None
    assert (mixture.layers, mixture.routing) == (layers, routing)
    assert mixture.shared is not None
    assert (mixture.shared.size, mixture.shared.gate) == (shared, None)


EXPERT_LAYERS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({**GLM4_MOE, "first_k_dense_replace": 3}, (3,)),
    ({**GLM4_MOE, "first_k_dense_replace": 0}, (0, 1, 2, 3)),
    ({**EXAONE_MOE, "mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}, (0, 3)),
    ({**ERNIE_MOE, "moe_layer_interval": 2, "moe_layer_start_index": 0}, (1, 3)),
    ({**ERNIE_MOE, "moe_layer_start_index": 0, "moe_layer_end_index": 1}, (0, 1)),
]


@pytest.mark.parametrize(("changes", "layers"), EXPERT_LAYERS)
def test_fields_choose_the_layers_with_experts(
    tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    mixture = load(tmp_path, changes).mixture
    assert mixture is not None
    assert mixture.layers == layers


def test_experts_are_chosen_among_groups(tmp_path: Path) -> None:
    def routing(num_groups: int, top_groups: int) -> RoutingSpec:
        fields = {"n_routed_experts": 24, "n_group": num_groups, "topk_group": top_groups, "norm_topk_prob": False}
        mixture = load(tmp_path, {**GLM4_MOE, **fields, "routed_scaling_factor": 2}).mixture
        assert mixture is not None
        return mixture.routing

    grouped = RoutingSpec(24, 8, normalizes=False, has_sigmoid=True, num_groups=4, top_groups=2, scale=2.0)
    assert routing(4, 2) == grouped
    # If all groups are chosen, they change nothing.
    assert routing(4, 4) == replace(grouped, num_groups=1, top_groups=1)


def test_granite_4_without_mamba_layers_and_experts_is_served(tmp_path: Path) -> None:
    """As Granite 4.0 Micro, 350M and 1B are published, with the names of layers before transformers 5."""
    config = load(tmp_path, GRANITE_HYBRID)
    assert (config.mixture, config.delta, config.layer_intermediate_sizes) == (None, None, (88,) * 4)
    assert weight_shapes(config)["model.layers.3.shared_mlp.input_linear.weight"] == (176, 64)
    assert NO_ROPE not in config.attention.ropes
    # Granite 4.0 H has no rotary embeddings.
    ropes = load(tmp_path, {**GRANITE_HYBRID, "position_embedding_type": "nope"}).attention.ropes
    assert set(ropes) == {NO_ROPE}


@pytest.mark.parametrize("kinds", [["mamba", *["attention"] * 3], ["linear_attention"] * 4, None])
def test_granite_4_with_mamba_layers_is_refused(tmp_path: Path, kinds: list[str] | None) -> None:
    with pytest.raises(ModelNotSupported, match="layers with a recurrent state, such as Mamba, of this GraniteMoe"):
        load(tmp_path, {**GRANITE_HYBRID, "layer_types": kinds})


def test_mellum_has_rotary_embeddings_for_each_kind_of_layer(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    local, whole = load(tmp_path, {**MELLUM, "layer_types": kinds}).attention.ropes[:2]
    assert (local.theta, whole.theta) == (10000.0, 500000.0)
    ropes = {"sliding_attention": {"rope_theta": 5.0}, "full_attention": {"rope_theta": 7.0, "factor": 2.0}}
    ropes["full_attention"]["rope_type"] = "linear"
    local, whole = load(tmp_path, {**MELLUM, "layer_types": kinds, "rope_parameters": ropes}).attention.ropes[:2]
    assert [(rope.kind, rope.theta) for rope in (local, whole)] == [("default", 5.0), ("linear", 7.0)]


def test_gpt_oss_has_sinks_clamps_and_alternate_windows(tmp_path: Path) -> None:
    config = load(tmp_path, GPT_OSS)
    assert config.attention.has_sinks
    assert config.clamped_gate == ClampedGate(alpha=1.702, limit=7.0)
    assert (config.attention.head_dim, config.attention.qkv_bias, config.attention.o_bias) == (64, True, True)
    assert config.attention.windows == (128, None, 128, None)
    rope = config.attention.ropes[0]
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_len, rope.truncates) == (
        "yarn", 150000.0, 32.0, 4096, False,
    )  # fmt: skip
    assert load(tmp_path, {**GPT_OSS, "swiglu_limit": 5, "swiglu_alpha": 2}).clamped_gate == ClampedGate(2.0, 5.0)
    # As in released checkpoints.
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False}
    rope = load(tmp_path, {**GPT_OSS, "rope_theta": 10000, "rope_scaling": scaling}).attention.ropes[0]
    assert (rope.theta, rope.factor) == (10000.0, 8.0)
    assert config.experts is not None
    gate_up, down = config.experts.linears
    assert (gate_up.name, gate_up.stack, gate_up.alternates) == (None, "mlp.experts.gate_up_proj", True)
    assert (down.name, down.stack, down.alternates) == (None, "mlp.experts.down_proj", False)
    assert "mlp.router" in {module.name for module in config.modules}
    assert not load(tmp_path, MIXTRAL).attention.has_sinks


def test_glm_norms_q_and_k_if_its_configuration_says_so(tmp_path: Path) -> None:
    assert load(tmp_path, GLM4_MOE).attention.qk_norm is None
    config = load(tmp_path, {**GLM4_MOE, "use_qk_norm": True, "attention_bias": True})
    assert (config.attention.qk_norm, config.attention.qkv_bias, config.attention.o_bias) == (HEAD_WIDE, True, False)
    assert config.attention.ropes[0].rotary_fraction == 0.5


def test_minimax_gives_the_number_of_rotated_channels(tmp_path: Path) -> None:
    config = load(tmp_path, {**MINIMAX_M2, "head_dim": 32, "rotary_dim": 8})
    assert (config.attention.ropes[0].rotary_fraction, config.attention.ropes[0].theta) == (0.25, 5e6)
    assert config.attention.qk_norm == PROJECTION_WIDE


def test_layers_that_predict_further_tokens_are_known(tmp_path: Path) -> None:
    config = load(tmp_path, {**GLM4_MOE, "num_nextn_predict_layers": 2})
    assert config.draft_tensors == ("model.layers.4.", "model.layers.5.")
    assert config.draft_head is not None
    assert config.draft_head.prefix == "model.layers.4"
    own = config.draft_layer
    assert own.mixture is not None
    assert (own.num_layers, own.mixture.layers, len(own.attention.ropes)) == (1, (0,), 1)
    config = load(tmp_path, {**GLM4_MOE, "num_nextn_predict_layers": None})
    assert (config.draft_tensors, config.draft_head) == ((), None)
    assert load(tmp_path, EXAONE_MOE).draft_tensors == ("mtp.",)


def names_in(config: ModelConfig, layer: int) -> list[str]:
    return [module.name for module in config.modules if module.is_in(layer) and "mlp" in module.name]


DENSE = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
SHARED = ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"]
ROUTERS = ["mlp.gate", "mlp.shared_expert_gate"]


def test_adapters_see_the_linears_of_dense_layers_and_shared_experts(tmp_path: Path) -> None:
    config = load(tmp_path, {**QWEN2_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert config.mixture is not None
    assert config.mixture.layers == (1,)
    assert [names_in(config, layer) for layer in range(4)] == [DENSE, [*SHARED, *ROUTERS], DENSE, DENSE]
    assert config.module_groups == ((0, 1, 2), (3,), (4, 5, 7, 8), (6, 9), (10, 11))
    assert config.layer_groups(0) == ((0, 1, 2), (3,), (4, 5), (6,), ())
    assert config.layer_groups(1) == ((0, 1, 2), (3,), (7, 8), (9,), (10, 11))

    config = load(tmp_path, QWEN2_MOE)
    assert {module.layers for module in config.modules} == {None}
    assert names_in(config, 0) == [*SHARED, *ROUTERS]
    config = load(tmp_path, MIXTRAL)
    assert (names_in(config, 0), config.module_groups) == ([], ((0, 1, 2), (3,), (), (), (4,)))


@pytest.mark.parametrize("changes", [{"num_experts": 0}, {"mlp_only_layers": [0, 1, 2, 3]}, {"decoder_sparse_step": 9}])
def test_a_model_may_have_only_dense_layers(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = load(tmp_path, {**QWEN3_MOE, **changes})
    assert config.mixture is None
    assert names_in(config, 3) == DENSE


def test_granite_multiplies_embeddings_attention_residuals_and_logits(tmp_path: Path) -> None:
    config = load(tmp_path, {**GRANITE, "embedding_multiplier": 12, "attention_multiplier": 0.015625})
    assert (config.embedding_scale, config.attention.scale) == (12.0, 0.015625)
    assert (config.residual_scale, config.logit_scale) == (1.0, 1.0)
    config = load(tmp_path, {**GRANITE, "residual_multiplier": 0.22, "logits_scaling": 6.0})
    assert (config.embedding_scale, config.attention.scale) == (1.0, 1.0)
    assert (config.residual_scale, config.logit_scale) == (0.22, 1 / 6.0)


def test_windows_alternate_in_qwen2_moe_and_cover_every_layer_of_the_others(tmp_path: Path) -> None:
    windowed = {"use_sliding_window": True, "sliding_window": 32}
    assert load(tmp_path, {**QWEN2_MOE, **windowed}).attention.windows == (32, None, 32, None)
    assert load(tmp_path, {**QWEN2_MOE, **windowed, "max_window_layers": 1}).attention.windows == (32, None, None, None)
    assert load(tmp_path, {**QWEN3_MOE, **windowed, "max_window_layers": 1}).attention.windows == (32,) * 4
    assert load(tmp_path, {**MIXTRAL, "sliding_window": 32}).attention.windows == (32,) * 4
    # transformers 5 saves a model without windows like this.
    assert load(tmp_path, {**QWEN2_MOE, "sliding_window": 0}).attention.windows == (None,) * 4


def test_mixtral_rotates_slowly_by_default(tmp_path: Path) -> None:
    assert load(tmp_path, MIXTRAL).attention.ropes[0].theta == 1e6
    assert load(tmp_path, {**MIXTRAL, "rope_theta": 5e5}).attention.ropes[0].theta == 5e5


def test_biases_and_norms_follow_the_family(tmp_path: Path) -> None:
    qwen2 = load(tmp_path, QWEN2_MOE)
    assert (qwen2.attention.qkv_bias, qwen2.attention.o_bias, qwen2.attention.qk_norm) == (True, False, None)
    assert not load(tmp_path, {**QWEN2_MOE, "qkv_bias": False}).attention.qkv_bias
    qwen3 = load(tmp_path, {**QWEN3_MOE, "attention_bias": True})
    assert (qwen3.attention.qkv_bias, qwen3.attention.o_bias, qwen3.attention.qk_norm) == (True, True, HEAD_WIDE)
    olmoe = load(tmp_path, OLMOE)
    assert (olmoe.attention.qk_norm, olmoe.attention.qkv_bias) == (PROJECTION_WIDE, False)


def test_llama_4_is_served_within_its_first_chunk(tmp_path: Path) -> None:
    config = load(tmp_path, {**LLAMA4, "interleave_moe_layer_step": 2})
    assert (config.max_model_len, config.stretched_model_len, config.attention.windows) == (128, 128, (None,) * 4)
    assert [rope is NO_ROPE for rope in config.attention.ropes] == [False, False, False, True]
    assert config.attention.query_scaling == QueryScaling(growth=0.1, span=8192)
    assert config.mixture is not None
    assert (config.mixture.layers, config.mixture.scales_input) == ((1, 3), True)
    shapes = weight_shapes(config)
    assert shapes["model.layers.0.feed_forward.gate_proj.weight"] == (80, 64)
    assert shapes["model.layers.1.feed_forward.shared_expert.gate_proj.weight"] == (96, 64)
    assert shapes["model.layers.1.feed_forward.experts.gate_up_proj"] == (16, 64, 192)
    plain = load(tmp_path, {**LLAMA4, "no_rope_layers": [1] * 4, "use_qk_norm": False, "moe_layers": [0]})
    assert (NO_ROPE in plain.attention.ropes, plain.attention.has_l2_norms) == (False, False)
    assert plain.mixture is not None
    assert plain.mixture.layers == (0,)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**LLAMA4, "attention_chunk_size": None}, "attention_chunk_size is None"),
    ({**LLAMA4, "moe_layers": [4]}, r"moe_layers = \[4\]"),
    ({**LLAMA4, "interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0"),
    ({**LLAMA4, "floor_scale": 0}, "floor_scale is 0"),
    ({**LLAMA4, "layer_types": ["sliding_attention"] * 4}, "layer_types names 'sliding_attention'"),
    ({**MIXTRAL, "num_local_experts": 8, "num_experts": 4}, "contradicts itself about the number of experts"),
    ({**MIXTRAL, "num_local_experts": 0}, r"the number of experts in config.json, 0, is not in \[1, 1024\]"),
    ({**MIXTRAL, "num_local_experts": MAX_EXPERTS + 1}, "the number of experts in config.json, 1025, is not in"),
    ({**MIXTRAL, "num_local_experts": -1}, "number of experts is -1"),
    ({**MIXTRAL, "num_local_experts": "8"}, "number of experts is '8'"),
    ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok is 9 in config.json, but a layer has 8 experts"),
    ({**MIXTRAL, "num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    ({**MIXTRAL, "num_local_experts": 80, "num_experts_per_tok": 65}, "num_experts_per_tok is 65 .*, above 64"),
    ({**MIXTRAL, "attention_bias": True}, "attention_bias = True"),
    ({**QWEN3_MOE, "moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    ({**QWEN3_MOE, "mlp_only_layers": [4]}, r"mlp_only_layers = \[4\]"),
    ({**QWEN3_MOE, "mlp_only_layers": ["0"]}, "mlp_only_layers"),
    ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ({**QWEN3_MOE, "layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ({**QWEN2_MOE, "shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
    ({**QWEN3_MOE, "n_shared_experts": 1}, "n_shared_experts = 1"),
    ({**OLMOE, "clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ({**OLMOE, "residual_multiplier": 0.5}, "residual_multiplier = 0.5"),
    ({**GRANITE, "logits_scaling": 0}, "logits_scaling is 0"),
    ({**GLM4_MOE, "n_group": 3}, "128 experts cannot form n_group = 3 groups"),
    ({**GLM4_MOE, "n_group": 128}, "128 experts cannot form n_group = 128 groups of two or more experts"),
    ({**GLM4_MOE, "n_group": 4, "topk_group": 5}, "topk_group is 5 in config.json, but 8 experts"),
    ({**GLM4_MOE, "n_group": 32, "topk_group": 1}, "8 experts must be chosen from 32 groups of 4 experts"),
    ({**GLM4_MOE, "n_group": 0}, "n_group is 0"),
    ({**GLM4_MOE, "n_shared_experts": -1}, "n_shared_experts is -1"),
    ({**GLM4_MOE, "first_k_dense_replace": None}, "first_k_dense_replace is None"),
    ({**GLM4_MOE, "routed_scaling_factor": float("nan")}, "routed_scaling_factor is nan"),
    ({**GLM4_MOE, "num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
    ({**GLM4_MOE, "kv_lora_rank": 512}, "kv_lora_rank = 512"),
    ({**GRANITE_SHARED, "shared_intermediate_size": -8}, "shared_intermediate_size is -8"),
    ({**GPT_OSS, "swiglu_limit": 0}, "swiglu_limit is 0"),
    ({**GPT_OSS, "swiglu_alpha": float("inf")}, "swiglu_alpha is inf"),
    ({**EXAONE_MOE, "mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types"),
    ({**EXAONE_MOE, "mlp_layer_types": ["sparse", "dense", "moe", "dense"]}, "mlp_layer_types"),
    ({**ERNIE_MOE, "moe_layer_interval": 0}, "moe_layer_interval is 0"),
    ({**ERNIE_MOE, "moe_layer_end_index": -2}, "moe_layer_end_index is -2"),
    ({**ERNIE_MOE, "moe_k": 65}, "moe_k is 65 in config.json, but a layer has 64 experts"),
    ({**ERNIE_MOE, "use_bias": True}, "use_bias = True"),
    ({**MINIMAX_M2, "rotary_dim": 400}, "partial_rotary_factor"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unusable_mixtures_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelNotSupported, match=message):
        load(tmp_path, changes)


def test_k_exaone_is_read_under_both_spellings(tmp_path: Path) -> None:
    changes = {**EXAONE_MOE, "sliding_window_pattern": "LLLG", "num_experts": 8}
    usual = load(tmp_path, changes)
    other = load(tmp_path, {**changes, "architectures": ["ExaoneMoEForCausalLM"]})
    assert other == replace(usual, architecture="ExaoneMoEForCausalLM")
