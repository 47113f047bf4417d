"""The tensors of an adapter that do not change the answers to text."""

from __future__ import annotations

import re

from loramux.adapter_store.formats.files.text_names import DRAFT_LAYERS, text_name

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of names that compilation, distributed training and checkpointing insert."""

MAX_DIMENSIONS = 8
"""Largest number of dimensions of an ignored tensor. The patches of a video have five."""

_ABOVE_BASE = re.compile(r"(?:module\.)?(?:base_model\.model\.)*(?:model\.(?=model\.))?")
_OF_TRAINING = frozenset({"lora_velora_embed", "lora_monteclora_sampler"})
"""PEFT's names for the state of VeLoRA and MonteCLoRA, which only the training uses."""


def is_of_training(name: str) -> bool:
    """Return whether a tensor is used only while the adapter is trained."""
    return not _OF_TRAINING.isdisjoint(name.split("."))


def is_ignored(name: str) -> bool:
    """Return whether a tensor is used only in training, or belongs to another part of the base than its text decoder.

    `name` is the tensor's name in the file, in any of the styles that `tensor_names` translates.
    """
    bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    in_base = _ABOVE_BASE.sub("", bare, count=1)
    return is_of_training(name) or in_base.startswith(f"model.{DRAFT_LAYERS}.") or text_name(in_base) is None
