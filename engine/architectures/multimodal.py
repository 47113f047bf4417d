"""Finds the text decoder in the `config.json` of a multimodal checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from loramux.engine.architectures.config_fields import shown
from loramux.engine.architectures.families import FAMILIES
from loramux.engine.architectures.family import Family
from loramux.engine.architectures.gemma4_families import GEMMA4_FAMILIES
from loramux.engine.architectures.mixture_families import INNER_FAMILIES, MIXTURE_FAMILIES
from loramux.engine.protocol.errors import ModelNotSupported

_SHARED = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
    "compression_config",
)
"""Fields of the whole model that also describe its text decoder."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal architecture.

    `decoders` maps the `model_type` of a text decoder to its architecture. The first entry is the default. `assumed`
    contains default values that differ from the text decoder's own defaults. `fixed` contains values that take
    precedence over `config.json`, because the multimodal model ignores these fields. With `has_mrope`, positions have a
    part for time, one for height and one for width. For text, all three are equal, so the rotation is the usual one.
    """

    decoders: Mapping[str, str]
    assumed: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    has_mrope: bool = False


_DECODERS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The supported text decoders of architectures that can wrap any text decoder."""

_LLAMA, _QWEN2 = _DECODERS, {"qwen2": _DECODERS["qwen2"], **_DECODERS}
_IDEFICS = {"llama": _DECODERS["llama"]}
_TIED = {"tie_word_embeddings": True}
_GLM4V = Wrapper(
    {"glm4v_text": "Glm4ForCausalLM"},
    {"head_dim": None, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
    # GLM-4V's text decoder always has biases, even if this field is false.
    {"attention_bias": True},
    has_mrope=True,
)
_UNSCALED = {"logit_scale": 1.0}
"""Aya Vision and Command A Vision do not scale the logits of their Cohere 2 decoder."""

_SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
}
"""Defaults of transformers for text decoders whose `text_config` often omits fields with default values."""

