"""The tensors of safetensors and GGUF files, mapped into memory without torch."""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.files.float_formats import STORAGE, to_float32
from loramux.adapter_store.formats.files.text_names import text_name, with_prefix

_INDEX = "model.safetensors.index.json"

GGUF_INDEX = "model.gguf.index.json"
"""A file that says where the tensors of a model directory are stored in GGUF files, which can be anywhere.

`files` lists each file's `path`, `size` and `mtime_ns`. `tensors` maps each tensor's name in a Hugging Face model to
the fields of `MappedTensor`, with `file`, an index of `files`, in place of `path` and `data`. `adapter_store/gguf`
writes it.
"""

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
    """A tensor of one file. Its values are the bytes `[begin, end)` of `data`, the contents of the file `path`.

    `paired_heads` is not 0 if the rows belong to that many heads, and the file stores the rows of each head in
    llama.cpp's order: row i of the first half is next to row i of the second half.
    """

    path: Path
    data: mmap.mmap
    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    paired_heads: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def array(self) -> npt.NDArray[Any]:
        """Return the values in `STORED[dtype]`, without a copy. Raises KeyError for a dtype that is not in `STORED`."""
        storage = STORED[self.dtype]
        stored = np.frombuffer(self.data, storage, math.prod(self.shape), self.begin).reshape(self.shape)
        return stored[self.row_order()] if self.paired_heads else stored

    def stored_bytes(self) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes as they are stored, without a copy."""
        return np.frombuffer(self.data, np.uint8, self.nbytes, self.begin)

    def row_order(self) -> npt.NDArray[np.intp]:
        """Return the stored index of each row, where `paired_heads` is not 0."""
        pairs = np.arange(self.shape[0]).reshape(self.paired_heads, -1, 2)
        return pairs.swapaxes(1, 2).reshape(-1)

    def float_rows(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return rows `[begin, end)`, float32 `[end - begin, row_len]`. The tensor's dtype must be in `STORAGE`."""
        row_len = math.prod(self.shape[1:])
        if self.paired_heads:
            rows = self.array()[begin:end]
            return to_float32(rows, self.dtype).reshape(end - begin, row_len)
        storage = STORAGE[self.dtype]
        at = self.begin + begin * row_len * storage.itemsize
        stored = np.frombuffer(self.data, storage, (end - begin) * row_len, at)
        return to_float32(stored, self.dtype).reshape(end - begin, row_len)


def map_directory(model_dir: Path) -> dict[str, MappedTensor]:
    """Map the tensors of a model directory, by their names in a text-only model.

    Includes the tensors that `GGUF_INDEX` names, if the directory has one. The directory is the operator's own, so its
    files are trusted. A malformed file raises OSError, ValueError, KeyError or TypeError.
    """
    index = model_dir / _INDEX
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    found: dict[str, MappedTensor] = {}
    for name in names or {"model.safetensors"}:
        found |= _map_file(model_dir / name)
    if (model_dir / GGUF_INDEX).is_file():
        found |= _map_gguf(model_dir / GGUF_INDEX)
    return with_prefix(found)


def _map_file(path: Path) -> dict[str, MappedTensor]:
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


def _map_gguf(index: Path) -> dict[str, MappedTensor]:
    document: dict[str, Any] = json.loads(index.read_text())
    files: list[tuple[Path, mmap.mmap]] = []
    for entry in document["files"]:
        path = Path(entry["path"])
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if (status.st_size, status.st_mtime_ns) != (entry["size"], entry["mtime_ns"]):
                raise ValueError(f"{path} has changed since its header was read")
            files.append((path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    found: dict[str, MappedTensor] = {}
    for name, entry in document["tensors"].items():
        path, data = files[entry["file"]]
        begin, end, shape = entry["begin"], entry["end"], tuple(entry["shape"])
        found[name] = MappedTensor(path, data, begin, end, entry["dtype"], shape, entry.get("paired_heads", 0))
    return found
