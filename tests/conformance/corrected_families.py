"""Random tiny models whose routers correct their scores, or that differ in other ways from the first mixtures."""

from __future__ import annotations

from typing import Any

from transformers import (
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    FlexOlmoConfig,
    FlexOlmoForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    PreTrainedModel,
    SolarOpenConfig,
    SolarOpenForCausalLM,
)

from tests.conformance.further_families import MakeModel


def _glm4_moe(shape: dict[str, Any], _: int) -> PreTrainedModel:
    """A GLM-4-MoE with a dense layer, a shared expert and groups of experts."""
    config = Glm4MoeConfig(  # type: ignore[call-arg]
        **shape,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=56,
        routed_scaling_factor=1.7,
        pad_token_id=0,
    )
    return Glm4MoeForCausalLM(config)


def _solar_open(shape: dict[str, Any], _: int) -> PreTrainedModel:
    sizes = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 56, "n_shared_experts": 2}
    return SolarOpenForCausalLM(SolarOpenConfig(**shape, **sizes, head_dim=16, norm_topk_prob=False))


def _dots1(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """A dots.llm1 whose last layer has a window."""
    sizes = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 56, "n_shared_experts": 2}
    windows = {"sliding_window": window, "max_window_layers": shape["num_hidden_layers"] - 1}
    config = Dots1Config(  # type: ignore[call-arg]
        **shape, **sizes, **windows, first_k_dense_replace=1, norm_topk_prob=True, attn_implementation="eager"
    )
    return Dots1ForCausalLM(config)


def _exaone_moe(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """An EXAONE-MoE whose second layer is dense, and whose last layer has no window."""
    kinds = ["sparse"] * shape["num_hidden_layers"]
    kinds[1] = "dense"
    windows = ["sliding_attention"] * (shape["num_hidden_layers"] - 1) + ["full_attention"]
    config = ExaoneMoeConfig(  # type: ignore[call-arg]
        **shape,
        num_experts=8,
        num_experts_per_tok=4,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=56,
        mlp_layer_types=kinds,
        layer_types=windows,
        sliding_window=window,
        attn_implementation="eager",
    )
    return ExaoneMoeForCausalLM(config)


def _ernie_moe(shape: dict[str, Any], _: int) -> PreTrainedModel:
    config = Ernie4_5_MoeConfig(**shape, moe_num_experts=6, moe_k=3, moe_intermediate_size=56, pad_token_id=0)
    return Ernie4_5_MoeForCausalLM(config)


def _minimax_m2(shape: dict[str, Any], _: int) -> PreTrainedModel:
    config = MiniMaxM2Config(**shape, head_dim=16, rotary_dim=8, num_local_experts=6, num_experts_per_tok=2)  # type: ignore[call-arg]
    return MiniMaxM2ForCausalLM(config)


def _flex_olmo(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return FlexOlmoForCausalLM(FlexOlmoConfig(**shape, num_experts=5, num_experts_per_tok=3, pad_token_id=0))


def _granite_moe_shared(shape: dict[str, Any], _: int) -> PreTrainedModel:
    multipliers = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4}
    config = GraniteMoeSharedConfig(
        **shape, **multipliers, num_local_experts=5, shared_intermediate_size=88, logits_scaling=2.5
    )
    return GraniteMoeSharedForCausalLM(config)


def _granite_moe_hybrid(shape: dict[str, Any], _: int) -> PreTrainedModel:
    """A Granite 4 with experts in all layers, without Mamba layers and without rotary embeddings."""
    config = GraniteMoeHybridConfig(
        **shape,
        layer_types=["full_attention"] * shape["num_hidden_layers"],
        num_local_experts=5,
        shared_intermediate_size=88,
        attention_multiplier=0.2,
    )
    return GraniteMoeHybridForCausalLM(config)


def _gpt_oss(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """A gpt-oss with a limit so low that it clamps many features."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False}
    config = GptOssConfig(
        **shape,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=window,
        swiglu_limit=1.5,
        rope_parameters={**rope, "original_max_position_embeddings": 256},
    )
    return GptOssForCausalLM(config)


def _mellum(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """A Mellum with a dense layer, and a windowed one with its own rotary embedding."""
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 56}
    num_layers = shape["num_hidden_layers"]
    scaled = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 256}
    config = MellumConfig(
        **shape,
        **sizes,
        head_dim=16,
        sliding_window=window,
        layer_types=["sliding_attention", *["full_attention"] * (num_layers - 1)],
        mlp_layer_types=["dense", *["sparse"] * (num_layers - 1)],
        rope_parameters={"full_attention": scaled, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        pad_token_id=0,
    )
    return MellumForCausalLM(config)


CORRECTED_FAMILIES: dict[str, MakeModel] = {
    "glm4_moe": _glm4_moe,
    "solar-open": _solar_open,
    "dots1": _dots1,
    "exaone-moe": _exaone_moe,
    "ernie4_5-moe": _ernie_moe,
    "minimax-m2": _minimax_m2,
    "flex-olmo": _flex_olmo,
    "granite-moe-shared": _granite_moe_shared,
    "granite-moe-hybrid": _granite_moe_hybrid,
    "gpt-oss": _gpt_oss,
    "mellum": _mellum,
}
