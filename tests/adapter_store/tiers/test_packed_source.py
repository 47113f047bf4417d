from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from loramux.adapter_store.blobs.interface import BlobStore, canonical_key, packed_key
from loramux.adapter_store.errors import AdapterCorrupt, AdapterUnavailable
from loramux.adapter_store.formats.packed.module_places import module_places
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import pack
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from tests.adapter_store.blobs.watched_blobs import WatchedBlobStore
from tests.adapter_store.memory_blobs import MemoryBlobStore
from tests.adapter_store.tiers.open_source import fetch, open_source


@pytest.fixture
def watched() -> WatchedBlobStore:
    return WatchedBlobStore()


def disk_files(tmp_path: Path) -> dict[str, Path]:
    return {path.stem: path for path in (tmp_path / "disk").glob("*/*.packed")}


def assert_equal(found: Any, wanted: Any) -> None:
    assert found.digest == wanted.digest
    np.testing.assert_array_equal(found.payload, wanted.payload)
    np.testing.assert_array_equal(found.scales, wanted.scales)


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "rebuilt"])
def test_fetch_returns_the_adapter_from_any_blob_store(
    blobs: BlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any, is_packed: bool
) -> None:
    stored = store_adapter(blobs, is_packed=is_packed)
    assert_equal(fetch(open_source(blobs, target, tmp_path), stored.digest), stored.packed)
    assert blobs.exists(packed_key(stored.digest, target.pack_key))
    assert list((tmp_path / "disk" / "unfinished").iterdir()) == []


