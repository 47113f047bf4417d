"""Heads for drafts, written into the directories of tiny bases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from loramux.engine.architectures.draft_head import DraftHeadNames
from loramux.engine.architectures.model_config import ModelConfig

Tensors = dict[str, torch.Tensor]


def add_head(directory: Path, change: Callable[[Tensors], None] = lambda head: None) -> DraftHeadNames:
    """Add a random head to a base, and return its names.

    Its layer has tensors with the shapes of those of the base's last layer. `change` can change the tensors. It gets
    their names without the head's prefix.
    """
    config_file, weights_file = directory / "config.json", directory / "model.safetensors"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"num_nextn_predict_layers": 1}))
    config = ModelConfig.load(directory)
    names = config.draft_head
    assert names is not None
    tensors, last = load_file(weights_file), f"model.layers.{config.num_layers - 1}."
    generator = torch.Generator().manual_seed(5)

    def random(shape: tuple[int, ...], name: str) -> torch.Tensor:
        made = torch.randn(shape, generator=generator) * 0.2
        return made + 1 if "norm" in name else made

    own = {name.removeprefix(last): tuple(one.shape) for name, one in tensors.items() if name.startswith(last)}
    head = {name: random(shape, name) for name, shape in own.items()}
    for name in (names.embedding_norm, names.state_norm, names.final_norm):
        head[f"{name}.weight"] = random((config.hidden_size,), "norm")
    head[f"{names.projection}.weight"] = random((config.hidden_size, 2 * config.hidden_size), "")
    change(head)
    save_file(tensors | {f"{names.prefix}.{name}": one.contiguous() for name, one in head.items()}, weights_file)
    return names


def head_tensors(directory: Path) -> Tensors:
    """The tensors of a base's head, without its prefix."""
    names = ModelConfig.load(directory).draft_head
    assert names is not None
    prefix = f"{names.prefix}."
    found = load_file(directory / "model.safetensors")
    return {name.removeprefix(prefix): one for name, one in found.items() if name.startswith(prefix)}
