"""Reads a safetensors file one matrix at a time, so memory use is bounded by the largest matrix."""

from __future__ import annotations

import io
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import TENSORS_FILE
from loramux.adapter_store.formats.files.float_formats import ADAPTER_STORAGE, to_float32, to_pool_dtype
from loramux.adapter_store.formats.files.safetensors_header import MAX_HEADER_BYTES, header_length, parse_header

BLOCK_ELEMENTS = 1 << 20
"""Number of elements of a large matrix that are read at a time."""
_BLOCK_BYTES = 4 * BLOCK_ELEMENTS


class TensorFile:
    """An open safetensors file whose header has passed all checks: see `parse_header`.

    The constructor raises AdapterRejected if a check fails.
    """

    def __init__(
        self, source: Path | bytes, max_header_bytes: int = MAX_HEADER_BYTES, max_dimensions: Literal[2, 3] = 2
    ) -> None:
        self._file = _open(source)
        try:
            size = self._file.seek(0, os.SEEK_END)
            self._file.seek(0)
            length = header_length(self._file.read(256), size, max_header_bytes)
            self._file.seek(8)
            self.header = parse_header(self._file.read(length), size, max_dimensions)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def raw(self, name: str) -> npt.NDArray[Any]:
        """Read a tensor as stored, in `ADAPTER_STORAGE`."""
        return self.raw_rows(name, range(self.header.tensors[name].shape[0]))

    def raw_rows(self, name: str, rows: range) -> npt.NDArray[Any]:
        """Read consecutive rows of a matrix, or elements of a vector, as stored."""
        entry = self.header.tensors[name]
        dtype, row_shape = ADAPTER_STORAGE[entry.dtype], entry.shape[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        self._file.seek(self.header.data_start + entry.begin + rows.start * row_bytes)
        values: npt.NDArray[Any] = np.frombuffer(self._file.read(len(rows) * row_bytes), dtype)
        return values.reshape(len(rows), *row_shape)

    def raw_columns(self, name: str, columns: range) -> npt.NDArray[Any]:
        """Read consecutive columns of a matrix with few rows, as stored. Of a tensor with more dimensions, all but the
        first are columns.
        """
        entry = self.header.tensors[name]
        dtype, num_rows, num_columns = ADAPTER_STORAGE[entry.dtype], entry.shape[0], math.prod(entry.shape[1:])
        values: npt.NDArray[Any] = np.empty((num_rows, len(columns)), dtype)
        for index, row in enumerate(values):
            position = index * num_columns + columns.start
            self._file.seek(self.header.data_start + entry.begin + position * dtype.itemsize)
            row[:] = np.frombuffer(self._file.read(row.nbytes), dtype)
        return values

    def stored(self, name: str, rows: range | None = None) -> Iterator[bytes]:
        """Yield the bytes of a tensor, or of consecutive rows, a block at a time."""
        entry = self.header.tensors[name]
        row_bytes = (entry.end - entry.begin) // entry.shape[0] if entry.shape else entry.end - entry.begin
        rows = rows or range(entry.shape[0] if entry.shape else 1)
        self._file.seek(self.header.data_start + entry.begin + rows.start * row_bytes)
        remaining = len(rows) * row_bytes
        while remaining > 0:
            block = self._file.read(min(remaining, _BLOCK_BYTES))
            remaining -= len(block)
            yield block

    def blocks(self, name: str) -> Iterator[range]:
        """Divide the rows of a tensor into blocks, so that a large matrix need not be in memory as a whole."""
        num_rows, *others = self.header.tensors[name].shape
        step = max(1, BLOCK_ELEMENTS // max(1, math.prod(others)))
        return (range(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step))

    def converted(self, name: str, dtype: str, rows: range | None = None) -> npt.NDArray[Any]:
        """Read a tensor, or some of its rows, in the pool's `dtype`: float32, or the bits of bfloat16."""
        stored = self.header.tensors[name].dtype
        values = self.raw(name) if rows is None else self.raw_rows(name, rows)
        if dtype == "bfloat16" and stored == "BF16":
            return values
        return to_pool_dtype(to_float32(values, stored), dtype)

    def is_rounded(self, name: str) -> bool:
        """Return whether a tensor has finite values that float32 rounds."""
        if self.header.tensors[name].dtype != "F64":
            return False
        for rows in self.blocks(name):
            values = self.raw_rows(name, rows)
            if (np.isfinite(values) & (to_float32(values, "F64") != values)).any():
                return True
        return False

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        return to_float32(self.raw(name), self.header.tensors[name].dtype)


def _open(source: Path | bytes) -> BinaryIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        raise AdapterRejected("not_a_file", "the tensors file cannot be opened", TENSORS_FILE) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterRejected("not_a_file", "the tensors file is not a regular file", TENSORS_FILE)
    return os.fdopen(descriptor, "rb")
