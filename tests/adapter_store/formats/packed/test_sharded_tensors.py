"""Shards are joined into the file that they were made from, and nothing outside their directory is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.packed.sharded_tensors import INDEX_FILE, MAX_INDEX_BYTES, ShardIndex, join_shards

SHARDS = ("adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors")
TENSORS = {
    SHARDS[0]: {
        "b.lora_A.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a.lora_A.weight": np.ones((1, 3), np.float16),
    },
    SHARDS[1]: {"a.lora_B.weight": np.full((5, 1), 7, np.float32)},
}


def write_shards(directory: Path) -> dict[str, Any]:
    """Write shards that begin with different metadata, and return their index."""
    weight_map = {}
    for number, (name, tensors) in enumerate(TENSORS.items()):
        save_file(tensors, directory / name, metadata={"format": "pt", "number": str(number)})
        weight_map |= dict.fromkeys(tensors, name)
    return {"metadata": {"total_size": 50}, "weight_map": weight_map}


def joined(index: Any, directory: Path) -> dict[str, np.ndarray]:
    parsed = ShardIndex.parse(json.dumps(index).encode()) if index is not None else ShardIndex.of_names(SHARDS)
    assert parsed is not None
    join_shards(parsed, directory, directory / "joined")
    return load_file(directory / "joined")


@pytest.mark.parametrize("has_index", [True, False])
def test_shards_are_joined(tmp_path: Path, has_index: bool) -> None:
    index = write_shards(tmp_path)
    found = joined(index if has_index else None, tmp_path)
    wanted = TENSORS[SHARDS[0]] | TENSORS[SHARDS[1]]
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor)


def test_a_directory_without_shards_has_no_index() -> None:
    assert ShardIndex.of_names(["adapter_model.safetensors", "model-00001-of-00002.safetensors"]) is None


@pytest.mark.parametrize(
    "name",
    [
        "../adapter_model-00001-of-00002.safetensors",
        "/etc/passwd",
        "other/adapter_model-00001-of-00002.safetensors",
        "model.safetensors",
        "adapter_model-00001-of-00002.bin",
        "adapter_model-00001-of-00002.safetensors\n",
        "adapter_model-١١١١١-of-00002.safetensors",
        "",
    ],
)
def test_an_index_names_only_shards_in_its_directory(tmp_path: Path, name: str) -> None:
    index = write_shards(tmp_path)
    index["weight_map"]["a.lora_B.weight"] = name
    with pytest.raises(AdapterRejected) as refused:
        joined(index, tmp_path)
    assert (refused.value.code, refused.value.param) == ("invalid_index", "weight_map.a.lora_B.weight")
    assert not name or name not in refused.value.message


def changed(**changes: Any) -> Any:
    def change(index: dict[str, Any], directory: Path) -> dict[str, Any]:
        return {**index, "weight_map": {**index["weight_map"], **changes}}

    return change


def without(shard: str) -> Any:
    def change(index: dict[str, Any], directory: Path) -> dict[str, Any]:
        (directory / shard).unlink()
        return index

    return change


def only(shard: str) -> Any:
    return lambda index, directory: {"weight_map": {k: v for k, v in index["weight_map"].items() if v == shard}}


def repeated(index: dict[str, Any], directory: Path) -> dict[str, Any]:
    save_file({**TENSORS[SHARDS[1]], "a.lora_A.weight": np.ones((1, 3), np.float32)}, directory / SHARDS[1])
    return index


THIRD = "adapter_model-00003-of-00002.safetensors"


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        pytest.param(lambda index, directory: [], "invalid_index", INDEX_FILE, id="index is a list"),
        pytest.param(lambda index, directory: {}, "invalid_index", INDEX_FILE, id="no map"),
        pytest.param(lambda index, directory: {"weight_map": {}}, "invalid_index", INDEX_FILE, id="empty map"),
        pytest.param(lambda index, directory: {"weight_map": {"a": 1}}, "invalid_index", INDEX_FILE, id="a number"),
        pytest.param(without(SHARDS[1]), "missing_shard", SHARDS[1], id="shard not there"),
        pytest.param(only(SHARDS[1]), "missing_shard", SHARDS[0], id="shard not in the index"),
        pytest.param(changed(x=THIRD), "invalid_index", INDEX_FILE, id="third of two shards"),
        pytest.param(changed(x=THIRD.replace("of-00002", "of-00003")), "invalid_index", INDEX_FILE, id="two counts"),
        pytest.param(changed(x=SHARDS[0]), "missing_tensor", "x", id="tensor not there"),
        pytest.param(
            changed(**{"a.lora_B.weight": SHARDS[0]}), "missing_shard", SHARDS[1], id="all tensors in the first shard"
        ),
        pytest.param(
            changed(**{"a.lora_A.weight": SHARDS[1]}), "invalid_index", "a.lora_A.weight", id="tensor in another shard"
        ),
        pytest.param(repeated, "duplicate_key", "a.lora_A.weight", id="tensor in both shards"),
    ],
)
def test_an_inconsistent_index_is_refused(tmp_path: Path, change: Any, code: str, param: str) -> None:
    index = change(write_shards(tmp_path), tmp_path)
    with pytest.raises(AdapterRejected) as refused:
        joined(index, tmp_path)
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"{", "invalid_index"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "invalid_index"),
        (b"[" * 100_000, "invalid_index"),
        (b" " * (MAX_INDEX_BYTES + 1), "file_too_large"),
    ],
    ids=["cut off", "tensor named twice", "nested", "too large"],
)
def test_a_malformed_index_is_refused(text: bytes, code: str) -> None:
    with pytest.raises(AdapterRejected) as refused:
        ShardIndex.parse(text)
    assert (refused.value.code, refused.value.param) == (code, INDEX_FILE)


def test_too_many_shards_are_refused() -> None:
    names = [f"adapter_model-{number:05}-of-00101.safetensors" for number in range(1, 102)]
    with pytest.raises(AdapterRejected, match="at most 100"):
        ShardIndex.of_names(names)
