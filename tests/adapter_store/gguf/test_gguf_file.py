"""Forged headers are refused in bounded time and memory."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from loramux.adapter_store.errors import ConversionRefused
from loramux.adapter_store.gguf import gguf_file
from loramux.adapter_store.gguf.gguf_file import GgufFile
from tests.adapter_store.gguf.llama_cpp import write_gguf

HUGE = (1 << 64) - 1
PREFIX = "base_model.model.model.layers.0.self_attn.v_proj"


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def number(value: int) -> bytes:
    return struct.pack("<Q", value)


def kind(value: int) -> bytes:
    return struct.pack("<I", value)


def header(num_tensors: int, num_entries: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + kind(version) + number(num_tensors) + number(num_entries) + rest


def tensor(name: bytes, sizes: list[int], dtype: int = 0, offset: int = 0) -> bytes:
    return string(name) + kind(len(sizes)) + b"".join(map(number, sizes)) + kind(dtype) + number(offset)


def padded(start: bytes, num_bytes: int) -> bytes:
    return start + bytes(-len(start) % 32) + bytes(num_bytes)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.gguf"
    generator = torch.Generator().manual_seed(1)
    shapes = {"lora_A": (3, 8), "lora_B": (4, 3)}
    tensors = {f"{PREFIX}.{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    metadata = {"general.tags": ["one", "two"], "adapter.alora.invocation_tokens": [1, 2, 3]}
    write_gguf(path, tensors, alpha=8.0, metadata=metadata)
    return path


def test_sound_file_is_read_as_the_gguf_package_reads_it(sound: Path) -> None:
    theirs = GGUFReader(sound)
    with GgufFile(sound) as ours:
        assert ours.metadata["adapter.lora.alpha"] == 8.0
        assert (ours.metadata["general.tags"], ours.metadata["general.type"]) == (["one", "two"], "adapter")
        assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
        assert [one.name for one in theirs.tensors] == list(ours.tensors)
        for one in theirs.tensors:
            np.testing.assert_array_equal(ours.float32(one.name), one.data)


FORGED = {
    "empty": (b"", "not_gguf"),
    "safetensors": (b"\x08\0\0\0\0\0\0\0{}      ", "not_gguf"),
    "magic only": (b"GGUF", "truncated_file"),
    "version 1": (header(0, 0, version=1), "unsupported_gguf"),
    "version 4": (header(0, 0, version=4), "unsupported_gguf"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "unsupported_gguf"),
    "huge number of tensors": (header(HUGE, 0), "invalid_header"),
    "huge number of entries": (header(0, HUGE), "invalid_header"),
    "many tensors, no bytes": (header(1 << 15, 0), "truncated_file"),
    "many entries, no bytes": (header(0, 1 << 12), "truncated_file"),
    "key beyond the file": (header(0, 1, number(HUGE)), "truncated_file"),
    "key slightly too long": (header(0, 1, number(9) + b"12345678"), "truncated_file"),
    "key not UTF-8": (header(0, 1, string(b"\xff\xfe") + kind(4) + kind(1)), "invalid_header"),
    "unknown value type": (header(0, 1, string(b"a") + kind(13) + bytes(16)), "invalid_header"),
    "same key twice": (header(0, 2, 2 * (string(b"a") + kind(0) + b"\1")), "duplicate_key"),
    "text beyond the file": (header(0, 1, string(b"a") + kind(8) + number(1 << 62)), "truncated_file"),
    "array beyond the file": (header(0, 1, string(b"a") + kind(9) + kind(0) + number(HUGE)), "truncated_file"),
    "array of 2^61 doubles": (header(0, 1, string(b"a") + kind(9) + kind(12) + number(1 << 61)), "truncated_file"),
    "array of texts beyond the file": (header(0, 1, string(b"a") + kind(9) + kind(8) + number(HUGE)), "truncated_file"),
    "deep arrays": (header(0, 1, string(b"a") + kind(9) + (kind(9) + number(1)) * 100 + kind(0)), "invalid_header"),
    "alignment of 0": (header(0, 1, string(b"general.alignment") + kind(4) + kind(0)), "invalid_header"),
    "alignment of 2^31": (header(0, 1, string(b"general.alignment") + kind(4) + kind(1 << 31)), "invalid_header"),
    "huge number of dimensions": (header(1, 0, string(b"a") + kind(1 << 31)), "invalid_header"),
    "no dimensions": (padded(header(1, 0, tensor(b"a", [])), 64), "tensor_not_2d"),
    "one dimension": (padded(header(1, 0, tensor(b"a", [4])), 64), "tensor_not_2d"),
    "empty matrix": (padded(header(1, 0, tensor(b"a", [0, 4])), 64), "tensor_not_2d"),
    "huge dimension": (padded(header(1, 0, tensor(b"a", [HUGE, 1])), 64), "invalid_header"),
    "large matrix": (padded(header(1, 0, tensor(b"a", [1 << 31, 1 << 31])), 64), "truncated_file"),
    "one byte short": (padded(header(1, 0, tensor(b"a", [4, 4])), 63), "truncated_file"),
    "offset beyond the file": (padded(header(1, 0, tensor(b"a", [4, 4], offset=HUGE - 63)), 64), "truncated_file"),
    "same tensor twice": (padded(header(2, 0, 2 * tensor(b"a", [2, 2])), 64), "duplicate_key"),
    "overlap": (padded(header(2, 0, tensor(b"a", [4, 4]) + tensor(b"b", [4, 4])), 64), "invalid_offsets"),
    "quantised": (padded(header(1, 0, tensor(b"a", [32, 4], dtype=2)), 64), "unsupported_dtype"),
    "unknown type": (padded(header(1, 0, tensor(b"a", [32, 4], dtype=999)), 64), "unsupported_dtype"),
}


def refusal(path: Path) -> str:
    with pytest.raises(ConversionRefused) as error:
        GgufFile(path)
    return error.value.code


@pytest.mark.parametrize("name", FORGED)
def test_forged_header_is_refused(tmp_path: Path, name: str) -> None:
    content, code = FORGED[name]
    path = tmp_path / "forged.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    started = time.process_time()
    assert refusal(path) == code
    assert time.process_time() - started < 2
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_header_of_many_small_parts_is_bounded(tmp_path: Path) -> None:
    """The longest allowed header, filled with the most expensive parts."""
    parts = (gguf_file.MAX_HEADER_BYTES - 100) // 12
    fillings = {
        "texts": kind(8) + number(parts) + number(0) * parts,
        "arrays": kind(9) + number(parts) + (kind(0) + number(0)) * parts,
        "bytes": kind(0) + number(12 * parts) + bytes(12 * parts),
        "beyond": kind(0) + number(16 * parts) + bytes(16 * parts),
    }
    for name, filling in fillings.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(header(0, 1, string(b"a") + kind(9) + filling))
        started = time.process_time()
        if name == "beyond":
            assert refusal(path) == "header_too_large"
        else:
            with GgufFile(path) as file:
                assert len(file.metadata["a"]) >= parts
        assert time.process_time() - started < 3


def test_damaged_files_are_read_or_refused(sound: Path, tmp_path: Path) -> None:
    """Flipped, replaced, removed and repeated bytes raise only ConversionRefused."""
    source, path = sound.read_bytes(), tmp_path / "damaged.gguf"
    draw = random.Random(5)
    refused = 0
    for _ in range(300):
        content = bytearray(source)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(content))
            match draw.randrange(4):
                case 0:
                    content[at] ^= 1 << draw.randrange(8)
                case 1:
                    content[at : at + 8] = number(draw.choice([0, 1, 255, 1 << 31, 1 << 32, 1 << 63, HUGE]))
                case 2:
                    del content[at:]
                    content = content or bytearray(b"G")
                case _:
                    content[at:at] = content[at : at + draw.randrange(64)]
        path.write_bytes(content)
        try:
            with GgufFile(path) as file:
                for name in file.tensors:
                    file.float32(name)
        except ConversionRefused:
            refused += 1
    assert 75 < refused < 300


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda _: None], ids=["fifo", "directory", "absent"])
def test_only_regular_files_are_opened(tmp_path: Path, make: object) -> None:
    path = tmp_path / "odd.gguf"
    make(path)  # type: ignore[operator]
    assert refusal(path) == "not_a_file"


def test_file_that_shrinks_is_refused(sound: Path) -> None:
    with GgufFile(sound) as file:
        last = max(file.tensors.values(), key=lambda one: one.begin)
        os.truncate(sound, last.begin + 4)
        with pytest.raises(ConversionRefused) as error:
            file.float32(last.name)
    assert (error.value.code, error.value.param) == ("truncated_file", last.name)
