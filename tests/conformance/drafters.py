"""Drafters: adapters' own tensors for the base's head for drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from loramux.engine.architectures.draft_head import DraftHeadNames

Tensors = dict[str, torch.Tensor]


def drafter_names(names: DraftHeadNames, module: str) -> tuple[str, str]:
    """The names of A and B of a module of the head."""
    key = f"base_model.model.{names.prefix}.{module}"
    return f"{key}.lora_A.weight", f"{key}.lora_B.weight"


def random_drafter(
    names: DraftHeadNames, modules: Mapping[str, tuple[int, int]], rank: int, scale: float = 0.3
) -> Tensors:
    """A drafter that changes linear layers with these numbers of inputs and outputs."""
    generator = torch.Generator().manual_seed(9)
    made: Tensors = {}
    for module, (num_inputs, num_outputs) in modules.items():
        a_name, b_name = drafter_names(names, module)
        made[a_name] = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
        made[b_name] = torch.randn(num_outputs, rank, generator=generator) * scale
    return made


def add_drafter(adapter: Path, drafter: Tensors, into: Path, **config: Any) -> Path:
    """Copy a PEFT directory, with a drafter's tensors and changes of its configuration."""
    into.mkdir(parents=True)
    save_file(load_file(adapter / "adapter_model.safetensors") | drafter, into / "adapter_model.safetensors")
    changed = json.loads((adapter / "adapter_config.json").read_text()) | config
    (into / "adapter_config.json").write_text(json.dumps(changed))
    return into
