"""Random tiny multimodal models that wrap another family's text decoder, for `make campaign NAME=parity` only."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel

from tests.conformance.further_families import MULTIPLIERS, YARN, MakeModel, mixed_windows

_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 28,
    "patch_size": 14,
}
_CLIP = {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 8}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model"}
_SQUARE = {**_TOWER, "image_size": [28, 28], "patch_size": [14, 14]}
_DEPTH = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 128}
_GOT_OCR = {**_TOWER, "output_channels": 8, "global_attn_indexes": [], "mlp_dim": 16, "window_size": 2}


def _wrapping(name: str, model_type: str, vision: dict[str, Any], **further: Any) -> MakeModel:
    """Makes models of the class `name` whose text decoder is of `model_type`."""

    def make(shape: dict[str, Any], window: int) -> PreTrainedModel:
        text: dict[str, Any] = {**shape, "model_type": model_type, "pad_token_id": 0}
        if model_type in ("cohere2", "exaone4"):
            text |= mixed_windows(text, window)
        if model_type == "hyperclovax":
            text |= MULTIPLIERS
        if model_type == "qwen3":
            text["head_dim"] = 16
        if model_type == "glm4v_text":
            quarter = shape["hidden_size"] // shape["num_attention_heads"] // 8
            text["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [quarter, quarter, 2 * quarter],
            }
        if model_type == "glm4v_moe_text":
            text |= {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 56}
            rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            text |= {"n_group": 4, "topk_group": 2, "rope_parameters": {**rope, "mrope_section": [1, 1, 2]}}
        if model_type == "ministral3":
            rope = {**YARN, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7}
            text |= {"head_dim": 16, "rope_parameters": {**rope, "llama_4_scaling_beta": 0.4}}
        sizes: dict[str, Any] = {}
        if name == "Ovis2":
            # By default, the head has the size of the real model: 233 million weights.
            sizes = {"hidden_size": shape["hidden_size"], "vocab_size": shape["vocab_size"]}
        kind = getattr(transformers, f"{name}ForConditionalGeneration")
        settings = {"text_config": text, "vision_config": vision, "attn_implementation": "eager", **sizes, **further}
        model: PreTrainedModel = kind(kind.config_class(**settings))
        return model

    return make


WRAPPED_FAMILIES: dict[str, MakeModel] = {
    "aya_vision": _wrapping("AyaVision", "cohere2", _SIGLIP),
    "cohere2_vision": _wrapping("Cohere2Vision", "cohere2", _SIGLIP),
    "deepseek_vl": _wrapping("DeepseekVL", "llama", _SIGLIP),
    "exaone4_5": _wrapping("Exaone4_5_", "exaone4", {**_DEPTH, "num_key_value_heads": 1}),
    "fast_vlm": _wrapping("FastVlm", "qwen2", _SIGLIP),
    "glm4v": _wrapping("Glm4v", "glm4v_text", _DEPTH),
    "glm4v_moe": _wrapping("Glm4vMoe", "glm4v_moe_text", _DEPTH),
    "glm46v": _wrapping("Glm46V", "glm4v_text", {**_DEPTH, "model_type": "glm4v_vision"}),
    "got_ocr2": _wrapping("GotOcr2", "qwen2", _GOT_OCR),
    "hyperclovax_vision": _wrapping("HyperCLOVAXVisionV2", "hyperclovax", _DEPTH),
    "idefics2": _wrapping("Idefics2", "mistral", _TOWER),
    "idefics3": _wrapping("Idefics3", "llama", _TOWER),
    "internvl": _wrapping("InternVL", "qwen2", _SQUARE),
    "lighton_ocr": _wrapping("LightOnOcr", "qwen3", {**_TOWER, "head_dim": 8, "model_type": "pixtral"}),
    "llava": _wrapping("Llava", "llama", _CLIP),
    "llava-mistral": _wrapping("Llava", "mistral", _CLIP),
    "llava_next": _wrapping("LlavaNext", "llama", _CLIP),
    "llava_next_video": _wrapping("LlavaNextVideo", "qwen2", _CLIP),
    "llava_onevision": _wrapping("LlavaOnevision", "qwen2", _SIGLIP),
    "mistral3-ministral3": _wrapping("Mistral3", "ministral3", {**_TOWER, "head_dim": 8, "model_type": "pixtral"}),
    "ovis2": _wrapping("Ovis2", "qwen2", {**_TOWER, "vocab_size": 64, "num_visual_indicator_tokens": 5}),
    "smolvlm": _wrapping("SmolVLM", "llama", _TOWER),
    "video_llama3": _wrapping("VideoLlama3", "qwen2", _TOWER),
    "video_llava": _wrapping("VideoLlava", "llama", _CLIP),
    "vip_llava": _wrapping("VipLlava", "llama", {**_CLIP, "num_hidden_layers": 3}, vision_feature_layers=[0, 1]),
}
