"""A base model of a few megabytes in two shards, and pulls of it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from loramux.adapter_store.pulling.model_cache import PulledModel
from loramux.adapter_store.pulling.model_name import ModelName
from loramux.adapter_store.pulling.pull import Puller
from loramux.adapter_store.pulling.pull_settings import PullSettings

BASE = "acme/tiny-base"
SHARDS = tuple(f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
WEIGHTS = {name: random.Random(name).randbytes(size) for name, size in zip(SHARDS, (3 << 20, 1 << 16), strict=True)}
NEEDED: dict[str, bytes] = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "chat_template.json": b'{"chat_template": "{{ messages }}"}',
    "modules.json": b"[]",
    "1_Pooling/config.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {f"layer.{number}": name for number, name in enumerate(SHARDS)}}
    ).encode(),
    **WEIGHTS,
}
FILES: dict[str, bytes] = {
    **NEEDED,
    "README.md": b"# A model",
    "pytorch_model.bin": b"\x80",
    "onnx/model.onnx": b"onnx",
    "original/consolidated.safetensors": b"a copy",
    "tf_model.h5": b"h5",
    "optimizer.pt": b"\x80",
}


@dataclass
class Pulls:
    """Pulls models with `settings`. Pauses between attempts are recorded instead of made."""

    settings: PullSettings
    pauses: list[float] = field(default_factory=list)

    @property
    def puller(self) -> Puller:
        return Puller(self.settings, pause=self.pauses.append)

    def __call__(self, name: str = f"hf://{BASE}") -> PulledModel:
        puller = self.puller
        return puller.carry_out(puller.plan(ModelName.parse(name)))

    def find(self, name: str = f"hf://{BASE}") -> PulledModel | None:
        return self.puller.cache.find(ModelName.parse(name))


def contents(directory: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
