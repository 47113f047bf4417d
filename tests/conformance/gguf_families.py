"""The families whose models are stored in GGUF files. The models have only settings that such a file can state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.conformance.further_families import MULTIPLIERS, MakeModel
from tests.conformance.gguf_models import GgufFamily
from tests.conformance.tiny_models import FAMILIES

EAGER = {"attn_implementation": "eager"}
_LLAMA = GgufFamily("llama", permutes=True)


@dataclass(frozen=True, slots=True)
class Stored:
    """How a family is stored, the entries that only it has, and its model if it differs from that in `FAMILIES`."""

    family: GgufFamily
    entries: dict[str, Any] = field(default_factory=dict)
    make: MakeModel | None = None


def _gemma(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return GemmaForCausalLM(GemmaConfig(**shape, head_dim=16))


def _gemma2(shape: dict[str, Any], window: int) -> PreTrainedModel:
    own: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": window}
    caps = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0}
    return Gemma2ForCausalLM(Gemma2Config(**shape, **own, **caps, **EAGER))  # type: ignore[call-arg]


def _gemma3(shape: dict[str, Any], window: int) -> PreTrainedModel:
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    own: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": window}
    own |= {"num_hidden_layers": 7, "rope_parameters": ropes}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**shape, **own}, sliding_window_pattern=6, **EAGER))  # type: ignore[call-arg]


def _smollm3(shape: dict[str, Any], _: int) -> PreTrainedModel:
    """The last of four layers has no positions."""
    return SmolLM3ForCausalLM(SmolLM3Config(**{**shape, "num_hidden_layers": 4}, pad_token_id=0))


def _olmo3(shape: dict[str, Any], window: int) -> PreTrainedModel:
    return Olmo3ForCausalLM(Olmo3Config(**{**shape, "num_hidden_layers": 4}, sliding_window=window, **EAGER))  # type: ignore[call-arg]


def _exaone4(shape: dict[str, Any], window: int) -> PreTrainedModel:
    sizes = {**shape, "num_hidden_layers": 4, "sliding_window": window, "sliding_window_pattern": 4}
    return Exaone4ForCausalLM(Exaone4Config(**sizes, **EAGER))  # type: ignore[call-arg]


def _mixtral(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, sliding_window=None))


def _qwen2_moe(shape: dict[str, Any], _: int) -> PreTrainedModel:
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**shape, **experts, shared_expert_intermediate_size=256))


def _qwen3_moe(shape: dict[str, Any], _: int) -> PreTrainedModel:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, head_dim=64))  # type: ignore[call-arg]


def _gpt_oss(shape: dict[str, Any], window: int) -> PreTrainedModel:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False}
    rope |= {"original_max_position_embeddings": 256, "beta_fast": 32.0, "beta_slow": 1.0}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": window}
    return GptOssForCausalLM(GptOssConfig(**shape, **experts, head_dim=64, rope_parameters=rope))


def _seed_oss(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return SeedOssForCausalLM(SeedOssConfig(**shape, head_dim=16))


def _glm4(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return Glm4ForCausalLM(Glm4Config(**shape, head_dim=32, attention_bias=True, pad_token_id=0))


def _cohere(shape: dict[str, Any], _: int) -> PreTrainedModel:
    return CohereForCausalLM(CohereConfig(**shape, logit_scale=0.25, pad_token_id=0))


def _cohere2(shape: dict[str, Any], window: int) -> PreTrainedModel:
    sizes = {**shape, "num_hidden_layers": 4, "sliding_window": window, "sliding_window_pattern": 4}
    return Cohere2ForCausalLM(Cohere2Config(**sizes, logit_scale=0.5, pad_token_id=0, **EAGER))  # type: ignore[call-arg]


_EXPERTS_OF_6 = {"{arch}.expert_count": 6, "{arch}.expert_feed_forward_length": 64}
_WINDOWED_BUT_FOURTH = {"{arch}.attention.sliding_window_pattern": [True, True, True, False]}

STORED: dict[str, Stored] = {
    "llama": Stored(_LLAMA),
    "llama-tied-bias-llama3-rope": Stored(_LLAMA),
    "llama-yarn": Stored(_LLAMA),
    "mistral-window": Stored(_LLAMA),
    "mixtral": Stored(_LLAMA, {"{arch}.expert_count": 4, "{arch}.expert_used_count": 2}, _mixtral),
    "qwen2": Stored(GgufFamily("qwen2")),
    "qwen3": Stored(GgufFamily("qwen3")),
    "qwen2-moe": Stored(
        GgufFamily("qwen2moe"),
        {**_EXPERTS_OF_6, "{arch}.expert_used_count": 3, "{arch}.expert_shared_feed_forward_length": 256},
        _qwen2_moe,
    ),
    "qwen3-moe": Stored(GgufFamily("qwen3moe"), {**_EXPERTS_OF_6, "{arch}.expert_used_count": 2}, _qwen3_moe),
    "olmoe": Stored(GgufFamily("olmoe"), {"{arch}.expert_count": 8, "{arch}.expert_used_count": 4}),
    "gemma": Stored(GgufFamily("gemma", norm_shift=1.0), make=_gemma),
    "gemma2": Stored(
        GgufFamily("gemma2", norm_shift=1.0),
        {"{arch}.attn_logit_softcapping": 4.0, "{arch}.final_logit_softcapping": 8.0},
        _gemma2,
    ),
    "gemma3": Stored(GgufFamily("gemma3", norm_shift=1.0), make=_gemma3),
    "phi3-window": Stored(GgufFamily("phi3")),
    "phi3-longrope": Stored(GgufFamily("phi3"), {"{arch}.attention.sliding_window": 0}),
    "smollm3": Stored(GgufFamily("smollm3", permutes=True), make=_smollm3),
    "granite": Stored(
        GgufFamily("granite", permutes=True),
        {
            "{arch}.attention.scale": MULTIPLIERS["attention_multiplier"],
            "{arch}.embedding_scale": MULTIPLIERS["embedding_multiplier"],
            "{arch}.residual_scale": MULTIPLIERS["residual_multiplier"],
            "{arch}.logit_scale": MULTIPLIERS["logits_scaling"],
        },
    ),
    "olmo2": Stored(GgufFamily("olmo2")),
    "olmo3": Stored(GgufFamily("olmo2"), _WINDOWED_BUT_FOURTH, _olmo3),
    "olmo": Stored(GgufFamily("olmo", permutes=True, has_layer_norms=True), {"{arch}.attention.clamp_kqv": 2.0}),
    "gpt-oss": Stored(
        GgufFamily("gpt-oss"),
        {
            "{arch}.expert_count": 4,
            "{arch}.expert_used_count": 2,
            "{arch}.expert_feed_forward_length": 256,
            "{arch}.rope.scaling.yarn_beta_fast": 32.0,
            "{arch}.rope.scaling.yarn_beta_slow": 1.0,
        },
        _gpt_oss,
    ),
    "phi": Stored(GgufFamily("phi2", has_layer_norms=True)),
    "stablelm": Stored(GgufFamily("stablelm", has_layer_norms=True), {"{arch}.use_parallel_residual": False}),
    "starcoder2": Stored(GgufFamily("starcoder2", has_layer_norms=True)),
    "cohere": Stored(GgufFamily("command-r", has_layer_norms=True), {"{arch}.logit_scale": 0.25}, _cohere),
    "cohere2": Stored(GgufFamily("cohere2", has_layer_norms=True), {"{arch}.logit_scale": 0.5}, _cohere2),
    "glm4": Stored(GgufFamily("glm4"), make=_glm4),
    "exaone4": Stored(GgufFamily("exaone4"), make=_exaone4),
    "seed_oss": Stored(GgufFamily("seed_oss"), make=_seed_oss),
    "ernie4_5": Stored(GgufFamily("ernie4_5")),
    "arcee": Stored(GgufFamily("arcee", permutes=True)),
    "nemotron": Stored(GgufFamily("nemotron", norm_shift=1.0, has_layer_norms=True)),
}
assert STORED.keys() <= FAMILIES.keys()
