"""Reads the base model's weights without torch, for the parts of an adapter that depend on them."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterUnavailable
from loramux.adapter_store.formats.float_formats import STORAGE, to_float32
from loramux.adapter_store.formats.text_names import text_name

_INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of one file; its values are the bytes `[begin, end)` of `data`."""

    data: mmap.mmap
    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]


class WeightRows(Protocol):
    """Weights and biases of modules, by the modules' names; see `BaseWeights`."""

    def rows(self, module: str, begin: int, end: int) -> npt.NDArray[np.float32]: ...

    def bias(self, module: str) -> npt.NDArray[np.float32] | None: ...


class BaseWeights:
    """The safetensors files of a model directory, mapped into memory at the first use.

    The directory is the operator's own, so its files are trusted. A missing or unreadable file raises
    AdapterUnavailable.
    """

    def __init__(self, model_dir: Path) -> None:
        self._dir = model_dir

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the weights: a hash of all names, dtypes and shapes, and of 64 evenly spaced blocks per tensor.

        Hashing every byte would delay the first DoRA adapter by minutes for a large base. Two bases with equal
        fingerprints would have to differ only between the blocks.
        """
        hashed = hashlib.sha256()
        for name, tensor in sorted(self._tensors.items()):
            hashed.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
            last = max(tensor.begin, tensor.end - _SAMPLE_BYTES)
            for sample in range(_NUM_SAMPLES):
                at = tensor.begin + (last - tensor.begin) * sample // (_NUM_SAMPLES - 1)
                hashed.update(tensor.data[at : min(at + _SAMPLE_BYTES, tensor.end)])
        return hashed.hexdigest()

    def rows(self, module: str, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Rows `[begin, end)` of a module's weight, float32 `[end - begin, row_len]`."""
        tensor = self._weight(module)
        row_len = math.prod(tensor.shape[1:])
        storage = STORAGE[tensor.dtype]
        stored = np.frombuffer(
            tensor.data, storage, (end - begin) * row_len, tensor.begin + begin * row_len * storage.itemsize
        )
        return to_float32(stored, tensor.dtype).reshape(end - begin, row_len)

    def bias(self, module: str) -> npt.NDArray[np.float32] | None:
        """A module's bias, or None if it has none."""
        tensor = self._tensors.get(f"{module}.bias")
        if tensor is None:
            return None
        return to_float32(
            np.frombuffer(tensor.data, STORAGE[tensor.dtype], tensor.shape[0], tensor.begin), tensor.dtype
        )

    def _weight(self, module: str) -> _Tensor:
        name = f"{module}.weight"
        if name == _HEAD and name not in self._tensors:
            # The head is tied to the embedding.
            name = _EMBEDDING
        if name not in self._tensors:
            raise AdapterUnavailable(f"the base has no tensor {name}")
        return self._tensors[name]

    @cached_property
    def _tensors(self) -> dict[str, _Tensor]:
        try:
            index = self._dir / _INDEX
            names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
            found: dict[str, _Tensor] = {}
            for name in names or {"model.safetensors"}:
                found |= _mapped(self._dir / name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AdapterUnavailable(f"the base's weights cannot be read: {type(error).__name__}") from error
        return found


def _mapped(path: Path) -> dict[str, _Tensor]:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:start])
    header.pop("__metadata__", None)
    found: dict[str, _Tensor] = {}
    for stored, entry in header.items():
        name = text_name(stored)
        if name is None:
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] in STORAGE:
            found[name] = _Tensor(data, start + begin, start + end, entry["dtype"], tuple(entry["shape"]))
    return found
