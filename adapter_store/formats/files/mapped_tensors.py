"""The tensors of safetensors files, mapped into memory without torch."""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.files.float_formats import STORAGE, to_float32
from loramux.adapter_store.formats.files.text_names import text_name

_INDEX = "model.safetensors.index.json"

_BYTES = np.dtype("u1")
STORED: dict[str, np.dtype[Any]] = {
    **STORAGE,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    **dict.fromkeys(("I8", "U8", "F8_E4M3", "F8_E8M0"), _BYTES),
}
"""The numpy dtype that stores values of each safetensors dtype. All 8-bit values are stored as unsigned bytes."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of one file. Its values are the bytes `[begin, end)` of `data`, the contents of the file `path`."""

    path: Path
    data: mmap.mmap
    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def array(self) -> npt.NDArray[Any]:
        """Return the values in `STORED[dtype]`, without a copy. Raises KeyError for a dtype that is not in `STORED`."""
        storage = STORED[self.dtype]
        return np.frombuffer(self.data, storage, math.prod(self.shape), self.begin).reshape(self.shape)

    def float_rows(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return rows `[begin, end)`, float32 `[end - begin, row_len]`. The tensor's dtype must be in `STORAGE`."""
        row_len = math.prod(self.shape[1:])
        storage = STORAGE[self.dtype]
        at = self.begin + begin * row_len * storage.itemsize
        stored = np.frombuffer(self.data, storage, (end - begin) * row_len, at)
        return to_float32(stored, self.dtype).reshape(end - begin, row_len)


def map_directory(model_dir: Path) -> dict[str, MappedTensor]:
    """Map the tensors of a model directory, by their names in a text-only model.

    The directory is the operator's own, so its files are trusted. A malformed file raises OSError, ValueError, KeyError
    or TypeError.
    """
    index = model_dir / _INDEX
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    found: dict[str, MappedTensor] = {}
    for name in names or {"model.safetensors"}:
        found |= map_file(model_dir / name)
    return found


def map_file(path: Path) -> dict[str, MappedTensor]:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:start])
    header.pop("__metadata__", None)
    found: dict[str, MappedTensor] = {}
    for stored, entry in header.items():
        name = text_name(stored)
        if name is not None:
            begin, end = entry["data_offsets"]
            found[name] = MappedTensor(path, data, start + begin, start + end, entry["dtype"], tuple(entry["shape"]))
    return found
