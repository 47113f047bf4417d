"""Reads a model's tensors by name from safetensors files, the only supported weight format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from loramux.engine.errors import ModelNotSupported
from loramux.engine.model.weight_files import EMBEDDING, HEAD, text_tensors, unreadable, weight_paths
from loramux.engine.model.weight_shapes import misshapen, missing, unread, unused_tensors


class WeightSource(Protocol):
    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`. Raises ModelNotSupported if it is missing or has a different shape."""
        ...


class Weights:
    """The tensors of one model directory, read one at a time so that only one copy is in memory."""

    def __init__(self, places: Mapping[str, tuple[safe_open, str]]) -> None:
        """`places` contains, by name, the file of each tensor and its name in the file."""
        self._places = places
        self._unread = set(places)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`. Raises ModelNotSupported if it is missing or has a different shape."""
        if name not in self._places:
            raise missing(name)
        tensor = self._read(name)
        self._unread.discard(name)
        if tuple(tensor.shape) != shape:
            raise misshapen(name, tuple(tensor.shape), shape)
        return tensor

    def check_all_read(self) -> None:
        """Raise ModelNotSupported if any tensor is unread, because the model then needs an unsupported computation."""
        unused = unused_tensors(self._unread)
        # A head tied to the embedding may be stored separately if the two are equal.
        if unused == [HEAD] and EMBEDDING in self._places:
            if not torch.equal(self._read(HEAD), self._read(EMBEDDING)):
                raise ModelNotSupported(f"config.json ties {HEAD} to {EMBEDDING}, but the two differ")
            return
        if unused:
            raise unread(unused)

    def _read(self, name: str) -> torch.Tensor:
        file, stored = self._places[name]
        tensor: torch.Tensor = file.get_tensor(stored)
        return tensor


@contextmanager
def open_weights(model_dir: Path) -> Iterator[Weights]:
    """Open `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    On exit, raises ModelNotSupported if a tensor was not read.
    """
    with ExitStack() as stack:
        places: dict[str, tuple[safe_open, str]] = {}
        for path in weight_paths(model_dir):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise unreadable(path, error) from error
            places.update((name, (file, stored)) for name, stored in text_tensors(file.keys(), places))
        weights = Weights(places)
        yield weights
        weights.check_all_read()
