from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle  # noqa: TID251 - to show that it is refused
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.adapter_store.validation.hostile import CONFIG, MARK, Q_A, TENSORS, Hostile, entry, good_header, header_file


class _Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"echo {MARK}",)


def _zip(names: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, content in names.items():
            file.writestr(name, content)
    return out.getvalue()


def _tar(mode: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as file:  # type: ignore[call-overload]
        file.addfile(tarfile.TarInfo(f"../../{MARK}"))
    return out.getvalue()


def _spoilt(change: Callable[[dict[str, Any]], object], data: Callable[[bytes], bytes] = lambda data: data) -> bytes:
    header, bytes_of = good_header()
    change(header)
    return header_file(header, data(bytes_of))


def _raw(template: str) -> bytes:
    """A file with one 4 by 32 matrix, whose header entry is written exactly as given."""
    return header_file(f'{{"{MARK}": {template}}}'.encode(), bytes(512))


def _file(name: str, code: str, tensors: bytes | Callable[[], bytes], param: str = TENSORS) -> Hostile:
    return Hostile(name=name, code=code, param=param, tensors=tensors)


def _elsewhere(path: Path, data: bytes) -> Path:
    other = path.with_name("other")
    other.write_bytes(data)
    return other


_GOOD_ENTRY = '{"dtype": "F32", "shape": [4, 32], "data_offsets": [0, 512]}'

FOREIGN = [
    _file("empty file", "truncated_file", b""),
    _file("one byte", "truncated_file", b"\x00"),
    _file("length and nothing else", "truncated_file", struct.pack("<Q", 2)),
    _file("pickle", "pickle_not_allowed", pickle.dumps({MARK: [1.0] * 50})),
    _file("pickle that runs a command", "pickle_not_allowed", pickle.dumps(_Command())),
    *(
        _file(f"pickle protocol {protocol}", "pickle_not_allowed", pickle.dumps({MARK: 1.5}, protocol))
        for protocol in (2, 3, 5)
    ),
    _file("pickle protocol 0", "not_safetensors", pickle.dumps({MARK: 1.5}, 0)),
    _file("torch.save file", "pickle_not_allowed", lambda: _zip({"archive/data.pkl": pickle.dumps({MARK: 1})})),
    _file("zip of the right files", "archive_not_allowed", lambda: _zip({TENSORS: b"x", CONFIG: b"{}"})),
    _file("zip that leads upwards", "archive_not_allowed", lambda: _zip({f"../../{MARK}": b"x"})),
    _file("zip bomb", "archive_not_allowed", lambda: _zip({MARK: bytes(1 << 20)})),
    _file("tar", "not_safetensors", lambda: _tar("w")),
    _file("tar.gz", "archive_not_allowed", lambda: _tar("w:gz")),
    _file("gzip", "archive_not_allowed", gzip.compress(b"{}" * 100)),
    _file("bzip2", "archive_not_allowed", bz2.compress(b"{}" * 100)),
    _file("xz", "archive_not_allowed", lzma.compress(b"{}" * 100)),
    _file("7z", "archive_not_allowed", b"7z\xbc\xaf\x27\x1c" + bytes(64)),
    _file("rar", "archive_not_allowed", b"Rar!\x1a\x07\x00" + bytes(64)),
    _file("zstandard", "archive_not_allowed", b"\x28\xb5\x2f\xfd" + bytes(64)),
    _file("ELF program", "not_safetensors", b"\x7fELF\x02\x01\x01" + bytes(64)),
    _file("Windows program", "not_safetensors", b"MZ\x90\x00\x03" + bytes(64)),
    _file("shell script", "not_safetensors", f"#!/bin/sh\necho {MARK}\n".encode()),
    _file("web page", "not_safetensors", f"<!DOCTYPE html><html>{MARK}</html>".encode()),
    _file("LFS pointer", "not_safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
    _file("GGUF", "not_safetensors", b"GGUF\x03\x00\x00\x00" + bytes(64)),
    _file("numpy array", "not_safetensors", b"\x93NUMPY\x01\x00v\x00" + b"x" * 64),
    _file("HDF5", "not_safetensors", b"\x89HDF\r\n\x1a\n" + bytes(64)),
    _file("a configuration", "not_safetensors", json.dumps({"peft_type": "LORA", MARK: 1}).encode()),
    _file("only zeros", "not_safetensors", bytes(4096)),
    _file("only ones", "not_safetensors", b"\xff" * 4096),
]

LENGTHS = [
    _file("header of no length", "not_safetensors", struct.pack("<Q", 0) + bytes(8)),
    _file("header over the limit", "header_too_large", struct.pack("<Q", (1 << 20) + 1) + b"{" + b" " * (1 << 20)),
    _file("header of 2**63 bytes", "header_too_large", struct.pack("<Q", 1 << 63) + b"{}"),
    _file("header of 2**64 - 1 bytes", "header_too_large", struct.pack("<Q", (1 << 64) - 1) + b"{}"),
    _file("header longer than the file", "truncated_file", struct.pack("<Q", 100) + b"{}"),
    _file("header one byte too long", "invalid_header", lambda: header_file(b'{"a": {}}\x00')),
    _file("big-endian length", "header_too_large", struct.pack(">Q", 2) + b"{}"),
    _file("header that ends early", "invalid_header", struct.pack("<Q", 1) + b"{}"),
    _file("data cut off", "truncated_file", lambda: _spoilt(lambda header: None, lambda data: data[:-1])),
    _file("no data at all", "truncated_file", lambda: _spoilt(lambda header: None, lambda data: b"")),
    _file("a byte left over", "invalid_offsets", lambda: _spoilt(lambda header: None, lambda data: data + b"\x00")),
    _file(
        "an archive behind the data", "invalid_offsets", lambda: _spoilt(lambda header: None, lambda d: d + b"PK\3\4")
    ),
]

JSON_TRICKS = [
    _file("header is not JSON", "invalid_header", header_file(b"{" + MARK.encode())),
    _file("header is not UTF-8", "invalid_header", header_file(b'{"\xff\xfe": 1}')),
    _file("header in UTF-16", "not_safetensors", header_file("{}".encode("utf-16"))),
    _file("header with a byte order mark", "not_safetensors", header_file(b"\xef\xbb\xbf{}")),
    _file("header begins with a space", "not_safetensors", header_file(b" {}" + bytes(8))),
    _file("header is a list", "not_safetensors", header_file(b"[{}]")),
    _file("two headers", "invalid_header", header_file(b"{}{}")),
    _file("comment in the header", "invalid_header", header_file(b'{/* %b */ "a": 1}' % MARK.encode())),
    _file("comma too many", "invalid_header", header_file(b'{"a": [1,],}')),
    _file("line break in a name", "invalid_header", header_file(b'{"kil\nroy": {}}')),
    _file("NaN in the header", "invalid_header", header_file(b'{"a": NaN}')),
    _file("infinity in the header", "invalid_header", header_file(b'{"a": -Infinity}')),
    _file("number beyond a double", "invalid_header", header_file(b'{"a": 1e999}')),
    _file("number of 5000 digits", "invalid_header", header_file(b'{"a": %b}' % (b"1" * 5000))),
    _file("200000 lists deep", "invalid_header", header_file(b'{"a": ' + b"[" * 200_000)),
    _file("200000 objects deep", "invalid_header", header_file(b'{"a":' * 200_000)),
    _file(
        "half a character as a name",
        "invalid_header",
        header_file(b'{"\\ud800": %b}' % _GOOD_ENTRY.encode(), bytes(512)),
    ),
    _file(
        "tensor named twice",
        "duplicate_key",
        lambda: header_file(f'{{"{MARK}": {_GOOD_ENTRY}, "{MARK}": {_GOOD_ENTRY}}}'.encode(), bytes(512)),
    ),
    _file(
        "tensor named twice, once escaped",
        "duplicate_key",
        lambda: header_file(f'{{"a": {_GOOD_ENTRY}, "\\u0061": {_GOOD_ENTRY}}}'.encode(), bytes(512)),
    ),
    _file("shape given twice", "duplicate_key", _raw(_GOOD_ENTRY[:-1] + ', "shape": [32, 4]}')),
    _file("metadata given twice", "duplicate_key", header_file(b'{"__metadata__": {}, "__metadata__": {}}')),
    _file("metadata are a list", "invalid_header", header_file({"__metadata__": [MARK]})),
    _file("metadata are text", "invalid_header", header_file({"__metadata__": MARK})),
    _file("metadata hold a number", "invalid_header", header_file({"__metadata__": {"format": 1}})),
    _file("metadata hold NaN", "invalid_header", header_file(b'{"__metadata__": {"format": NaN}}')),
    _file("metadata hold an object", "invalid_header", header_file({"__metadata__": {MARK: {"a": "b"}}})),
]

ENTRIES = [
    _file("entry is a list", "invalid_header", _raw("[1]"), MARK),
    _file("entry is null", "invalid_header", _raw("null"), MARK),
    _file("entry is empty", "invalid_header", _raw("{}"), MARK),
    _file("entry with an unknown field", "invalid_header", _raw(_GOOD_ENTRY[:-1] + ', "strides": [1]}'), MARK),
    _file("entry without a dtype", "invalid_header", _raw('{"shape": [4, 32], "data_offsets": [0, 512]}'), MARK),
    _file("dtype is a number", "invalid_header", lambda: header_file({MARK: entry(0, 512, dtype=7)}), MARK),
    _file("dtype is an object", "invalid_header", lambda: header_file({MARK: entry(0, 512, dtype={"a": 1})}), MARK),
    *(
        _file(f"dtype {dtype}", "unsupported_dtype", header_file({MARK: entry(0, 512, dtype=dtype)}, bytes(512)), MARK)
        for dtype in ("I8", "U8", "I16", "I32", "I64", "BOOL", "F8_E8M0", "F4", "C64", "f32", "f64", "", MARK)
    ),
    _file("shape is a number", "invalid_header", _raw(_GOOD_ENTRY.replace("[4, 32]", "128")), MARK),
    _file("shape of floats", "invalid_header", _raw(_GOOD_ENTRY.replace("[4, 32]", "[4.0, 32]")), MARK),
    _file("shape of truths", "invalid_header", _raw(_GOOD_ENTRY.replace("[4, 32]", "[true, 128]")), MARK),
    _file("shape of texts", "invalid_header", _raw(_GOOD_ENTRY.replace("[4, 32]", '["4", 32]')), MARK),
    _file("negative shape", "invalid_header", _raw(_GOOD_ENTRY.replace("[4, 32]", "[-4, -32]")), MARK),
    _file("minus zero as a size", "invalid_header", _raw(_GOOD_ENTRY.replace("[4, 32]", "[-0, 32]")), MARK),
    _file(
        "shape whose product overflows", "invalid_header", _raw(_GOOD_ENTRY.replace("[4, 32]", f"[{2**62}, 4]")), MARK
    ),
    _file("shape of 2**61 by 4", "invalid_offsets", _raw(_GOOD_ENTRY.replace("[4, 32]", f"[{2**61}, 4]")), MARK),
    _file("a number", "tensor_not_2d", _raw('{"dtype": "F32", "shape": [], "data_offsets": [0, 4]}'), MARK),
    _file("one dimension", "tensor_not_2d", _raw(_GOOD_ENTRY.replace("[4, 32]", "[128]")), MARK),
    _file("no values", "empty_tensor", _raw('{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'), MARK),
    _file(
        "matrix of no rows", "empty_tensor", _raw('{"dtype": "F32", "shape": [0, 32], "data_offsets": [0, 0]}'), MARK
    ),
    _file("three dimensions", "tensor_not_2d", _raw(_GOOD_ENTRY.replace("[4, 32]", "[1, 4, 32]")), MARK),
    _file("a thousand dimensions", "tensor_not_2d", _raw(_GOOD_ENTRY.replace("[4, 32]", str([1] * 1000))), MARK),
]

OFFSETS = [
    _file("one offset", "invalid_header", _raw(_GOOD_ENTRY.replace("[0, 512]", "[0]")), MARK),
    _file("three offsets", "invalid_header", _raw(_GOOD_ENTRY.replace("[0, 512]", "[0, 256, 512]")), MARK),
    _file("negative offset", "invalid_header", _raw(_GOOD_ENTRY.replace("[0, 512]", "[-512, 0]")), MARK),
    _file("offsets the wrong way round", "invalid_offsets", _raw(_GOOD_ENTRY.replace("[0, 512]", "[512, 0]")), MARK),
    _file("offsets beyond 64 bits", "invalid_header", _raw(_GOOD_ENTRY.replace("[0, 512]", f"[0, {2**65}]")), MARK),
    _file("offsets that fit no shape", "invalid_offsets", _raw(_GOOD_ENTRY.replace("512]", "508]")), MARK),
    _file("hole in front", "invalid_offsets", header_file({MARK: entry(8, 520)}, bytes(520)), MARK),
    _file(
        "hole in between",
        "invalid_offsets",
        header_file({"a": entry(0, 512), MARK: entry(516, 1028)}, bytes(1028)),
        MARK,
    ),
    _file(
        "the same bytes twice",
        "invalid_offsets",
        header_file({"a": entry(0, 512), MARK: entry(0, 512)}, bytes(512)),
        MARK,
    ),
    _file(
        "half an overlap", "invalid_offsets", header_file({"a": entry(0, 512), MARK: entry(256, 768)}, bytes(768)), MARK
    ),
    _file("data in the header", "truncated_file", header_file({MARK: entry(0, 512)})),
    _file("an exabyte of data", "truncated_file", header_file({MARK: entry(0, 1 << 60, (1 << 29, 1 << 29))}, bytes(8))),
    _file("no tensors", "missing_tensor", header_file({}) + b"", Q_A),
]

PLACES = [
    Hostile(
        name="link to a good file",
        code="not_a_file",
        param=TENSORS,
        place=lambda path, data: path.symlink_to(_elsewhere(path, data)),
    ),
    Hostile(
        name="link to a secret", code="not_a_file", param=TENSORS, place=lambda path, _: path.symlink_to("/etc/shadow")
    ),
    Hostile(name="link to itself", code="not_a_file", param=TENSORS, place=lambda path, _: path.symlink_to(path)),
    Hostile(name="directory", code="not_a_file", param=TENSORS, place=lambda path, _: path.mkdir()),
    Hostile(name="pipe", code="not_a_file", param=TENSORS, place=lambda path, _: os.mkfifo(path)),
    Hostile(name="nothing there", code="not_a_file", param=TENSORS, place=lambda path, _: None),
]


def _sparse(path: Path, header: object, num_bytes: int) -> None:
    with path.open("wb") as file:
        file.write(header_file(header))
        file.truncate(file.tell() + num_bytes)


GIANTS = [
    Hostile(
        name="sparse terabyte of zeros",
        code="not_safetensors",
        param=TENSORS,
        place=lambda path, _: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
    ),
    Hostile(
        name="sparse terabyte behind a header",
        code="unexpected_tensor",
        param=MARK,
        place=lambda path, _: _sparse(path, {MARK: entry(0, 1 << 40, (1 << 20, 1 << 18))}, 1 << 40),
    ),
    Hostile(
        name="ten thousand tensors",
        code="unexpected_tensor",
        param=f"{MARK}0",
        tensors=lambda: header_file(
            {f"{MARK}{i}": entry(4 * i, 4 * i + 4, (1, 1)) for i in range(10_000)}, bytes(40_000)
        ),
    ),
    Hostile(
        name="name of half a megabyte",
        code="unexpected_tensor",
        param=(MARK * 40)[:197] + "...",
        tensors=lambda: header_file({MARK * 87_000: entry(0, 4, (1, 1))}, bytes(4)),
    ),
]

CONTAINERS = [*FOREIGN, *LENGTHS, *JSON_TRICKS, *ENTRIES, *OFFSETS, *PLACES, *GIANTS]
