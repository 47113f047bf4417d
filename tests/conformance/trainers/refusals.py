"""The sentences that authors of adapters read if an adapter is not served. `{path}` stands for the pushed path."""

from __future__ import annotations

from tests.conformance.trainers.recipe import Refusal

WHOLE_MODEL = Refusal(
    "file_missing",
    "{path} contains a whole model, not an adapter: choose the directory that the adapter was saved to before it was "
    "merged, or serve the model as a base",
    "model.safetensors",
)
DISTRIBUTED = (
    "{path} is a distributed checkpoint: convert the adapter to PEFT's format first, for example with NeMo's "
    "llm.export_ckpt or Megatron Bridge's save_hf_adapter"
)
NOT_LORA = Refusal(
    "unsupported_config",
    'the adapter is not a LoRA: only adapters whose peft_type is "LORA" are served',
    "peft_type",
)
LOFTQ = Refusal(
    "unsupported_config",
    "loftq fits an adapter to weights that LoftQ quantised, and PEFT cannot convert it: train the adapter again with "
    "another init_lora_weights, such as true",
    "init_lora_weights",
)
CLASSIFIER = Refusal(
    "unsupported_config",
    "the adapter has a trained head for single tokens, but only adapters for text generation, embeddings and classes "
    "of texts are served (task_type CAUSAL_LM, FEATURE_EXTRACTION or SEQ_CLS)",
    "task_type",
)
ZERO_3 = Refusal(
    "empty_tensor",
    "the tensor has the shape [0] and no values: if the adapter was trained with DeepSpeed ZeRO-3, save it with "
    "stage3_gather_16bit_weights_on_model_save, or inside deepspeed.zero.GatheredParameters, so that the file has the "
    "weights of all processes",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
)
NO_USE_DORA = (
    "the file has magnitudes of DoRA, but the configuration does not mention DoRA: set use_dora to true in "
    "adapter_config.json"
)
NO_MAGNITUDES = (
    "the configuration has use_dora, but the file lacks this module's magnitudes: save the adapter again with its "
    "magnitudes"
)


def is_in_folder(folder: str) -> Refusal:
    """Refuse a directory with an adapter in one of its folders."""
    return Refusal(
        "file_missing",
        f"{{path}} has no adapter_config.json, but its folder {folder} has one: choose that folder",
        folder,
    )


def is_pickle(name: str) -> Refusal:
    return Refusal(
        "pickle_refused",
        f"{name} is a pickle, which loramux never reads: save the adapter again with safe_serialization=True",
        name,
    )


def is_foreign_pickle(name: str) -> Refusal:
    """Refuse a directory without a configuration."""
    return Refusal(
        "pickle_refused",
        f"{{path}} has no adapter_config.json, and {name} is a pickle, which loramux never reads: save the adapter in "
        "PEFT's format",
        name,
    )


def changed_base(initialisation: str) -> Refusal:
    return Refusal(
        "unsupported_config",
        f"{initialisation} changed the base's weights during training: convert the adapter to a plain LoRA with PEFT's "
        "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        "init_lora_weights",
    )


def is_not_supported(key: str) -> Refusal:
    allowed = "it must be null or [] or {} or false"
    return Refusal("unsupported_config", f"this value of {key} is not supported: {allowed}", key)
