"""Reads a model's tensors by name from safetensors files, the only supported weight format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from loramux.engine.errors import ModelNotSupported
from loramux.engine.model.weight_files import EMBEDDING, HEAD, unreadable, weight_paths
from loramux.engine.model.weight_shapes import misshapen, missing, unread, unused_tensors


class WeightSource(Protocol):
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
            raise missing(name)
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        self._unread.discard(name)
        if tuple(tensor.shape) != shape:
            raise misshapen(name, tuple(tensor.shape), shape)
        return tensor

    def check_all_read(self) -> None:
        """Raise ModelNotSupported if any tensor is unread, because the model then needs an unsupported computation."""
        unused = unused_tensors(self._unread)
        # A head tied to the embedding may be stored separately if the two are equal.
        if unused == [HEAD] and EMBEDDING in self._files:
            head, embedding = (self._files[name].get_tensor(name) for name in (HEAD, EMBEDDING))
            if not torch.equal(head, embedding):
                raise ModelNotSupported(f"config.json ties {HEAD} to {EMBEDDING}, but the two differ")
            return
        if unused:
            raise unread(unused)


@contextmanager
def open_weights(model_dir: Path) -> Iterator[Weights]:
    """Open `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    On exit, raises ModelNotSupported if a tensor was not read.
    """
    with ExitStack() as stack:
        files: dict[str, safe_open] = {}
        for path in weight_paths(model_dir):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise unreadable(path, error) from error
            files.update(dict.fromkeys(file.keys(), file))
        weights = Weights(files)
        yield weights
        weights.check_all_read()
