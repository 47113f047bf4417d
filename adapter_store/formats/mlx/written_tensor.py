"""A tensor of the converted file, and how its bytes are made of the tensors of mlx-lm's file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.files.float_formats import ADAPTER_STORAGE
from loramux.adapter_store.formats.files.safetensors_header import LENGTH_BYTES, TensorEntry
from loramux.adapter_store.formats.files.tensor_file import BLOCK_ELEMENTS, TensorFile


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """`write` writes all bytes of the tensor at the current position of the file, in bounded memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    write: Callable[[BinaryIO], None]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * ADAPTER_STORAGE[self.dtype].itemsize


def copied(file: TensorFile, entry: TensorEntry, name: str) -> WrittenTensor:
    """The tensor as it is in mlx-lm's file."""
    return WrittenTensor(name, entry.dtype, entry.shape, lambda out: out.writelines(file.stored(entry.name)))


def transposed_a(file: TensorFile, entry: TensorEntry, name: str) -> WrittenTensor:
    """PEFT's A `[rank, in_features]` of a lora_a `[in_features, rank]`."""

    def write(out: BinaryIO) -> None:
        in_features, rank = entry.shape
        start, item_bytes = out.tell(), ADAPTER_STORAGE[entry.dtype].itemsize
        for rows in file.blocks(entry.name):
            block = file.raw_rows(entry.name, rows).T
            if len(rows) == in_features:
                # The file can have thousands of small matrices, whose rows would each take a call.
                write_array(out, block)
                return
            for index in range(rank):
                out.seek(start + (index * in_features + rows.start) * item_bytes)
                write_array(out, block[index])

    return WrittenTensor(name, entry.dtype, entry.shape[::-1], write)


def transposed_b(file: TensorFile, entry: TensorEntry, name: str) -> WrittenTensor:
    """PEFT's B `[out_features, rank]` of a lora_b `[rank, out_features]`."""

    def write(out: BinaryIO) -> None:
        rank, out_features = entry.shape
        step = BLOCK_ELEMENTS // rank
        for begin in range(0, out_features, step):
            columns = range(begin, min(begin + step, out_features))
            write_array(out, file.raw_columns(entry.name, columns).T)

    return WrittenTensor(name, entry.dtype, entry.shape[::-1], write)


def write_array(out: BinaryIO, values: npt.NDArray[Any]) -> None:
    out.write(np.ascontiguousarray(values).data)


def write_tensors(tensors: Sequence[WrittenTensor], path: Path) -> None:
    """Write a safetensors file with these tensors."""
    document: dict[str, object] = {}
    position = 0
    for tensor in tensors:
        end = position + tensor.num_bytes
        document[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (position, end)}
        position = end
    header = json.dumps(document, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    with path.open("wb") as out:
        out.write(len(header).to_bytes(LENGTH_BYTES, "little"))
        out.write(header)
        for tensor in tensors:
            tensor.write(out)
