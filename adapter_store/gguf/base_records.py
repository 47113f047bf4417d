"""The architectures of GGUF models that can be served, and where each of their tensors is in a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loramux.adapter_store.gguf.base_metadata import BaseMetadata

Fields = Callable[[BaseMetadata], dict[str, Any]]

RMS_EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"

OUTER: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NORMS = {**_POST_NORMS, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_UNGATED = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FUSED_GATE = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_DENSE = {**OUTER, **_ATTENTION, **_PRE_NORMS, **_GATED}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTURE = {**OUTER, **_ATTENTION, **_PRE_NORMS, **_EXPERTS}


def _nothing(_: BaseMetadata) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRecord:
    """One architecture of GGUF files.

    `modules` gives the name in Hugging Face's model for each name in the file, without `blk.N.` and `.weight` or
    `.bias`. `{}` stands for the number of an expert. With `permutes`, rows of q and k are in llama.cpp's order.
    `norm_shift` is added to the stored weights of norms. `fields` returns the fields of `config.json` that only this
    architecture has.
    """

    architecture: str
    modules: Mapping[str, str]
    fields: Fields = _nothing
    permutes: bool = False
    norm_shift: float = 0.0
    eps: str = RMS_EPS
    eps_field: str = "rms_norm_eps"
    theta: float = 10000.0
    """The base of rotary frequencies if the file does not state it."""


def llama_record(metadata: BaseMetadata) -> BaseRecord:
    """llama.cpp's `llama` stands for Llama, Mistral with and without windows, and Mixtral."""
    if metadata.find("expert_count"):
        return _MIXTRAL
    return _MISTRAL if metadata.find("attention.sliding_window") else _LLAMA


def olmo2_record(metadata: BaseMetadata) -> BaseRecord:
    """llama.cpp's `olmo2` stands for OLMo 2, and for OLMo 3, which has windows."""
    return _OLMO3 if metadata.find("attention.sliding_window") else _OLMO2


def find_record(metadata: BaseMetadata) -> BaseRecord | None:
    chosen = RECORDS.get(metadata.architecture)
    return chosen(metadata) if callable(chosen) else chosen


def _biases(metadata: BaseMetadata) -> dict[str, Any]:
    return {"attention_bias": metadata.has("attn_q.bias"), "mlp_bias": metadata.has("ffn_down.bias")}


def _window(metadata: BaseMetadata) -> dict[str, Any]:
    return {"sliding_window": metadata.integer("attention.sliding_window", 0) or None}


def _layer_types(metadata: BaseMetadata, every: int) -> dict[str, Any]:
    """The kinds of the layers. By default, one in `every` layers has full attention, and the others have windows."""
    pattern = metadata.find("attention.sliding_window_pattern")
    num_layers = metadata.integer("block_count")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or any(type(one) is not bool for one in pattern):
            raise metadata.refused("attention.sliding_window_pattern", pattern, "true or false for each layer")
        windowed = pattern
    else:
        period = metadata.integer("attention.sliding_window_pattern", every)
        windowed = [period == 0 or (layer + 1) % period != 0 for layer in range(num_layers)]
    return {"layer_types": ["sliding_attention" if one else "full_attention" for one in windowed]}


def _mixtral(metadata: BaseMetadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "sliding_window": None,
    }


def _experts(normalizes: bool) -> Fields:
    def fields(metadata: BaseMetadata) -> dict[str, Any]:
        stated = metadata.find("expert_weights_norm")
        if metadata.find("expert_gating_func") not in (None, 0, 1):
            raise metadata.refused("expert_gating_func", metadata.find("expert_gating_func"), "1, for softmax")
        size = metadata.integer("expert_feed_forward_length", metadata.integer("feed_forward_length", 0))
        return {
            "num_experts": metadata.integer("expert_count"),
            "num_experts_per_tok": metadata.integer("expert_used_count"),
            "moe_intermediate_size": size,
            "norm_topk_prob": normalizes if stated is None else bool(stated),
        }

    return fields


def _qwen2_moe(metadata: BaseMetadata) -> dict[str, Any]:
    shared = metadata.integer("expert_shared_feed_forward_length")
    return {**_experts(normalizes=False)(metadata), "shared_expert_intermediate_size": shared}


def _olmoe(metadata: BaseMetadata) -> dict[str, Any]:
    found = _experts(normalizes=False)(metadata)
    # OLMoE's intermediate_size is the size of its experts.
    return {**found, "intermediate_size": found.pop("moe_intermediate_size")}


