"""Model directories of GGUF files: what is written, what is refused, and when a directory is made again."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from loramux.adapter_store.errors import ConversionRefused
from loramux.adapter_store.formats.files.float_formats import STORAGE
from loramux.adapter_store.formats.files.mapped_tensors import GGUF_INDEX, map_directory
from loramux.adapter_store.formats.quantization.gguf_blocks import BLOCK_TYPES
from loramux.adapter_store.formats.version_files.pooling_files import Pooling, directory_pooling
from loramux.adapter_store.gguf.base_directory import MAX_ELEMENTS, base_directory, is_gguf, model_name
from loramux.adapter_store.gguf.base_records import RECORDS
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_files import stored_tensors
from loramux.engine.architectures.weight_shapes import check_shapes
from loramux.engine.protocol.errors import ModelNotSupported

HIDDEN, HEADS, VOCAB = 64, 4, 40
METADATA: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 256,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.eos_token_id": 2,
}
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (96, HIDDEN),
    "blk.0.ffn_up.weight": (96, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, 96),
}


def write(
    path: Path,
    entries: dict[str, Any] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    split: int = 0,
    architecture: str = "llama",
) -> Path:
    """Write a random model. `entries` and `shapes` replace or, if None, remove parts of it."""
    generator = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in {**METADATA, **(entries or {})}.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, shape in {**SHAPES, **(shapes or {})}.items():
        if shape:
            writer.add_tensor(name, generator.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path, root: Path) -> ConversionRefused:
    with pytest.raises(ConversionRefused) as refused:
        base_directory(path, root)
    assert not root.exists() or list(root.iterdir()) == []
    return refused.value


def test_the_directory_describes_the_file_and_is_made_once(tmp_path: Path) -> None:
    path = write(tmp_path / "My-Model.F32.gguf")
    directory = base_directory(path, tmp_path / "root")
    assert (is_gguf(path), model_name(path)) == (True, "My-Model.F32")
    config = json.loads((directory / "config.json").read_text())
    assert (config["architectures"], config["head_dim"], config["vocab_size"]) == (["LlamaForCausalLM"], 16, VOCAB)
    assert (config["dtype"], config["tie_word_embeddings"], config["eos_token_id"]) == ("float32", True, 2)
    assert "quantization_config" not in config
    check_shapes(ModelConfig.load(directory), stored_tensors(directory))
    before = (directory / "config.json").stat().st_mtime_ns
    assert base_directory(path, tmp_path / "root") == directory
    assert (directory / "config.json").stat().st_mtime_ns == before


def test_a_changed_file_replaces_its_directory(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    first = base_directory(path, tmp_path / "root")
    before = path.stat().st_mtime_ns
    write(path, {"llama.context_length": 512})
    # The clock of a file system has ticks of up to ten milliseconds.
    os.utime(path, ns=(before, before + 1))
    with pytest.raises(ValueError, match="has changed since its header was read"):
        map_directory(first)
    second = base_directory(path, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == [second] != [first]
    assert ModelConfig.load(second).max_model_len == 512


def test_several_files_are_one_model(tmp_path: Path) -> None:
    whole = base_directory(write(tmp_path / "whole.gguf"), tmp_path / "root")
    write(tmp_path / "split.gguf", split=4)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert [part.name for part in parts] == [f"split-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    split = base_directory(parts[0], tmp_path / "root")
    assert model_name(parts[0]) == "split"
    assert (split / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    theirs = map_directory(whole)
    for name, tensor in map_directory(split).items():
        np.testing.assert_array_equal(tensor.array(), theirs[name].array())
    assert refusal(parts[1], tmp_path / "other").code == "missing_part"
    parts[1].rename(tmp_path / "split-00009-of-00003.gguf")
    error = refusal(parts[0], tmp_path / "other")
    assert (error.code, error.param) == ("missing_part", parts[1].name)
    os.link(parts[0], parts[1])
    assert refusal(parts[0], tmp_path / "other").code == "missing_part"


@pytest.mark.parametrize(
    ("entries", "shapes", "architecture", "code", "param"),
    [
        ({}, {}, "mamba", "unsupported_architecture", "general.architecture"),
        ({"general.type": "mmproj"}, {}, "llama", "unsupported_gguf", "general.type"),
        ({"llama.block_count": None}, {}, "llama", "invalid_metadata", "llama.block_count"),
        ({"llama.attention.head_count": "four"}, {}, "llama", "invalid_metadata", "llama.attention.head_count"),
        ({"llama.attention.head_count": 0}, {}, "llama", "invalid_metadata", "llama.attention.head_count"),
        ({"llama.attention.value_length": 8}, {}, "llama", "invalid_metadata", "llama.attention.value_length"),
        ({"llama.rope.freq_base": float("nan")}, {}, "llama", "invalid_metadata", "llama.rope.freq_base"),
        ({"llama.rope.scaling.type": "su"}, {}, "llama", "invalid_metadata", "llama.rope.scaling.type"),
        ({"llama.logit_scale": 0.5}, {}, "llama", "unsupported_metadata", "llama.logit_scale"),
        (
            {"llama.rope.scaling.attn_factor": 0.5},
            {},
            "llama",
            "unsupported_metadata",
            "llama.rope.scaling.attn_factor",
        ),
        ({"llama.pooling_type": 4}, {}, "llama", "invalid_metadata", "llama.pooling_type"),
        ({"llama.use_parallel_residual": 1}, {}, "llama", "unsupported_metadata", "llama.use_parallel_residual"),
        ({"tokenizer.ggml.eos_token_id": "2"}, {}, "llama", "invalid_metadata", "tokenizer.ggml.eos_token_id"),
        ({}, {"token_embd.weight": ()}, "llama", "missing_tensor", "token_embd.weight"),
        ({}, {"blk.0.ssm_a.weight": (4, 4)}, "llama", "unexpected_tensor", "blk.0.ssm_a.weight"),
        ({}, {"blk.1.attn_q.weight": (4, 4)}, "llama", "unexpected_tensor", "blk.1.attn_q.weight"),
        ({}, {"attn_q.weight": (4, 4)}, "llama", "unexpected_tensor", "attn_q.weight"),
        ({}, {"blk.0.attn_q.weight": (60, HIDDEN)}, "llama", "base_mismatch", "blk.0.attn_q.weight"),
        ({}, {"rope_freqs.weight": (7,)}, "llama", "invalid_metadata", "rope_freqs.weight"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(
    entries: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    architecture: str,
    code: str,
    param: str,
    tmp_path: Path,
) -> None:
    error = refusal(write(tmp_path / "model.gguf", entries, shapes, architecture=architecture), tmp_path / "root")
    assert (error.code, error.param) == (code, param)


def test_yarn_is_read_with_its_factor(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "attn_factor": 0.5}
    entries = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    directory = base_directory(write(tmp_path / "model.gguf", entries), tmp_path / "root")
    rope = ModelConfig.load(directory).attention.ropes[0]
    assert (rope.kind, rope.attention_factor) == ("yarn", pytest.approx(0.5 * (0.1 * math.log(4) + 1)))


@pytest.mark.parametrize(
    ("kind", "pooling"), [(0, None), (1, Pooling("mean")), (2, Pooling("cls")), (3, Pooling("last"))]
)
def test_the_pooling_of_an_embedder_is_read(kind: int, pooling: Pooling | None, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", {"llama.pooling_type": kind})
    assert directory_pooling(base_directory(path, tmp_path / "root")) == pooling


@pytest.mark.parametrize(
    "shapes",
    [{"blk.0.ffn_up.weight": (HIDDEN, 96)}, {"blk.0.ffn_norm.weight": ()}, {"output.weight": (VOCAB + 1, HIDDEN)}],
)
def test_tensors_that_contradict_the_architecture_are_refused(
    shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    directory = base_directory(write(tmp_path / "model.gguf", shapes=shapes), tmp_path / "root")
    with pytest.raises(ModelNotSupported, match=r"has shape|has no tensor"):
        check_shapes(ModelConfig.load(directory), stored_tensors(directory))


def test_factors_of_another_formula_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", shapes={"rope_freqs.weight": (8,)})
    content = bytearray(path.read_bytes())
    # The tensor is the last in the file.
    content[-32:] = np.linspace(1, 8, 8, dtype=np.float32).tobytes()
    path.write_bytes(content)
    error = refusal(path, tmp_path / "root")
    assert (error.code, error.message) == (
        "unsupported_metadata",
        "the rotary factors are not those of Llama 3's formula",
    )


def header(num_tensors: int, entries: bytes, num_entries: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries) + entries + rest


def texts(key: bytes, count: int) -> bytes:
    """The start of an array of texts."""
    return struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, count)


def tensor(name: bytes, sizes: list[int], dtype: int, offset: int = 0) -> bytes:
    places = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, dtype, offset)
    return struct.pack("<Q", len(name)) + name + places


MERGES = b"tokenizer.ggml.merges"
FORGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not_gguf"),
    "safetensors": (b"\x08\0\0\0\0\0\0\0{}      ", "not_gguf"),
    "2^63 tensors": (header(1 << 63, b"", 0), "invalid_header"),
    "2^63 entries": (header(0, b"", 1 << 63), "invalid_header"),
    "2^63 merges": (header(0, texts(MERGES, 1 << 63), 1), "truncated_file"),
    "2^63 rows": (header(1, b"", 0, tensor(b"a.weight", [32, 1 << 63], 2)), "invalid_header"),
    "beyond the end": (header(1, b"", 0, tensor(b"a.weight", [256, 8], 12)), "truncated_file"),
    "offset beyond the end": (
        header(1, b"", 0, tensor(b"a.weight", [32, 1], 2, 1 << 62) + bytes(64)),
        "truncated_file",
    ),
    "overlap": (
        header(2, b"", 0, tensor(b"a", [32, 2], 2) + tensor(b"b", [32, 1], 2, 16) + bytes(256)),
        "invalid_offsets",
    ),
    "partial blocks": (header(1, b"", 0, tensor(b"a", [48, 2], 2) + bytes(256)), "invalid_header"),
    "unknown type": (header(1, b"", 0, tensor(b"a", [32, 2], 77) + bytes(256)), "unsupported_dtype"),
    "unsupported type": (header(1, b"", 0, tensor(b"a", [256, 2], 16) + bytes(256)), "unsupported_dtype"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_header_is_refused_in_bounded_time_and_memory(name: str, tmp_path: Path) -> None:
    content, code = FORGED[name]
    path = tmp_path / "forged.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    started = time.process_time()
    assert refusal(path, tmp_path / "root").code == code
    assert time.process_time() - started < 2
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_the_largest_tokenizer_is_parsed_in_bounded_time(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    for count, code, param in (
        (1 << 20, "invalid_metadata", "general.architecture"),
        (10_000_000, "header_too_large", MERGES.decode()),
    ):
        path.write_bytes(header(0, texts(MERGES, count), 1))
        # The texts are empty: 8 bytes with their length, which is 0.
        os.truncate(path, path.stat().st_size + 8 * count)
        started = time.process_time()
        error = refusal(path, tmp_path / "root")
        assert (error.code, error.param) == (code, param)
        assert time.process_time() - started < 5
    assert MAX_ELEMENTS < 10_000_000


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    """Flipped, replaced and removed bytes of the header raise only errors that name a reason."""
    source, path = write(tmp_path / "sound.gguf").read_bytes(), tmp_path / "damaged.gguf"
    generator = np.random.default_rng(5)
    num_refused = 0
    for _ in range(120):
        content = bytearray(source)
        for _ in range(generator.integers(1, 4)):
            content[generator.integers(0, 1500)] = generator.integers(0, 256)
        path.write_bytes(content[: generator.integers(100, len(content))] if generator.random() < 0.2 else content)
        try:
            directory = model_directory(path, tmp_path / "root")
            check_shapes(ModelConfig.load(directory), stored_tensors(directory))
        except ModelNotSupported:
            num_refused += 1
    assert num_refused > 40


def test_paths_that_are_no_models_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent.gguf", tmp_path / "root").code == "not_a_file"
    os.mkfifo(tmp_path / "pipe.gguf")
    assert refusal(tmp_path / "pipe.gguf", tmp_path / "root").code == "not_a_file"
    path = write(tmp_path / "model.gguf")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionRefused, match="cannot be written"):
        base_directory(path, tmp_path / "file")
    with pytest.raises(ModelNotSupported, match=r"absent\.gguf is not served: the file cannot be opened"):
        model_directory(tmp_path / "absent.gguf", tmp_path / "root")
    directory = base_directory(path, tmp_path / "root")
    assert json.loads((directory / GGUF_INDEX).read_text())["files"][0]["path"] == str(path)
    assert model_directory(directory) == directory


def test_the_guide_lists_the_types_and_architectures() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "gguf.md").read_text()
    rows = dict(line.strip("| ").split(" | ", 1) for line in guide.splitlines() if line.startswith("| "))
    assert rows["types of tensors"].split(", ") == [*STORAGE, *BLOCK_TYPES]
    assert set(re.findall("`([^`]+)`", rows["architectures"])) == set(RECORDS)
