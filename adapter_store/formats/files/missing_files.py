"""Explains why a directory is not an adapter, and what its owner can push instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, MLX_FILE

_PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
_WEIGHTS = ("adapter_model", "adapter", "pytorch_model")
"""Prefixes of the names that training programs give to pickles with an adapter's weights, PEFT's first."""
_MODELS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_MAX_NAMED = 4
"""Most folders that a message names."""


def missing_file(directory: Path, file_name: str) -> tuple[str, str, str]:
    """Return the code of the error, its message, and the file or folder that it is about.

    `file_name` is the required file that the directory lacks.
    """
    names = sorted(path.name for path in directory.iterdir())
    # torchtune writes an `adapter_0.pt` beside PEFT's `adapter_model.bin`.
    pickles = [name for start in _WEIGHTS for name in names if name.startswith(start) and name.endswith(_PICKLES)]
    models = [name for name in names if name in _MODELS]
    missing = f"{directory} has no {file_name}"
    if file_name == CONFIG_FILE:
        if folders := _adapter_folders(directory):
            shown = f"its folder {folders[0]} has one: choose that folder"
            if len(folders) > 1:
                shown = f"its folders {_listed(folders)} have one: choose one of these folders"
            return "file_missing", f"{missing}, but {shown}", folders[0]
        if models:
            message = (
                f"{directory} contains a whole model, not an adapter: choose the directory that the adapter was "
                "saved to before it was merged, or serve the model as a base"
            )
            return "file_missing", message, models[0]
        if (shard := next(directory.rglob("*.distcp"), None)) is not None:
            message = (
                f"{directory} is a distributed checkpoint: convert the adapter to PEFT's format first, for example "
                "with NeMo's llm.export_ckpt or Megatron Bridge's save_hf_adapter"
            )
            return "file_missing", message, shard.relative_to(directory).as_posix()
        if files := [name for name in names if name.endswith(".gguf")]:
            return "file_missing", f"{missing}: to push an adapter in GGUF format, choose the file itself", files[0]
    if pickles:
        message = f"{pickles[0]} is a pickle, which loramux never reads"
        if file_name == CONFIG_FILE:
            return "pickle_refused", f"{missing}, and {message}: save the adapter in PEFT's format", pickles[0]
        return "pickle_refused", f"{message}: save the adapter again with safe_serialization=True", pickles[0]
    if file_name == CONFIG_FILE and MLX_FILE in names:
        return "file_missing", f"{missing}, which mlx-lm writes beside {MLX_FILE}", MLX_FILE
    return "file_missing", f"{missing}: choose a directory saved by PEFT", file_name


def _adapter_folders(directory: Path) -> list[str]:
    """Return the folders with an adapter, by their paths below the directory."""
    found = chain(directory.glob(f"*/{CONFIG_FILE}"), directory.glob(f"*/*/{CONFIG_FILE}"))
    return sorted((path.parent.relative_to(directory).as_posix() for path in islice(found, 1000)), key=_natural)


def _natural(name: str) -> list[str | int]:
    """Return a sort key by which `checkpoint-60` comes before `checkpoint-100`."""
    return [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", name)]


def _listed(folders: Sequence[str]) -> str:
    if len(folders) > _MAX_NAMED:
        return f"{', '.join(folders[:_MAX_NAMED])} and {len(folders) - _MAX_NAMED} more"
    return " and ".join(filter(None, (", ".join(folders[:-1]), folders[-1])))
