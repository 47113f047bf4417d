"""Reads some of the base's matrices from files opened in advance, in a process that can no longer open files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.files.float_formats import STORAGE, to_float32


@dataclass(frozen=True, slots=True)
class MatrixPlace:
    """A matrix in a file: its first byte, its dtype as safetensors names it, and the length of its rows."""

    path: str
    begin: int
    dtype: str
    row_len: int


class OpenMatrices:
    """Matrices by module, as `WeightRows`. The constructor opens their files, and may raise OSError."""

    def __init__(self, places: Mapping[str, MatrixPlace]) -> None:
        self._places = {module: (os.open(place.path, os.O_RDONLY), place) for module, place in places.items()}

    def rows(self, module: str, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return rows `[begin, end)`, float32 `[end - begin, row_len]`."""
        descriptor, place = self._places[module]
        storage = STORAGE[place.dtype]
        row_bytes = place.row_len * storage.itemsize
        stored = os.pread(descriptor, (end - begin) * row_bytes, place.begin + begin * row_bytes)
        return to_float32(np.frombuffer(stored, storage), place.dtype).reshape(end - begin, place.row_len)

    def bias(self, module: str) -> npt.NDArray[np.float32] | None:
        return None
