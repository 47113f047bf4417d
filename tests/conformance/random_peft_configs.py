"""Random LoRA configurations for peft, with options that loramux serves and options that it refuses by name."""

from __future__ import annotations

import random
from typing import Any

from tests.conformance.tiny_models import ALL_LINEARS, SMALL_SHAPE, VOCAB_SIZE

NUM_LAYERS = SMALL_SHAPE["num_hidden_layers"]
PARENTS = {name: "self_attn" if name in ALL_LINEARS[:4] else "mlp" for name in ALL_LINEARS}


def random_name(chance: random.Random) -> str:
    """A name for one or several modules, in any form that a configuration can use."""
    module = chance.choice(ALL_LINEARS)
    below = f"{PARENTS[module]}.{module}"
    layer = chance.randrange(NUM_LAYERS)
    return chance.choice([module, module, below, f"layers.{layer}.{below}", f"model.layers.{layer}.{below}"])


def random_settings(chance: random.Random) -> dict[str, Any]:
    """The settings of a random LoRA configuration that we support. Some configurations match no module at all."""
    settings: dict[str, Any] = {
        # Without a task type, PEFT writes an auto_mapping.
        "task_type": chance.choice(["CAUSAL_LM", None]),
        "fan_in_fan_out": chance.random() < 0.1,
        "r": chance.choice([1, 2, 3, 8, 16, 33]),
        "lora_alpha": chance.choice([1, 2, 7, 16, 0.5]),
        "use_rslora": chance.random() < 0.4,
        **chance.choice([{}, {}, {"use_dora": True}, {"lora_bias": True}]),
        "lora_dropout": chance.choice([0.0, 0.1]),
    }
    roll = chance.random()
    if roll < 0.15:
        settings["target_modules"] = "all-linear"
    elif roll < 0.35:
        names = "|".join(chance.sample(ALL_LINEARS, chance.randint(1, 4)))
        layers = chance.choice(["[0-9]+", f"{NUM_LAYERS - 1}", "(0|1)"])
        settings["target_modules"] = rf".*layers\.{layers}\..*\.({names})"
    else:
        names = [random_name(chance) for _ in range(chance.randint(1, 4))]
        if chance.random() < 0.3:
            names.append(chance.choice(["lm_head", "embed_tokens", "model.embed_tokens"]))  # type: ignore[attr-defined]
        settings["target_modules"] = names
    for key, values in (("rank_pattern", [1, 4, 5, 24]), ("alpha_pattern", [1, 3, 11])):
        if chance.random() < 0.5:
            names = [random_name(chance) for _ in range(chance.randint(1, 3))]
            settings[key] = {name: chance.choice(values) for name in names}
    if chance.random() < 0.2:
        settings.setdefault("rank_pattern", {})[rf"layers\.[01]\..*{chance.choice(ALL_LINEARS)[:-4]}.*"] = 7
    for expression in (rf".*\.layers\.1\..*{chance.choice(ALL_LINEARS)}$", r"^model\.(?!layers\.0).*_proj"):
        if chance.random() < 0.2:
            settings.setdefault("alpha_pattern", {})[expression] = chance.choice([2, 9])
    if chance.random() < 0.2:
        settings["bias"] = chance.choice(["all", "lora_only"])
    if chance.random() < 0.3:
        excluded = [random_name(chance) for _ in range(chance.randint(1, 2))]
        settings["exclude_modules"] = rf".*\.{chance.choice(ALL_LINEARS)}" if chance.random() < 0.3 else excluded
    # PEFT refuses `layers_to_transform` together with a regular expression.
    if chance.random() < 0.3 and not settings["target_modules"][0].startswith("."):
        settings["layers_to_transform"] = chance.choice([0, [1], [0, 1], [NUM_LAYERS - 1]])
        settings["layers_pattern"] = chance.choice([None, "layers", ["layers"]])
    # PEFT fails while running an activated adapter of the embedding, and never activates one without a task type.
    can_be_activated = settings["task_type"] is not None and not settings.get("use_dora")
    if can_be_activated and not any("embed" in name for name in settings["target_modules"]) and chance.random() < 0.5:
        settings["alora_invocation_tokens"] = [chance.randrange(2, 5) for _ in range(chance.randint(1, 3))]
    elif chance.random() < 0.5:
        settings |= random_trained_parts(chance)
    return settings


def random_trained_parts(chance: random.Random) -> dict[str, Any]:
    """Settings that train the head, the embedding, tokens of either, or norms. PEFT refuses some combinations."""
    parts: dict[str, Any] = {"ensure_weight_tying": chance.random() < 0.2}
    if chance.random() < 0.5:
        parts["modules_to_save"] = chance.choice([["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
    if chance.random() < 0.3:
        norms = chance.choice([["norm"], ["input_layernorm"], ["model.norm", "layers.1.post_attention_layernorm"]])
        parts["modules_to_save"] = [*parts.get("modules_to_save", ()), *norms]
    if chance.random() < 0.6:
        lists = [chance.sample(range(VOCAB_SIZE), chance.randint(1, 40)) for _ in range(2)]
        by_module = {"lm_head": lists[0], "embed_tokens": lists[1]}
        # PEFT detects a repeated module only if both names are identical.
        forms = [by_module, {name: by_module[name] for name in chance.sample(sorted(by_module), 1)}]
        if "embed_tokens" not in parts.get("modules_to_save", ()):
            forms.append(lists[0])
        parts["trainable_token_indices"] = chance.choice(forms)
    return parts


REFUSED: tuple[dict[str, Any], ...] = (
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "pissa_niter_2"},
    {"init_lora_weights": "olora"},
    {"layer_replication": [[0, NUM_LAYERS], [0, 1]]},
    {"target_parameters": ["embed_tokens.weight"]},
    {"modules_to_save": ["up_proj"]},
    {"trainable_token_indices": {"up_proj": [1, 2]}},
)
"""Options that peft can save but loramux does not serve. The first key is the option's name."""

INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""Initialisations that leave a plain LoRA."""


def random_options(chance: random.Random) -> tuple[dict[str, Any], str | None]:
    """Random settings, and the name of the option that loramux refuses, or None."""
    settings = random_settings(chance)
    # PEFT refuses other initialisations together with lora_bias or invocation tokens.
    if not settings.get("lora_bias") and "alora_invocation_tokens" not in settings and chance.random() < 0.3:
        settings["init_lora_weights"] = chance.choice(INITIALISATIONS)
    if chance.random() > 0.25:
        return settings, None
    refused = chance.choice(REFUSED)
    # These options exclude each other in peft.
    for name in ("use_dora", "lora_bias", "alora_invocation_tokens", "modules_to_save", "trainable_token_indices"):
        settings.pop(name, None)
    return settings | refused, next(iter(refused))
