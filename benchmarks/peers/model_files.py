"""A random base model and its adapters, written once to a scratch folder and read by all compared systems."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.vocabulary import write_tokenizer
from benchmarks.random_model import SHAPES, Shape, load_peft, make_base

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A base with PEFT adapters `a0`, `a1`, ... on all seven linear layers, and the same adapters reduced to q/k/v/o as
    `attention0`, `attention1`, ...
    """

    directory: Path
    shape: Shape
    num_adapters: int
    rank: int
    has_attention_adapters: bool = True

    @property
    def base(self) -> Path:
        return self.directory / "base"

    @property
    def adapters(self) -> dict[str, Path]:
        return {f"a{index}": self._adapter(f"a{index}") for index in range(self.num_adapters)}

    @property
    def attention_adapters(self) -> dict[str, Path]:
        names = [f"attention{index}" for index in range(self.num_adapters if self.has_attention_adapters else 0)]
        return {name: self._adapter(name) for name in names}

    def _adapter(self, name: str) -> Path:
        return self.directory / "adapters" / name


def make_model_files(scratch: Path, size: str, num_adapters: int, rank: int) -> ModelFiles:
    directory = scratch.absolute() / f"{size}-{num_adapters}-adapters-rank{rank}"
    return make_once(ModelFiles(directory, SHAPES[size], num_adapters, rank), _write)


def make_once(files: ModelFiles, write: Callable[[ModelFiles], None]) -> ModelFiles:
    """Write the files, unless an earlier run has written them completely."""
    made = files.directory / "made"
    if not made.exists():
        # Files from an interrupted run may be incomplete.
        shutil.rmtree(files.directory, ignore_errors=True)
        files.base.mkdir(parents=True)
        write(files)
        write_tokenizer(files.base, files.shape.vocab_size)
        made.touch()
    return files


def _write(files: ModelFiles) -> None:
    make_base(files.shape, files.base)
    model = load_peft(files.base, files.num_adapters, files.rank, torch.bfloat16)
    model.save_pretrained(files.directory / "adapters")
    del model
    gc.collect()
    for whole, cut in zip(files.adapters.values(), files.attention_adapters.values(), strict=True):
        _cut_to_attention(whole, cut)


def _cut_to_attention(whole: Path, cut: Path) -> None:
    cut.mkdir()
    tensors = load_file(whole / TENSORS)
    kept = {name: tensor for name, tensor in tensors.items() if any(module in name for module in ATTENTION)}
    save_file(kept, cut / TENSORS, metadata={"format": "pt"})
    config = json.loads((whole / CONFIG).read_text())
    (cut / CONFIG).write_text(json.dumps(config | {"target_modules": list(ATTENTION)}, indent=2) + "\n")
