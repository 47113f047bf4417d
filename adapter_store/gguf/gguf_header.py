"""A strict parser of the headers of GGUF files, with bounded time and memory for any header.

A file is little-endian and consists of:

- `GGUF`, the version, the number of tensors and the number of metadata entries;
- each entry's key, type and value;
- each tensor's name, dimensions (fastest-varying first), type and offset;
- padding and the tensors' data.

The `gguf` package maps the file and trusts its counts and lengths, so it is not used here. Tests compare its results
with this parser's.
"""

from __future__ import annotations

import itertools
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from loramux.adapter_store.errors import ConversionRefused, printable
from loramux.adapter_store.formats.quantization.gguf_blocks import can_store, stored_bytes

MAX_TENSORS = 1 << 15
MAX_ENTRIES = 1 << 12
_MAX_DEPTH = 2
_MAX_DIMENSIONS = 4
_MAX_DIMENSION = 1 << 31
_MAX_ALIGNMENT = 1 << 16

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The `struct` format of each numeric or boolean value type."""
_LAYOUTS = {kind: struct.Struct(f"<{kind}") for kind in _SCALARS.values()}
_LENGTH = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9

TENSOR_TYPES = {
    0: "F32",
    1: "F16",
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
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


@dataclass(frozen=True, slots=True)
class HeaderRules:
    """What a header may contain.

    `max_bytes` counts up to the tensors' data, and `max_elements` counts the elements of all arrays together. `dtypes`
    are the types that tensors may have, and `advice` tells the user what to do about another type. `check_entry`
    gets each metadata entry as soon as it is read. It raises ConversionRefused for another kind of file, before the
    other limits give a misleading error.
    """

    max_bytes: int
    max_elements: int
    dtypes: frozenset[str]
    advice: str
    check_entry: Callable[[str, Any], None] = lambda key, value: None


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor that starts at byte `begin` of the file. The first dimension of `shape` varies slowest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file. Raises ConversionRefused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ConversionRefused("not_a_file", f"the file cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConversionRefused("not_a_file", f"{printable(str(path), 200)} is not a regular file")
    return os.fdopen(descriptor, "rb")


class HeaderParser:
    """Parses the start of a file of `file_size` bytes, without reading beyond the given bytes."""

    def __init__(self, start: bytes | mmap.mmap, file_size: int, rules: HeaderRules) -> None:
        self._start = start
        self._end = min(len(start), rules.max_bytes)
        self._file_size = file_size
        self._rules = rules
        self._num_elements = 0
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return the metadata and the tensors, which lie inside the file and do not overlap.

        Raises ConversionRefused.
        """
        if self._start[:4] != b"GGUF":
            raise ConversionRefused("not_gguf", "the file is not in GGUF format")
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
            metadata[key] = self._value(self._number("I"), 0, key)
            self._rules.check_entry(key, metadata[key])
        declared = list(self._declared(num_tensors))
        return metadata, self._placed(declared, self._data_start(metadata))

    def _declared(self, num_tensors: int) -> Iterator[GgufTensor]:
        """Yield the tensors, with `begin` relative to the start of the data."""
        for _ in range(num_tensors):
            name = self._string()
            num_dimensions = self._count("I", _MAX_DIMENSIONS, "dimensions", name)
            sizes = [self._count("Q", _MAX_DIMENSION, "elements in a dimension", name) for _ in range(num_dimensions)]
            number, begin = self._number("I"), self._number("Q")
            dtype = TENSOR_TYPES.get(number, f"number {number}")
            if dtype not in self._rules.dtypes:
                message = f"the tensor type {dtype} is not supported: {self._rules.advice}"
                raise ConversionRefused("unsupported_dtype", message, name)
            yield GgufTensor(name, dtype, tuple(reversed(sizes)), begin)

    def _placed(self, declared: list[GgufTensor], data_start: int) -> dict[str, GgufTensor]:
        num_bytes = max(0, self._file_size - data_start)
        tensors: dict[str, GgufTensor] = {}
        spans: list[tuple[int, int]] = []
        for tensor in declared:
            if tensor.name in tensors:
                raise ConversionRefused("duplicate_key", "a tensor appears twice", tensor.name)
            if not can_store(tensor.dtype, tensor.shape):
                message = f"rows of shape {list(tensor.shape)} cannot have blocks of type {tensor.dtype}"
                raise ConversionRefused("invalid_header", message, tensor.name)
            size = stored_bytes(tensor.dtype, tensor.shape)
            if tensor.begin + size > num_bytes:
                raise ConversionRefused("truncated_file", "the tensor extends beyond the end of the file", tensor.name)
            spans.append((tensor.begin, tensor.begin + size))
            tensors[tensor.name] = replace(tensor, begin=data_start + tensor.begin)
        # Tensors that share bytes could make the converted file many times larger.
        spans.sort()
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(spans)):
            raise ConversionRefused("invalid_offsets", "the tensors overlap")
        return tensors

    def _data_start(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ConversionRefused("invalid_header", "general.alignment is out of range", "general.alignment")
        return -(-self._at // alignment) * alignment

    def _value(self, kind: int, depth: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise ConversionRefused("invalid_header", f"a metadata value has type {kind}, which is not supported here")
        inner = self._number("I")
        length = self._number("Q")
        # An element takes at least one byte, so a longer array is cut off. Say so, instead of counting its elements.
        if length > self._end - self._at:
            raise self._cut_off()
        self._num_elements += length
        if self._num_elements > self._rules.max_elements:
            most = self._rules.max_elements
            message = f"the arrays of the header have more than {most} elements"
            raise ConversionRefused("header_too_large", message, key)
        if inner in _SCALARS:
            layout = _LAYOUTS[_SCALARS[inner]]
            return [value for (value,) in layout.iter_unpack(self._take(length * layout.size))]
        if inner == _STRING:
            return self._strings(length)
        return [self._value(inner, depth + 1, key) for _ in range(length)]

    def _strings(self, length: int) -> list[str]:
        """Read strings without a call for each, because a tokenizer has hundreds of thousands."""
        start, at, end, unpack = self._start, self._at, self._end, _LENGTH.unpack_from
        found: list[str] = []
        try:
            for _ in range(length):
                begin = at + 8
                if begin > end:
                    raise self._cut_off()
                at = begin + unpack(start, at)[0]
                if at > end:
                    raise self._cut_off()
                found.append(start[begin:at].decode())
        except UnicodeDecodeError:
            raise ConversionRefused("invalid_header", "a name or another string is not UTF-8") from None
        self._at = at
        return found

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
        if end > self._end:
            raise self._cut_off()
        taken = self._start[self._at : end]
        self._at = end
        return taken

    def _cut_off(self) -> ConversionRefused:
        if self._end == self._rules.max_bytes:
            return ConversionRefused("header_too_large", f"the header has more than {self._end} bytes")
        return ConversionRefused("truncated_file", "the file ends inside its header")