WRAPPERS: dict[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(
        {"gemma3_text": "Gemma3ForCausalLM"},
        {"num_attention_heads": 8, "vocab_size": 262208, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6},
    ),
    "Gemma3nForConditionalGeneration": Wrapper({"gemma3n_text": "Gemma3nForCausalLM"}),
    "Gemma4ForConditionalGeneration": Wrapper({"gemma4_text": "Gemma4ForCausalLM"}),
    "Gemma4UnifiedForConditionalGeneration": Wrapper({"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}),
    "Llama4ForConditionalGeneration": Wrapper({"llama4_text": "Llama4ForCausalLM"}),
    "Qwen3VLMoeForConditionalGeneration": Wrapper({"qwen3_vl_moe_text": "Qwen3VLMoeText"}, has_mrope=True),
    "Qwen3_5MoeForConditionalGeneration": Wrapper({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, has_mrope=True),
    "AyaVisionForConditionalGeneration": Wrapper({"cohere2": "Cohere2ForCausalLM"}, fixed=_UNSCALED),
    "Cohere2VisionForConditionalGeneration": Wrapper({"cohere2": "Cohere2ForCausalLM"}, fixed=_UNSCALED),
    "DeepseekVLForConditionalGeneration": Wrapper(_LLAMA, _TIED),
    "Exaone4_5_ForConditionalGeneration": Wrapper({"exaone4": "Exaone4ForCausalLM"}),
    "FastVlmForConditionalGeneration": Wrapper(_QWEN2),
    "Glm4vForConditionalGeneration": _GLM4V,
    "Glm46VForConditionalGeneration": _GLM4V,
    "Glm4vMoeForConditionalGeneration": Wrapper(
        {"glm4v_moe_text": "Glm4MoeForCausalLM"}, {"attention_bias": True}, {"use_qk_norm": False}, has_mrope=True
    ),
    "GotOcr2ForConditionalGeneration": Wrapper(_QWEN2, _TIED),
    "HyperCLOVAXVisionV2ForConditionalGeneration": Wrapper({"hyperclovax": "HyperCLOVAXForCausalLM"}, _TIED),
    "Idefics2ForConditionalGeneration": Wrapper({"mistral": "MistralForCausalLM"}),
    "Idefics3ForConditionalGeneration": Wrapper(_IDEFICS, {"rms_norm_eps": 1e-5}),
    "InternVLForConditionalGeneration": Wrapper(_QWEN2, _TIED),
    "LightOnOcrForConditionalGeneration": Wrapper({"qwen3": "Qwen3ForCausalLM"}, _TIED),
    "LlavaForConditionalGeneration": Wrapper(_LLAMA),
    "LlavaNextForConditionalGeneration": Wrapper(_LLAMA),
    "LlavaNextVideoForConditionalGeneration": Wrapper(_LLAMA),
    "LlavaOnevisionForConditionalGeneration": Wrapper(_QWEN2),
    "Ovis2ForConditionalGeneration": Wrapper(_QWEN2, _TIED),
    "SmolVLMForConditionalGeneration": Wrapper(_IDEFICS, {"rms_norm_eps": 1e-5}),
    "VideoLlama3ForConditionalGeneration": Wrapper(_QWEN2),
    "VideoLlavaForConditionalGeneration": Wrapper(_LLAMA),
    "VipLlavaForConditionalGeneration": Wrapper(_LLAMA),
    "Mistral3ForConditionalGeneration": Wrapper(
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
    ),
    "Qwen2VLForConditionalGeneration": Wrapper(
        {"qwen2_vl_text": "Qwen2ForCausalLM"},
        {"num_key_value_heads": 8, "max_window_layers": 80, "rope_theta": 1e6},
        has_mrope=True,
    ),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(
        {"qwen2_5_vl_text": "Qwen2ForCausalLM"},
        {"num_key_value_heads": 8, "max_window_layers": 80, "rope_theta": 1e6},
        has_mrope=True,
    ),
    "Qwen3VLForConditionalGeneration": Wrapper(
        {"qwen3_vl_text": "Qwen3ForCausalLM"}, {"rope_theta": 500000.0}, has_mrope=True
    ),
    "Qwen3_5ForConditionalGeneration": Wrapper({"qwen3_5_text": "Qwen3_5ForCausalLM"}, has_mrope=True),
}
"""The supported multimodal architectures. Their text decoders are served without images."""

_TEXT_FAMILIES: dict[str, Family] = {**FAMILIES, **MIXTURE_FAMILIES, **GEMMA4_FAMILIES}
_SPELLINGS = {"ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM"}
"""Other names of text decoders. K-EXAONE was published before transformers had its architecture."""

SUPPORTED = frozenset((*_TEXT_FAMILIES, *WRAPPERS))
"""The names of all supported architectures."""


def with_head(architecture: str, raw: Mapping[str, Any]) -> str:
    """The architecture of the same decoder with a head if `architecture` is a decoder that was saved without a head, to
    make embeddings. Otherwise `architecture`.
    """
    # With `text_config`, names such as Gemma3Model are multimodal models.
    if raw.get("text_config") is None:
        for suffix in ("TextModel", "Model"):
            name = architecture.removesuffix(suffix) + "ForCausalLM"
            if architecture.endswith(suffix) and name in _TEXT_FAMILIES:
                return name
    return architecture


def text_decoder(architecture: str, raw: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]] | None:
    """The family and the fields of the text decoder, or None if the architecture is not supported.

    Raises ModelNotSupported if the architecture is supported, but not with this text decoder.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None:
        family = _TEXT_FAMILIES.get(_SPELLINGS.get(architecture, architecture))
        return None if family is None else (family, raw)
    # Older versions of transformers saved the fields of some text decoders at the top level of `config.json`.
    text: Mapping[str, Any] = raw if raw.get("text_config") is None else raw["text_config"]
    kind = next(iter(wrapper.decoders)) if text is raw else text.get("model_type", next(iter(wrapper.decoders)))
    if kind not in wrapper.decoders:
        raise ModelNotSupported(
            f"the text decoder {shown(kind)} of {architecture} is not supported; "
            f"supported: {', '.join(wrapper.decoders)}"
        )
    family = {**_TEXT_FAMILIES, **INNER_FAMILIES}[wrapper.decoders[kind]]
    if wrapper.has_mrope:
        rotary = family.rotary
        fields = (*rotary.fields, "mrope_section", "mrope_interleaved")
        family = replace(family, rotary=replace(rotary, kinds=(*rotary.kinds, "mrope"), fields=fields))
    shared = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    return family, {**_SIZES.get(kind, {}), **wrapper.assumed, **text, **shared, **wrapper.fixed}
