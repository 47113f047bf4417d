"""Reads a model's tensors by name from safetensors files, the only supported weight format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from loramux.engine.errors import ModelNotSupported

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_DERIVED = (".rotary_emb.inv_freq",)
"""Name suffixes of tensors that can be derived from config.json; older versions of transformers stored them."""


class WeightSource(Protocol):
    """A source of a model's tensors."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`. Raises ModelNotSupported if it is missing or has a different shape."""
        ...


class Weights:
    """The tensors of one model directory, read one at a time so that only one copy is in memory."""

    def __init__(self, files: dict[str, safe_open]) -> None:
        self._files = files
        self._unread = set(files)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`. Raises ModelNotSupported if it is missing or has a different shape."""
        if name not in self._files:
            raise ModelNotSupported(f"the model has no tensor {name}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        self._unread.discard(name)
        if tuple(tensor.shape) != shape:
            raise ModelNotSupported(f"the tensor {name} has shape {list(tensor.shape)}, config.json says {list(shape)}")
        return tensor

    def check_all_read(self) -> None:
        """Raise ModelNotSupported if any tensor is unread, because the model then needs an unsupported computation."""
        unread = sorted(name for name in self._unread if not name.endswith(_DERIVED))
        # A head tied to the embedding may be stored separately if the two are equal.
        if unread == [HEAD] and EMBEDDING in self._files:
            head, embedding = (self._files[name].get_tensor(name) for name in (HEAD, EMBEDDING))
            if not torch.equal(head, embedding):
                raise ModelNotSupported(f"config.json ties {HEAD} to {EMBEDDING}, but the two differ")
            return
        if unread:
            raise ModelNotSupported(
                f"the model has {len(unread)} tensors that its architecture does not use, such as {unread[0]}"
            )


@contextmanager
def open_weights(model_dir: Path) -> Iterator[Weights]:
    """Open `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    On exit, raises ModelNotSupported if a tensor was not read.
    """
    with ExitStack() as stack:
        files: dict[str, safe_open] = {}
        for path in _shards(model_dir):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelNotSupported(f"{path} is not a readable safetensors file: {error}") from error
            files.update(dict.fromkeys(file.keys(), file))
        weights = Weights(files)
        yield weights
        weights.check_all_read()


def _shards(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if not index.is_file():
        return [model_dir / "model.safetensors"]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelNotSupported(f"{index} is malformed") from error
    if any(Path(name).name != name for name in names):
        raise ModelNotSupported(f"{index} names a file outside the model directory")
    return [model_dir / name for name in sorted(names)]