def _query_scale(metadata: BaseMetadata, largest: int) -> dict[str, Any]:
    """As in llama.cpp, only the largest model, known by its number of layers, has another scale than the head size."""
    heads, size = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    if metadata.integer("block_count") == largest and heads:
        return {"query_pre_attn_scalar": size // heads}
    return {"query_pre_attn_scalar": metadata.integer("attention.key_length")}


def _gemma2(metadata: BaseMetadata) -> dict[str, Any]:
    return {
        **_query_scale(metadata, largest=46),
        **_window(metadata),
        **_layer_types(metadata, every=2),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: BaseMetadata) -> dict[str, Any]:
    cap = metadata.find("final_logit_softcapping")
    return {
        **_query_scale(metadata, largest=62),
        **_window(metadata),
        **_layer_types(metadata, every=6),
        "final_logit_softcapping": None if cap is None else metadata.number("final_logit_softcapping"),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
    }


def _granite(metadata: BaseMetadata) -> dict[str, Any]:
    return {
        **_biases(metadata),
        "attention_multiplier": metadata.number("attention.scale", 1.0),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _olmo3(metadata: BaseMetadata) -> dict[str, Any]:
    return {**_window(metadata), **_layer_types(metadata, every=4)}


def _olmo(metadata: BaseMetadata) -> dict[str, Any]:
    clamp = metadata.find("attention.clamp_kqv")
    return {} if not clamp else {"clip_qkv": metadata.number("attention.clamp_kqv")}


def _gpt_oss(metadata: BaseMetadata) -> dict[str, Any]:
    return {
        **_window(metadata),
        **_layer_types(metadata, every=2),
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "attention_bias": True,
    }


def _stable_lm(metadata: BaseMetadata) -> dict[str, Any]:
    return {"use_qkv_bias": metadata.has("attn_q.bias"), "use_parallel_residual": not metadata.has("ffn_norm.weight")}


def _cohere(metadata: BaseMetadata) -> dict[str, Any]:
    return {"logit_scale": metadata.number("logit_scale")}


def _cohere2(metadata: BaseMetadata) -> dict[str, Any]:
    return {**_cohere(metadata), **_window(metadata), **_layer_types(metadata, every=4)}


def _exaone4(metadata: BaseMetadata) -> dict[str, Any]:
    window = _window(metadata)
    if window["sliding_window"] is None:
        kinds = {"layer_types": ["full_attention"] * metadata.integer("block_count")}
        return {**window, **kinds, "sliding_window_pattern": None}
    return {**window, **_layer_types(metadata, every=4)}


_LLAMA = BaseRecord(architecture="LlamaForCausalLM", modules=_DENSE, fields=_biases, permutes=True)
_MISTRAL = BaseRecord(architecture="MistralForCausalLM", modules=_DENSE, fields=_window, permutes=True)
_MIXTRAL = BaseRecord(
    architecture="MixtralForCausalLM",
    modules={
        **OUTER,
        **_ATTENTION,
        **_PRE_NORMS,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    fields=_mixtral,
    permutes=True,
)
_OLMO2 = BaseRecord(
    architecture="Olmo2ForCausalLM", modules={**OUTER, **_ATTENTION, **_QK_NORMS, **_POST_NORMS, **_GATED}
)
_OLMO3 = BaseRecord(architecture="Olmo3ForCausalLM", modules=_OLMO2.modules, fields=_olmo3)

RECORDS: Mapping[str, BaseRecord | Callable[[BaseMetadata], BaseRecord]] = {
    "llama": llama_record,
    "qwen2": BaseRecord(architecture="Qwen2ForCausalLM", modules=_DENSE),
    "qwen3": BaseRecord(architecture="Qwen3ForCausalLM", modules={**_DENSE, **_QK_NORMS}),
    "qwen2moe": BaseRecord(
        architecture="Qwen2MoeForCausalLM", modules={**_MIXTURE, **_SHARED_EXPERT}, fields=_qwen2_moe
    ),
    "qwen3moe": BaseRecord(
        architecture="Qwen3MoeForCausalLM", modules={**_MIXTURE, **_QK_NORMS}, fields=_experts(normalizes=True)
    ),
    "olmoe": BaseRecord(architecture="OlmoeForCausalLM", modules={**_MIXTURE, **_QK_NORMS}, fields=_olmoe),
    "gemma": BaseRecord(architecture="GemmaForCausalLM", modules=_DENSE, norm_shift=-1.0),
    "gemma2": BaseRecord(
        architecture="Gemma2ForCausalLM",
        modules={**OUTER, **_ATTENTION, **_GEMMA_NORMS, **_GATED},
        fields=_gemma2,
        norm_shift=-1.0,
    ),
    "gemma3": BaseRecord(
        architecture="Gemma3ForCausalLM",
        modules={**OUTER, **_ATTENTION, **_QK_NORMS, **_GEMMA_NORMS, **_GATED},
        fields=_gemma3,
        norm_shift=-1.0,
        theta=1e6,
    ),
    "phi3": BaseRecord(
        architecture="Phi3ForCausalLM",
        modules={
            **OUTER,
            **_PRE_NORMS,
            **_FUSED_GATE,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
        },
        fields=_window,
    ),
    "phi2": BaseRecord(
        architecture="PhiForCausalLM",
        modules={
            **OUTER,
            **_ATTENTION,
            "output_norm": "model.final_layernorm",
            "attn_output": "self_attn.dense",
            "attn_norm": "input_layernorm",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        eps=LAYER_EPS,
        eps_field="layer_norm_eps",
    ),
    "smollm3": BaseRecord(architecture="SmolLM3ForCausalLM", modules=_DENSE, fields=_biases, permutes=True),
    "granite": BaseRecord(architecture="GraniteForCausalLM", modules=_DENSE, fields=_granite, permutes=True),
    "olmo": BaseRecord(
        architecture="OlmoForCausalLM",
        modules={**OUTER, **_ATTENTION, **_GATED},
        fields=_olmo,
        permutes=True,
        eps=LAYER_EPS,
        eps_field="layer_norm_eps",
    ),
    "olmo2": olmo2_record,
    "gpt-oss": BaseRecord(
        architecture="GptOssForCausalLM",
        modules={
            **OUTER,
            **_ATTENTION,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        fields=_gpt_oss,
    ),
    "stablelm": BaseRecord(
        architecture="StableLmForCausalLM",
        modules=_DENSE,
        fields=_stable_lm,
        eps=LAYER_EPS,
        eps_field="layer_norm_eps",
    ),
    "starcoder2": BaseRecord(
        architecture="Starcoder2ForCausalLM",
        modules={**OUTER, **_ATTENTION, **_PRE_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        fields=_window,
        eps=LAYER_EPS,
        eps_field="norm_epsilon",
    ),
    "command-r": BaseRecord(
        architecture="CohereForCausalLM",
        modules={**OUTER, **_ATTENTION, **_GATED, "attn_norm": "input_layernorm"},
        fields=_cohere,
        eps=LAYER_EPS,
        eps_field="layer_norm_eps",
    ),
    "cohere2": BaseRecord(
        architecture="Cohere2ForCausalLM",
        modules={**OUTER, **_ATTENTION, **_GATED, "attn_norm": "input_layernorm"},
        fields=_cohere2,
        eps=LAYER_EPS,
        eps_field="layer_norm_eps",
    ),
    "glm4": BaseRecord(
        architecture="Glm4ForCausalLM",
        modules={
            **OUTER,
            **_ATTENTION,
            **_FUSED_GATE,
            **_PRE_NORMS,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        fields=_biases,
    ),
    "exaone4": BaseRecord(
        architecture="Exaone4ForCausalLM",
        modules={**OUTER, **_ATTENTION, **_QK_NORMS, **_POST_NORMS, **_GATED},
        fields=_exaone4,
    ),
    "seed_oss": BaseRecord(
        architecture="SeedOssForCausalLM",
        modules={
            **OUTER,
            **_ATTENTION,
            **_GATED,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
        },
        fields=_biases,
    ),
    "ernie4_5": BaseRecord(
        architecture="Ernie4_5ForCausalLM", modules=_DENSE, fields=lambda it: {"use_bias": it.has("attn_q.bias")}
    ),
    "arcee": BaseRecord(
        architecture="ArceeForCausalLM",
        modules={**OUTER, **_ATTENTION, **_PRE_NORMS, **_UNGATED},
        fields=_biases,
        permutes=True,
    ),
    "nemotron": BaseRecord(
        architecture="NemotronForCausalLM",
        modules={**OUTER, **_ATTENTION, **_PRE_NORMS, **_UNGATED},
        norm_shift=-1.0,
        eps=LAYER_EPS,
        eps_field="norm_eps",
    ),
}
"""The supported architectures by llama.cpp's names. Some names stand for several architectures."""