def test_adapter_on_disk_is_not_read_from_the_blob_store(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(watched, is_packed=True)
    source = open_source(watched, target, tmp_path)
    for _ in range(3):
        fetch(source, stored.digest)
    assert watched.num_gets == {"packed": 1}
    watched.is_down = True
    assert_equal(fetch(open_source(watched, target, tmp_path), stored.digest), stored.packed)
    assert watched.num_gets == {"packed": 1}


def test_disk_tier_evicts_the_least_recently_used_at_its_limit(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    adapters = [store_adapter(watched, seed=seed) for seed in range(3)]
    first, second, third = (adapter.digest for adapter in adapters)
    probe = open_source(watched, target, tmp_path)
    fetch(probe, first)
    size = probe.disk.used_bytes
    source = open_source(watched, target, tmp_path, disk_bytes=2 * size)
    for digest in (first, second, first, third):
        fetch(source, digest)
    assert disk_files(tmp_path).keys() == {first, third}
    assert source.disk.used_bytes == 2 * size
    smaller = open_source(watched, target, tmp_path, disk_bytes=size)
    assert disk_files(tmp_path).keys() == {third}, "the order of use outlives a restart"
    assert smaller.disk.used_bytes == size
    assert_equal(fetch(open_source(watched, target, tmp_path, disk_bytes=10), first), adapters[0].packed)
    assert disk_files(tmp_path) == {}


def test_failed_fetch_can_be_retried(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(watched)
    source = open_source(watched, target, tmp_path)
    watched.is_down = True
    errors = []
    for _ in range(2):
        with pytest.raises(AdapterUnavailable, match="the store is down") as failed:
            fetch(source, stored.digest)
        errors.append(failed.value)
    assert errors[0] is not errors[1]
    watched.is_down = False
    assert_equal(fetch(source, stored.digest), stored.packed)


def test_wrong_bytes_on_disk_are_set_aside_and_fetched_again(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(watched)
    source = open_source(watched, target, tmp_path)
    fetch(source, stored.digest)
    path = disk_files(tmp_path)[stored.digest]
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert_equal(fetch(source, stored.digest), stored.packed)
    assert len(list((tmp_path / "disk" / "set_aside").iterdir())) == 1
    assert watched.num_gets["packed"] == 2
    disk_files(tmp_path)[stored.digest].unlink()
    assert_equal(fetch(source, stored.digest), stored.packed)


def test_a_wrong_packed_blob_is_rebuilt_and_replaced(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(watched, is_packed=True)
    key = packed_key(stored.digest, target.pack_key)
    right = watched.read_bytes(key)
    watched.damage(key)
    assert_equal(fetch(open_source(watched, target, tmp_path), stored.digest), stored.packed)
    assert watched.read_bytes(key) == right


def save_base(target: PackTarget, directory: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = {
        f"{place.key}.weight": torch.randn(place.shape.out_features, place.shape.in_features, generator=generator)
        for place in module_places(target)
    }
    save_file(base, directory / "model.safetensors")


def test_dora_adapter_is_packed_again_for_a_base_with_other_weights(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    save_base(target, tmp_path, 0)
    stored = store_adapter(watched, is_packed=True, use_dora=True)
    assert_equal(fetch(open_source(watched, target, tmp_path), stored.digest), stored.packed)
    assert watched.num_gets == {"packed": 2}, "the second key contains the base"
    # The file on disk and the one in the blob store were packed for the first base.
    save_base(target, tmp_path, 1)
    found = fetch(open_source(watched, target, tmp_path), stored.digest)
    expected = pack(watched.read_bytes(canonical_key(stored.digest)), target, BaseWeights(tmp_path))
    assert_equal(found, expected)
    assert not np.array_equal(found.payload, stored.packed.payload)
    num_gets = dict(watched.num_gets)
    assert_equal(fetch(open_source(watched, target, tmp_path), stored.digest), expected)
    assert watched.num_gets == num_gets, "the new file is on disk"
    assert_equal(fetch(open_source(watched, target, tmp_path / "elsewhere", base=tmp_path), stored.digest), expected)
    assert watched.num_gets == {**num_gets, "packed": num_gets["packed"] + 2}, (
        "and in the blob store, under its own key"
    )


def test_bases_of_equal_shapes_do_not_replace_each_others_packed_files(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    expected = {}
    for seed, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        save_base(target, tmp_path / name, seed)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "old" / "model.safetensors")
    stored = store_adapter(watched, use_dora=True)
    for name in ("old", "new"):
        expected[name] = pack(watched.read_bytes(canonical_key(stored.digest)), target, BaseWeights(tmp_path / name))
    assert not np.array_equal(expected["old"].payload, expected["new"].payload)
    for turn in range(2):
        for name in ("old", "new"):
            source = open_source(watched, target, tmp_path / f"{name}-{turn}", base=tmp_path / name)
            assert_equal(fetch(source, stored.digest), expected[name])
    assert watched.num_gets["adapters"] == 2, "each base packs the adapter once"


def test_dora_adapter_is_unavailable_while_the_base_cannot_be_read(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    save_base(target, tmp_path, 0)
    stored = store_adapter(watched, use_dora=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "away")
    with pytest.raises(AdapterUnavailable, match="the base's weights cannot be read"):
        fetch(open_source(watched, target, tmp_path), stored.digest)
    (tmp_path / "away").rename(tmp_path / "model.safetensors")
    assert_equal(fetch(open_source(watched, target, tmp_path), stored.digest), stored.packed)


def test_wrong_canonical_bytes_are_never_served(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(watched)
    watched.damage(canonical_key(stored.digest))
    source = open_source(watched, target, tmp_path)
    for _ in range(6):
        with pytest.raises(AdapterCorrupt):
            fetch(source, stored.digest)
    assert disk_files(tmp_path) == {}
    assert not watched.exists(packed_key(stored.digest, target.pack_key))
    assert len(list((tmp_path / "disk" / "set_aside").iterdir())) == 8, "files set aside are limited too"


@pytest.mark.parametrize(
    "digest", ["", "0" * 64, "../../etc/passwd", "A" * 64], ids=["empty", "unknown", "path", "case"]
)
def test_missing_adapter_is_unavailable(
    memory_blobs: MemoryBlobStore, target: PackTarget, tmp_path: Path, digest: str
) -> None:
    with pytest.raises(AdapterUnavailable):
        fetch(open_source(memory_blobs, target, tmp_path), digest)


def test_adapter_for_another_base_is_unavailable(
    memory_blobs: MemoryBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(memory_blobs)
    other = replace(target, geometry=replace(target.geometry, num_layers=1))
    with pytest.raises(AdapterUnavailable, match="does not fit"):
        fetch(open_source(memory_blobs, other, tmp_path), stored.digest)


def test_many_threads_get_correct_bytes_within_small_limits(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    adapters = [store_adapter(watched, seed=seed, rank=1 + seed) for seed in range(6)]
    largest = max(adapter.packed.payload.nbytes for adapter in adapters)
    source = open_source(watched, target, tmp_path, disk_bytes=3 * largest)
    errors = []

    def work(seed: int) -> None:
        chooser = random.Random(seed)
        try:
            for _ in range(40):
                stored = chooser.choice(adapters)
                assert_equal(fetch(source, stored.digest), stored.packed)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert source.disk.used_bytes <= 3 * largest
    assert sum(path.stat().st_size for path in disk_files(tmp_path).values()) == source.disk.used_bytes
