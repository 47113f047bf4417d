"""Reads the base model's weights without torch, for the parts of an adapter that depend on them."""

from __future__ import annotations

import hashlib
import itertools
import math
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterUnavailable, BaseNotSupported
from loramux.adapter_store.formats.files.float_formats import STORAGE
from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor, map_directory
from loramux.adapter_store.formats.files.open_matrices import MatrixPlace
from loramux.adapter_store.formats.quantization.base_format import CheckpointTensors, find_coded, read_format
from loramux.adapter_store.formats.quantization.parts import CodedWeight

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


class WeightRows(Protocol):
    """Weights and biases of modules, by the modules' names; see `BaseWeights`."""

    def rows(self, module: str, begin: int, end: int) -> npt.NDArray[np.float32]: ...

    def bias(self, module: str) -> npt.NDArray[np.float32] | None: ...


class BaseVectors(Protocol):
    """Biases and weights of norms, by the names of their tensors; see `BaseWeights`."""

    def vector(self, name: str) -> npt.NDArray[np.float32] | None: ...


class BaseWeights:
    """The safetensors files of a model directory, mapped into memory at the first use.

    Weights in `quantized_dir` replace the weights of the same names in `model_dir`. The directories are the operator's
    own, so their files are trusted. A missing or unreadable file raises AdapterUnavailable.
    """

    def __init__(self, model_dir: Path, quantized_dir: Path | None = None) -> None:
        self._dirs = [model_dir] if quantized_dir is None else [model_dir, quantized_dir]
        self._last: tuple[str, CodedWeight] | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the weights: a hash of all names, dtypes and shapes, and of 64 evenly spaced blocks per tensor.

        Hashing every byte of a large base would delay the first DoRA adapter by minutes. Two bases with equal
        fingerprints can differ only outside these blocks.
        """
        hashed = hashlib.sha256()
        for name, tensor in itertools.chain.from_iterable(sorted(tensors.items()) for tensors in self._tensors):
            hashed.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
            last = max(tensor.begin, tensor.end - _SAMPLE_BYTES)
            for sample in range(_NUM_SAMPLES):
                at = tensor.begin + (last - tensor.begin) * sample // (_NUM_SAMPLES - 1)
                hashed.update(tensor.data[at : min(at + _SAMPLE_BYTES, tensor.end)])
        return hashed.hexdigest()

    def rows(self, module: str, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return rows `[begin, end)` of a module's weight, dequantised, float32 `[end - begin, row_len]`."""
        name = f"{module}.weight"
        if name in self._checkpoint.coded:
            return self._coded(name).dequantize(begin, end)
        if name == _HEAD and name not in self._checkpoint.plain:
            # The head is tied to the embedding.
            name = _EMBEDDING
        return self._plain(name).float_rows(begin, end)

    def place(self, module: str) -> MatrixPlace:
        """Return where a module's weight is stored, for a process that reads it without mapping the whole file.

        Raises AdapterUnavailable for a quantised weight.
        """
        name = f"{module}.weight"
        if name == _HEAD and name not in self._checkpoint.plain and name not in self._checkpoint.coded:
            name = _EMBEDDING
        tensor = self._plain(name)
        return MatrixPlace(str(tensor.path.absolute()), tensor.begin, tensor.dtype, math.prod(tensor.shape[1:]))

    def bias(self, module: str) -> npt.NDArray[np.float32] | None:
        return self.vector(f"{module}.bias")

    def vector(self, name: str) -> npt.NDArray[np.float32] | None:
        """Return a tensor of one dimension, or None if the base has no such tensor."""
        if name not in self._checkpoint.plain:
            return None
        tensor = self._plain(name)
        return tensor.float_rows(0, tensor.shape[0]).reshape(-1)

    def _plain(self, name: str) -> MappedTensor:
        tensor = self._checkpoint.plain.get(name)
        if tensor is None or tensor.dtype not in STORAGE:
            raise AdapterUnavailable(f"the base has no tensor {name}")
        return tensor

    def _coded(self, name: str) -> CodedWeight:
        """Return a quantised weight. The last weight read is cached, because its rows are read in blocks."""
        # Several threads read weights, so another thread can replace the cached weight at any time.
        last = self._last
        if last is None or last[0] != name:
            try:
                self._last = last = name, self._checkpoint.coded[name].read()
            except BaseNotSupported as error:
                raise AdapterUnavailable(f"the base's weights cannot be read: {error}") from error
        return last[1]

    @cached_property
    def _checkpoint(self) -> CheckpointTensors:
        try:
            found = [find_coded(read_format(path), it) for path, it in zip(self._dirs, self._tensors, strict=True)]
        except (OSError, ValueError, BaseNotSupported) as error:
            raise AdapterUnavailable(f"the base's weights cannot be read: {error}") from error

        return found[0] if len(found) == 1 else found[0].with_coded(found[1])

    @cached_property
    def _tensors(self) -> list[dict[str, MappedTensor]]:
        try:
            return [map_directory(path) for path in self._dirs]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AdapterUnavailable(f"the base's weights cannot be read: {type(error).__name__}") from error
