"""A strict reader of adapters in GGUF files, with bounded time and memory for any header.

A file is little-endian and consists of:

- `GGUF`, the version, the number of tensors and the number of metadata entries;
- each entry's key, type and value;
- each tensor's name, dimensions (fastest-varying first), type and offset;
- padding and the tensors' data.

The `gguf` package maps the file and trusts its counts and lengths, so it is not used here. Tests compare its results
with this reader's.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import ConversionRefused, printable
from loramux.adapter_store.formats.files.float_formats import STORAGE, to_float32

MAX_HEADER_BYTES = 4 << 20
"""Largest header, up to the tensors' data, in bytes. An adapter with 1,000 modules needs about 150,000 bytes."""

MAX_TENSORS = 1 << 15
MAX_ENTRIES = 1 << 12
_MAX_DEPTH = 2
_MAX_DIMENSIONS = 4
_MAX_DIMENSION = 1 << 31
_MAX_ALIGNMENT = 1 << 16

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The `struct` format of each numeric or boolean value type."""
_LAYOUTS = {kind: struct.Struct(f"<{kind}") for kind in _SCALARS.values()}
_STRING, _ARRAY = 8, 9

_FLOATS = {0: "F32", 1: "F16", 30: "BF16"}
"""The tensor types that adapters may have, by number."""

_OTHER_TYPES = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A matrix `[rows, columns]` that starts at byte `begin` of the file."""

    name: str
    dtype: str
    shape: tuple[int, int]
    begin: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * STORAGE[self.dtype].itemsize


class GgufFile:
    """An open GGUF file that contains only matrices. Raises ConversionRefused if a check of the header fails."""

    def __init__(self, path: Path) -> None:
        self._file = _open(path)
        try:
            size = os.fstat(self._file.fileno()).st_size
            header = _Header(self._file.read(MAX_HEADER_BYTES), size)
            self.metadata, self.tensors = header.parse()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        tensor = self.tensors[name]
        self._file.seek(tensor.begin)
        data = self._file.read(tensor.num_bytes)
        if len(data) != tensor.num_bytes:
            raise ConversionRefused("truncated_file", "the file was truncated during the read", name)
        return to_float32(np.frombuffer(data, STORAGE[tensor.dtype]).reshape(tensor.shape), tensor.dtype)


class _Header:
    """Parses the start of a file of `file_size` bytes, without reading beyond the given bytes."""

    def __init__(self, start: bytes, file_size: int) -> None:
        self._start = start
        self._file_size = file_size
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._start[:4] != b"GGUF":
            raise ConversionRefused(
                "not_gguf", "the file is not in GGUF format: to push an adapter in PEFT's format, choose its directory"
            )
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            is_big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            kind = "big-endian GGUF" if is_big_endian else f"version {version} of GGUF"
            raise ConversionRefused("unsupported_gguf", f"{kind} is not supported: convert with a current llama.cpp")
        num_tensors = self._count("Q", MAX_TENSORS, "tensors")
        num_entries = self._count("Q", MAX_ENTRIES, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            if key in metadata:
                raise ConversionRefused("duplicate_key", "a metadata key appears twice", key)
            metadata[key] = self._value(self._number("I"), 0)
        declared = list(self._declared(num_tensors))
        return metadata, self._placed(declared, self._data_start(metadata))

    def _declared(self, num_tensors: int) -> Iterator[GgufTensor]:
        """Yield the tensors, with `begin` relative to the start of the data."""
        for _ in range(num_tensors):
            name = self._string()
            num_dimensions = self._count("I", _MAX_DIMENSIONS, "dimensions", name)
            sizes = [self._count("Q", _MAX_DIMENSION, "elements in a dimension", name) for _ in range(num_dimensions)]
            number, begin = self._number("I"), self._number("Q")
            if number not in _FLOATS:
                shown = _OTHER_TYPES.get(number, f"number {number}")
                message = (
                    f"the tensor type {shown} is not supported: convert the adapter with --outtype f16, bf16 or f32"
                )
                raise ConversionRefused("unsupported_dtype", message, name)
            if len(sizes) != 2 or 0 in sizes:
                raise ConversionRefused(
                    "tensor_not_2d", f"the tensor has dimensions {sizes}, but must be a matrix", name
                )
            yield GgufTensor(name, _FLOATS[number], (sizes[1], sizes[0]), begin)

    def _placed(self, declared: list[GgufTensor], data_start: int) -> dict[str, GgufTensor]:
        num_bytes = max(0, self._file_size - data_start)
        tensors: dict[str, GgufTensor] = {}
        for tensor in declared:
            if tensor.name in tensors:
                raise ConversionRefused("duplicate_key", "a tensor appears twice", tensor.name)
            if tensor.begin + tensor.num_bytes > num_bytes:
                raise ConversionRefused("truncated_file", "the tensor extends beyond the end of the file", tensor.name)
            tensors[tensor.name] = GgufTensor(tensor.name, tensor.dtype, tensor.shape, data_start + tensor.begin)
        # Tensors that share bytes could make the converted file many times larger.
        if sum(tensor.num_bytes for tensor in tensors.values()) > num_bytes:
            raise ConversionRefused("invalid_offsets", "the tensors overlap")
        return tensors

    def _data_start(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ConversionRefused("invalid_header", "general.alignment is out of range", "general.alignment")
        return -(-self._at // alignment) * alignment

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise ConversionRefused("invalid_header", f"a metadata value has type {kind}, which is not supported here")
        inner = self._number("I")
        length = self._number("Q")
        if inner in _SCALARS:
            layout = _LAYOUTS[_SCALARS[inner]]
            return [value for (value,) in layout.iter_unpack(self._take(length * layout.size))]
        # Each value takes at least eight bytes, so an excessive length ends with an error, not a long loop.
        return [self._value(inner, depth + 1) for _ in range(min(length, MAX_HEADER_BYTES))]

    def _string(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError:
            raise ConversionRefused("invalid_header", "a name or another string is not UTF-8") from None

    def _count(self, kind: str, most: int, what: str, param: str | None = None) -> int:
        value = int(self._number(kind))
        if value > most:
            raise ConversionRefused(
                "invalid_header", f"the header declares {value} {what}; at most {most} are supported", param
            )
        return value

    def _number(self, kind: str) -> Any:
        layout = _LAYOUTS[kind]
        return layout.unpack(self._take(layout.size))[0]

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._start):
            if len(self._start) == MAX_HEADER_BYTES:
                raise ConversionRefused("header_too_large", f"the header has more than {MAX_HEADER_BYTES} bytes")
            raise ConversionRefused("truncated_file", "the file ends inside its header")
        taken = self._start[self._at : end]
        self._at = end
        return taken


def _open(path: Path) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ConversionRefused("not_a_file", f"the file cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConversionRefused("not_a_file", f"{printable(str(path), 200)} is not a regular file")
    return os.fdopen(descriptor, "rb")
