from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.admin.admin_side import NUM_LAYERS, TARGET

MakeAdapter = Callable[..., Path]
"""Accepts the arguments of `write_peft_directory` except `parent`."""


def write_peft_directory(
    parent: Path,
    rank: int = 2,
    config: dict[str, object] | None = None,
    poison: float | None = None,
    tokens: tuple[int, ...] = (),
    has_norms: bool = False,
) -> Path:
    """Write a PEFT directory for TARGET with random weights under `parent`. `poison` replaces the first weight.

    `tokens` are trained tokens of the embedding. With `has_norms`, the norms of all layers are trained too.
    """
    directory = parent / f"peft-{secrets.token_hex(4)}"
    directory.mkdir()
    random = np.random.default_rng(secrets.randbits(32))
    tensors = {}
    for layer in range(NUM_LAYERS):
        for module in TARGET.modules:
            name = f"base_model.model.model.layers.{layer}.{module.name}"
            shapes = {"lora_A": (rank, module.in_features), "lora_B": (module.out_features, rank)}
            for part, shape in shapes.items():
                tensors[f"{name}.{part}.weight"] = (random.standard_normal(shape) * 0.02).astype(np.float32)
    if tokens:
        rows = random.standard_normal((len(tokens), TARGET.outer_modules[0].out_features)).astype(np.float32)
        tensors["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"] = rows
    for norm in TARGET.norms if has_norms else ():
        for layer in range(NUM_LAYERS):
            name = f"base_model.model.model.layers.{layer}.{norm.name}.weight"
            tensors[name] = random.uniform(0.5, 1.5, norm.size).astype(np.float32)
    if poison is not None:
        next(iter(tensors.values()))[0, 0] = poison
    save_file(tensors, directory / "adapter_model.safetensors")
    document: dict[str, object] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "down_proj"],
        "trainable_token_indices": list(tokens) or None,
        "modules_to_save": [norm.name for norm in TARGET.norms] if has_norms else None,
        **(config or {}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(document))
    return directory
