"""The files of one adapter as a training program writes them, and the ways in which programs differ from PEFT."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE

PREFIX = "base_model.model."


@dataclass(slots=True)
class SavedFiles:
    """The files below the directory that a program writes. `others` maps their paths to their contents.

    The configuration and the tensors are in the subfolder `folder`. A configuration of None is not written, and neither
    are the tensors if `weights_file` is None.
    """

    config: dict[str, Any] | None
    tensors: dict[str, torch.Tensor]
    others: dict[str, bytes] = field(default_factory=dict)
    folder: str = ""
    weights_file: str | None = TENSORS_FILE

    def write(self, directory: Path) -> None:
        contents = {f"{self.folder}/{name}" if self.folder else name: one for name, one in self._adapter().items()}
        for name, content in (contents | self.others).items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _adapter(self) -> dict[str, bytes]:
        contents = {}
        if self.config is not None:
            contents[CONFIG_FILE] = json.dumps(self.config, indent=2).encode()
        if self.weights_file is not None:
            is_pickle = not self.weights_file.endswith(".safetensors")
            contents[self.weights_file] = PICKLE if is_pickle else save(self.tensors, {"format": "pt"})
        return contents


Change = Callable[[SavedFiles], None]

PICKLE = b"PK\x03\x04\x00\x00\x08\x08\x00\x00archive/data.pkl\x80\x02}q\x00."
"""The beginning of a file that torch.save writes."""


def sets(**keys: Any) -> Change:
    """Give the configuration further keys, or other values."""

    def change(files: SavedFiles) -> None:
        assert files.config is not None
        files.config |= keys

    return change


def keeps(*keys: str) -> Change:
    """Write only these keys of the configuration."""

    def change(files: SavedFiles) -> None:
        assert files.config is not None
        files.config = {key: files.config[key] for key in keys if key in files.config}

    return change


def renames(pattern: str, replacement: str) -> Change:
    """Replace a regular expression in the tensors' names, after PEFT's prefix."""

    def change(files: SavedFiles) -> None:
        files.tensors = {
            PREFIX + re.sub(pattern, replacement, name.removeprefix(PREFIX)): tensor
            for name, tensor in files.tensors.items()
        }

    return change


def has_no_prefix(files: SavedFiles) -> None:
    files.tensors = {name.removeprefix(PREFIX): tensor for name, tensor in files.tensors.items()}


def has_prefix(prefix: str) -> Change:
    """Put a wrapper's name before the tensors' names."""

    def change(files: SavedFiles) -> None:
        files.tensors = {prefix + name: tensor for name, tensor in files.tensors.items()}

    return change


def has_adapter_name(name: str = "default") -> Change:
    """Leave the adapter's name in the tensors' names, as a state dict has it."""
    return renames(r"(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)\b", rf"\1.{name}")


def lists_full_names(files: SavedFiles) -> None:
    """Name every targeted module in full, with the names of the tensors."""
    modules = [name.removeprefix(PREFIX).partition(".lora_")[0] for name in files.tensors if ".lora_" in name]
    # Stacked experts are parameters, not modules.
    names = {name for name in modules if not name.endswith((".experts", ".base_layer"))}
    sets(target_modules=sorted(names))(files)


def is_in(folder: str) -> Change:
    """Write the adapter into a subfolder."""

    def change(files: SavedFiles) -> None:
        files.folder = folder

    return change


def is_named(weights_file: str | None) -> Change:
    """Write the tensors into a file of another name, which is a pickle unless its name ends with `.safetensors`."""

    def change(files: SavedFiles) -> None:
        files.weights_file = weights_file

    return change


def has(*names: str, **contents: bytes) -> Change:
    """Write further files, whose contents do not matter unless they are given."""

    def change(files: SavedFiles) -> None:
        for name in names:
            files.others[name] = b"{}" if name.endswith(".json") else PICKLE
        files.others |= contents

    return change


def has_files(contents: Mapping[str, bytes]) -> Change:
    def change(files: SavedFiles) -> None:
        files.others |= contents

    return change


def is_classifier(task_type: str, head: str) -> Change:
    """Add the trained head of a classifier, which PEFT saves beside the adapter."""

    def change(files: SavedFiles) -> None:
        files.tensors[f"{PREFIX}{head}.weight"] = torch.ones(1, 128)
        sets(task_type=task_type, modules_to_save=["classifier", "score"])(files)

    return change


def is_whole_model(files: SavedFiles) -> None:
    """Write a merged model instead of the adapter."""
    files.config, files.weights_file = None, None
    weight = {"model.embed_tokens.weight": torch.zeros(2, 2)}
    files.others |= {"config.json": b'{"architectures": ["LlamaForCausalLM"]}', "model.safetensors": save(weight)}


def is_another_format(files: SavedFiles) -> None:
    """Write neither of PEFT's two files."""
    files.config, files.weights_file = None, None
