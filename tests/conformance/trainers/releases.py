"""The keys of `adapter_config.json`, by the release of PEFT that introduced them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEW_KEYS: Mapping[str, tuple[str, ...]] = {
    "0.4": ("auto_mapping", "layers_pattern", "layers_to_transform", "revision"),
    "0.6": ("alpha_pattern", "rank_pattern"),
    "0.7": ("loftq_config", "megatron_config", "megatron_core"),
    "0.8": ("use_rslora",),
    "0.9": ("use_dora",),
    "0.10": ("layer_replication",),
    "0.14": ("eva_config", "exclude_modules", "lora_bias"),
    "0.15": ("corda_config", "trainable_token_indices"),
    "0.16": ("qalora_group_size", "use_qalora"),
    "0.17": ("target_parameters",),
    "0.18": ("alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "peft_version"),
    "0.19": ("lora_ga_config", "use_bdlora"),
    "0.20": ("kasa_config", "monteclora_config", "velora_config"),
}
"""The keys that each release added to those of release 0.3."""

REMOVED_KEYS: Mapping[str, Mapping[str, Any]] = {"0.3": {"enable_lora": None, "merge_weights": False}}
"""The keys that each release removed, with the values that the releases before it wrote by default."""


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def document_of(config: Mapping[str, Any], release: str) -> dict[str, Any]:
    """Return a configuration with the keys that PEFT's `release` writes."""
    since = {key: number(first) for first, keys in NEW_KEYS.items() for key in keys}
    document = {key: value for key, value in config.items() if since.get(key, ()) <= number(release)}
    if "peft_version" in document:
        document["peft_version"] = release
    for removed, keys in REMOVED_KEYS.items():
        if number(release) < number(removed):
            document |= keys
    return dict(sorted(document.items()))
