"""Random tiny models of the families that only `make campaign NAME=parity` tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    CwmConfig,
    CwmForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    Jais2Config,
    Jais2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    NemotronConfig,
    NemotronForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    VaultGemmaConfig,
    VaultGemmaForCausalLM,
)

MakeModel = Callable[[dict[str, Any], int], PreTrainedModel]
"""Makes a model from a shape and a window."""

MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}


def _granite(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return GraniteForCausalLM(GraniteConfig(**shape, **MULTIPLIERS, attention_bias=True))


def _granite4(shape: dict[str, Any], _: int) -> PreTrainedModel:
    """A Granite 4 Micro: without experts and without Mamba layers."""
    config = GraniteMoeHybridConfig(
        **shape,
        **MULTIPLIERS,
        layer_types=["full_attention"] * shape["num_hidden_layers"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=88,
        position_embedding_type="rope",
        tie_word_embeddings=True,
    )
    return GraniteMoeHybridForCausalLM(config)


def _hyperclovax(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return HyperCLOVAXForCausalLM(HyperCLOVAXConfig(**shape, **MULTIPLIERS, tie_word_embeddings=True))


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}


def _llama_yarn(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=dict(YARN)))


def _ministral3(shape: dict[str, Any], _: int) -> PreTrainedModel:
    """A Ministral 3 with queries that grow from position 64 on."""
    rope = {**YARN, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7}
    config = Ministral3Config(**shape, head_dim=16, rope_parameters={**rope, "llama_4_scaling_beta": 0.4})
    return Ministral3ForCausalLM(config)


def _smollm3(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """A SmolLM3 with a window and no positions in its last layer."""
    rotated = [1] * (shape["num_hidden_layers"] - 1) + [0]
    windows = {"use_sliding_window": True, "sliding_window": window, "no_rope_layers": rotated}
    config = SmolLM3Config(**shape, **windows, pad_token_id=0, attn_implementation="eager")  # type: ignore[call-arg]
    return SmolLM3ForCausalLM(config)


def _olmo2(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**shape))


def mixed_windows(shape: dict[str, Any], window: int) -> dict[str, Any]:
    """Settings of a model with full attention in its last layer."""
    kinds = ["sliding_attention"] * (shape["num_hidden_layers"] - 1) + ["full_attention"]
    return {**shape, "layer_types": kinds, "sliding_window": window, "attn_implementation": "eager"}


def _olmo3(shape: dict[str, Any], window: int) -> PreTrainedModel:
    """An OLMo 3 with a scaled rotary embedding in the layers without a window."""
    ropes = {
        "full_attention": {**YARN, "rope_theta": 500000.0, "attention_factor": 1.3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    }
    return Olmo3ForCausalLM(Olmo3Config(**mixed_windows(shape, window), rope_parameters=ropes))


def _exaone4(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return Exaone4ForCausalLM(Exaone4Config(**mixed_windows(shape, window)))


def _ministral(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return MinistralForCausalLM(MinistralConfig(**mixed_windows(shape, window), head_dim=16))


def _cwm(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return CwmForCausalLM(CwmConfig(**mixed_windows(shape, window), head_dim=16))


def _seed_oss(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return SeedOssForCausalLM(SeedOssConfig(**shape, head_dim=16, mlp_bias=True))


def _gemma(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return GemmaForCausalLM(GemmaConfig(**{**shape, "initializer_range": 0.15}, head_dim=16, attention_bias=True))


def _vaultgemma(shape: dict[str, Any], window: int) -> PreTrainedModel:
    sizes = {**mixed_windows(shape, window), "head_dim": 16, "query_pre_attn_scalar": 24, "initializer_range": 0.15}
    return VaultGemmaForCausalLM(VaultGemmaConfig(**sizes, attn_logit_softcapping=4.0, final_logit_softcapping=8.0))


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The base of MiMo, whose code is not in transformers. It is a Qwen 2."""


