"""A strict parser for safetensors headers, which runs before any other code reads the file.

A file consists of:

- eight bytes with the header's length, little-endian;
- the header, JSON that gives each tensor's dtype, shape and half-open byte range `[begin, end)` in the data;
- the data, without gaps.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Literal

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import TENSORS_FILE
from loramux.adapter_store.formats.files.float_formats import ADAPTER_STORAGE
from loramux.adapter_store.formats.files.ignored_tensors import MAX_DIMENSIONS, is_ignored
from loramux.adapter_store.formats.files.strict_json import DuplicateKey, InvalidJson, parse_strict_json

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 1 << 20
_MAX_DIMENSION = 1 << 31

_OTHER_DTYPES = frozenset(
    {"BOOL", "C64", "F4", "F8_E8M0"} | {f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)}
)
"""The other dtypes of the format. Messages do not repeat text that a tenant chose."""

_NOT_GATHERED = (
    "if the adapter was trained with DeepSpeed ZeRO-3, save it with stage3_gather_16bit_weights_on_model_save, "
    "or inside deepspeed.zero.GatheredParameters, so that the file has the weights of all processes"
)
"""What leaves empty tensors in a file. With ZeRO-3, each process has only a part of each tensor."""

_MISTAKEN = {
    b"version http": "is a Git LFS pointer: replace it with the file itself, for example with git lfs pull",
    b"GGUF": "is in GGUF format: use it as a .gguf file, not inside a directory",
    b"\x93NUMPY": "is a numpy array: save the tensors with safetensors",
    b"\x89HDF": "is in HDF5 format: save the tensors with safetensors",
    b"<!DOCTYPE": "is a web page: the download went wrong, so download the file again",
    b"<html": "is a web page: the download went wrong, so download the file again",
}
"""What is wrong with files that begin like this."""

_ARCHIVES = (b"PK", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"Rar!", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in the file, at bytes `[begin, end)` of the data.

    It is a matrix, or a vector such as a bias or a norm. A tensor that is ignored can have any shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The tensors by name, the text metadata, and the file offset at which the data begins."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int


def header_length(start: bytes, file_size: int, max_header_bytes: int = MAX_HEADER_BYTES) -> int:
    """Return the header's length, given at least the first nine bytes of a file, or the whole file if it is shorter.

    Raises AdapterRejected.
    """
    if file_size <= LENGTH_BYTES:
        raise AdapterRejected("truncated_file", f"a file of {file_size} bytes contains no tensors", TENSORS_FILE)
    # The first eight bytes are a length, so a valid file can begin like a pickle. The ninth byte tells them apart.
    if start[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        raise _foreign_file(start)
    (length,) = struct.unpack_from("<Q", start)
    if length > max_header_bytes:
        raise AdapterRejected("header_too_large", f"the header has more than {max_header_bytes} bytes", TENSORS_FILE)
    if LENGTH_BYTES + length > file_size:
        raise AdapterRejected("truncated_file", "the file ends inside its header", TENSORS_FILE)
    return int(length)


def parse_header(header: bytes, file_size: int, max_dimensions: Literal[2, 3] = 2) -> SafetensorsHeader:
    """Parse and check the header of a file of `file_size` bytes. Except for vectors, tensors may have two to
    `max_dimensions` dimensions. Raises AdapterRejected.
    """
    try:
        document = parse_strict_json(header)
    except DuplicateKey as error:
        raise AdapterRejected("duplicate_key", f"in the header, {error}", TENSORS_FILE) from None
    except InvalidJson as error:
        raise AdapterRejected("invalid_header", f"the header is not JSON: {error}", TENSORS_FILE) from None
    if not isinstance(document, dict):
        raise AdapterRejected("invalid_header", "the header is not an object", TENSORS_FILE)
    metadata = _metadata(document.pop("__metadata__", None))
    tensors = {name: _entry(name, value, max_dimensions) for name, value in document.items()}
    data_start = LENGTH_BYTES + len(header)
    _check_ranges(tensors, file_size - data_start)
    return SafetensorsHeader(tensors, metadata, data_start)


def _foreign_file(start: bytes) -> AdapterRejected:
    if start[:1] == b"\x80" or b".pkl" in start:
        return AdapterRejected("pickle_not_allowed", "the file is a pickle; only safetensors is accepted", TENSORS_FILE)
    if start.startswith(_ARCHIVES):
        return AdapterRejected("archive_not_allowed", "the file is an archive; upload its contents", TENSORS_FILE)
    return AdapterRejected(
        "not_safetensors", f"the file {mistaken_format(start) or 'is not in safetensors format'}", TENSORS_FILE
    )


def mistaken_format(start: bytes) -> str | None:
    """Return what is wrong with a file that begins with these bytes, if it is of a known other format."""
    return next((mistake for magic, mistake in _MISTAKEN.items() if start.startswith(magic)), None)


def _metadata(value: Any) -> dict[str, str]:
    # MLX writes null if there are none.
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise AdapterRejected("invalid_header", "__metadata__ must be an object of strings", TENSORS_FILE)
    return value


def _entry(name: str, value: Any, max_dimensions: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise AdapterRejected("invalid_header", "a tensor must have exactly dtype, shape and data_offsets", name)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise AdapterRejected("invalid_header", "dtype, shape or data_offsets is malformed", name)
    if dtype not in ADAPTER_STORAGE:
        found = f", not {dtype}" if dtype in _OTHER_DTYPES else ""
        allowed = ", ".join(ADAPTER_STORAGE)
        raise AdapterRejected("unsupported_dtype", f"the dtype must be one of {allowed}{found}", name)
    if 0 in shape:
        raise AdapterRejected("empty_tensor", f"the tensor has the shape {shape} and no values: {_NOT_GATHERED}", name)
    is_matrix = 2 <= len(shape) <= max_dimensions
    if not is_matrix and not (len(shape) == 1 and _may_be_vector(name)) and not _may_have_any_shape(name, shape):
        wanted = "two" if max_dimensions == 2 else "two or three"
        raise AdapterRejected(
            "tensor_not_2d", f"the tensor has the shape {shape[:8]}, but it must have {wanted} dimensions", name
        )
    begin, end = offsets
    if end - begin != math.prod(shape) * ADAPTER_STORAGE[dtype].itemsize:
        raise AdapterRejected("invalid_offsets", "data_offsets do not match dtype and shape", name)
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def _may_be_vector(name: str) -> bool:
    module, _, part = name.rpartition(".")
    # mlx-lm calls the magnitudes of a DoRA `m`.
    return (
        ".lora_magnitude" in name or part in ("bias", "m") or (part == "weight" and "norm" in module.rpartition(".")[2])
    )


def _may_have_any_shape(name: str, shape: list[int]) -> bool:
    return len(shape) <= MAX_DIMENSIONS and is_ignored(name)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _MAX_DIMENSION**2 for item in value)


def _check_ranges(tensors: dict[str, TensorEntry], data_bytes: int) -> None:
    position = 0
    for entry in sorted(tensors.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            raise AdapterRejected("invalid_offsets", "the tensors overlap or leave a gap", entry.name)
        position = entry.end
    if position > data_bytes:
        raise AdapterRejected(
            "truncated_file",
            f"the file has {data_bytes} bytes of data but its header declares {position}",
            TENSORS_FILE,
        )
    if position < data_bytes:
        raise AdapterRejected("invalid_offsets", f"{data_bytes - position} bytes follow the last tensor", TENSORS_FILE)