def _mimo(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return MiMoForCausalLM(Qwen2Config(**shape, tie_word_embeddings=False))


def _helium(shape: dict[str, Any], _: int) -> PreTrainedModel:
    """A Helium, whose o projection must have as many inputs as outputs."""
    return HeliumForCausalLM(HeliumConfig(**shape, head_dim=shape["hidden_size"] // shape["num_attention_heads"]))


def _hunyuan(shape: dict[str, Any], _: int) -> PreTrainedModel:
    """A HunYuan whose rotary embedding has been scaled for longer contexts, as those that were published."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
    return HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**shape, head_dim=24, rope_parameters=rope))


def _ernie(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return Ernie4_5ForCausalLM(Ernie4_5Config(**shape, head_dim=24, use_bias=True, pad_token_id=0))


def _glm(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return GlmForCausalLM(GlmConfig(**shape, head_dim=16, pad_token_id=0))


def _glm4(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return Glm4ForCausalLM(Glm4Config(**shape, head_dim=16, pad_token_id=0))


def _cohere(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return CohereForCausalLM(CohereConfig(**shape, attention_bias=True, pad_token_id=0))


def _cohere2(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return Cohere2ForCausalLM(Cohere2Config(**mixed_windows(shape, window), logit_scale=0.5, pad_token_id=0))


def _stablelm(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return StableLmForCausalLM(StableLmConfig(**shape, use_qkv_bias=True))


def _starcoder2(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return Starcoder2ForCausalLM(Starcoder2Config(**shape, sliding_window=window, attn_implementation="eager"))  # type: ignore[call-arg]


def _arcee(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return ArceeForCausalLM(ArceeConfig(**{**shape, "initializer_range": 0.15}))


def _nemotron(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return NemotronForCausalLM(NemotronConfig(**{**shape, "initializer_range": 0.15}))


def _jais2(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return Jais2ForCausalLM(Jais2Config(**{**shape, "initializer_range": 0.15}))


def _vision(**further: Any) -> dict[str, Any]:
    """Settings of a vision tower that is never used."""
    return {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "image_size": 28, **further}


def _gemma3_multimodal(shape: dict[str, Any], window: int) -> PreTrainedModel:
    sizes = {**mixed_windows(shape, window), "head_dim": 16, "query_pre_attn_scalar": 24, "initializer_range": 0.15}
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    vision = _vision(num_hidden_layers=1, patch_size=14, model_type="siglip_vision_model")
    config = Gemma3Config(  # type: ignore[call-arg]
        text_config={**sizes, "rope_parameters": ropes}, vision_config=vision, attn_implementation="eager"
    )
    return Gemma3ForConditionalGeneration(config)


def _mistral3(shape: dict[str, Any], _: int) -> PreTrainedModel:
    text = {**shape, "model_type": "mistral", "head_dim": 24, "sliding_window": None}
    vision = _vision(num_hidden_layers=1, patch_size=14, head_dim=8, model_type="pixtral")
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    )


def _qwen2_vl(shape: dict[str, Any], _: int) -> PreTrainedModel:
    quarter = shape["hidden_size"] // shape["num_attention_heads"] // 8
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [quarter, quarter, 2 * quarter]}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 128, "num_heads": 2}
    text = {**shape, "rope_parameters": rope}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    return Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl(shape: dict[str, Any], _: int) -> PreTrainedModel:
    quarter = shape["hidden_size"] // shape["num_attention_heads"] // 8
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [quarter, quarter, 2 * quarter]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 128}
    text = {**shape, "rope_parameters": rope}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def _qwen3_vl(shape: dict[str, Any], _: int) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 128}
    vision = {"depth": 1, **sizes, "deepstack_visual_indexes": [0]}
    text = {**shape, "head_dim": 16, "rope_parameters": rope}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))


FURTHER_FAMILIES: dict[str, MakeModel] = {
    "granite": _granite,
    "granite4": _granite4,
    "hyperclovax": _hyperclovax,
    "llama-yarn": _llama_yarn,
    "ministral3": _ministral3,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "exaone4": _exaone4,
    "ministral": _ministral,
    "cwm": _cwm,
    "seed_oss": _seed_oss,
    "gemma": _gemma,
    "vaultgemma": _vaultgemma,
    "helium": _helium,
    "mimo": _mimo,
    "hunyuan": _hunyuan,
    "ernie4_5": _ernie,
    "glm": _glm,
    "glm4": _glm4,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "arcee": _arcee,
    "nemotron": _nemotron,
    "jais2": _jais2,
    "gemma3-multimodal": _gemma3_multimodal,
    "mistral3": _mistral3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}
