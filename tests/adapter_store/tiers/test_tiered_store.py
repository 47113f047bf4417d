"""Adapters come from the nearest tier that holds their right bytes, within bounds, one load at a time."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.blobs.interface import BlobStore, canonical_key, packed_key
from loramux.adapter_store.blobs.memory import MemoryBlobStore
from loramux.adapter_store.errors import AdapterCorrupt, AdapterUnavailable
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.tiers.tiered_store import TieredStore
from tests.adapter_store.blobs.watched_blobs import WatchedBlobStore

PLENTY = 1 << 30


@pytest.fixture
def watched() -> WatchedBlobStore:
    return WatchedBlobStore()


def open_store(
    blobs: BlobStore, target: PackTarget, tmp_path: Path, disk_bytes: int = PLENTY, host_bytes: int = PLENTY
) -> TieredStore:
    return TieredStore(blobs, target, tmp_path / "disk", disk_bytes, host_bytes)


def disk_files(tmp_path: Path) -> dict[str, Path]:
    return {path.stem: path for path in (tmp_path / "disk").glob("*/*.packed")}


def assert_equal(found: Any, wanted: Any) -> None:
    assert found.digest == wanted.digest
    np.testing.assert_array_equal(found.payload, wanted.payload)
    np.testing.assert_array_equal(found.scales, wanted.scales)


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "rebuilt"])
def test_a_lease_gives_the_adapter_from_any_blob_store(
    blobs: BlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any, is_packed: bool
) -> None:
    stored = store_adapter(blobs, is_packed=is_packed)
    with open_store(blobs, target, tmp_path).lease(stored.digest) as lease:
        assert_equal(lease.packed, stored.packed)
    assert blobs.exists(packed_key(stored.digest, target.pack_key))
    assert list((tmp_path / "disk" / "unfinished").iterdir()) == []


def test_each_tier_spares_the_one_behind_it(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(watched, is_packed=True)
    store = open_store(watched, target, tmp_path)
    for _ in range(3):
        store.lease(stored.digest).release()
    assert watched.num_gets == {"packed": 1}
    watched.is_down = True
    with open_store(watched, target, tmp_path).lease(stored.digest) as lease:
        assert_equal(lease.packed, stored.packed)
    assert watched.num_gets == {"packed": 1}


def test_the_host_tier_keeps_its_bound_and_what_is_leased(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    adapters = [store_adapter(watched, seed=seed) for seed in range(4)]
    size = adapters[0].packed.payload.nbytes
    store = open_store(watched, target, tmp_path, host_bytes=2 * size)
    leases = [store.lease(adapter.digest) for adapter in adapters[:3]]
    assert store.host_used_bytes == 3 * size, "leased adapters stay above the bound"
    leases[0].release()
    leases[0].release()
    assert store.host_used_bytes == 2 * size
    leases[1].release()
    store.lease(adapters[3].digest).release()
    assert store.host_used_bytes == 2 * size
    assert leases[2].packed.digest == adapters[2].digest
    leases[2].release()


def test_the_disk_tier_keeps_its_bound_and_drops_the_least_recently_used(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    adapters = [store_adapter(watched, seed=seed) for seed in range(3)]
    first, second, third = (adapter.digest for adapter in adapters)
    probe = open_store(watched, target, tmp_path)
    probe.lease(first).release()
    size = probe.disk_used_bytes
    store = open_store(watched, target, tmp_path, disk_bytes=2 * size, host_bytes=0)
    for digest in (first, second, first, third):
        store.lease(digest).release()
    assert disk_files(tmp_path).keys() == {first, third}
    assert store.disk_used_bytes == 2 * size
    smaller = open_store(watched, target, tmp_path, disk_bytes=size, host_bytes=0)
    assert disk_files(tmp_path).keys() == {third}, "the order of use outlives a restart"
    assert smaller.disk_used_bytes == size
    with open_store(watched, target, tmp_path, disk_bytes=10, host_bytes=0).lease(first) as lease:
        assert_equal(lease.packed, adapters[0].packed)
    assert disk_files(tmp_path) == {}


def test_an_adapter_is_loaded_once_for_all_who_wait(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(watched)
    store = open_store(watched, target, tmp_path, host_bytes=0)
    watched.may_answer.clear()
    leases = []
    threads = [threading.Thread(target=lambda: leases.append(store.lease(stored.digest))) for _ in range(8)]
    for thread in threads:
        thread.start()
    watched.may_answer.set()
    for thread in threads:
        thread.join(10)
    assert len({id(lease.packed) for lease in leases}) == 1
    assert watched.num_gets == {"packed": 1, "adapters": 1}
    for lease in leases[:-1]:
        lease.release()
    assert store.host_used_bytes > 0
    leases[-1].release()
    assert store.host_used_bytes == 0


def test_a_failed_load_fails_for_all_who_wait_and_can_be_tried_again(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(watched)
    store = open_store(watched, target, tmp_path)
    watched.is_down = True
    watched.may_answer.clear()
    errors = []

    def lease() -> None:
        try:
            store.lease(stored.digest)
        except AdapterUnavailable as error:
            errors.append(error)

    threads = [threading.Thread(target=lease) for _ in range(4)]
    for thread in threads:
        thread.start()
    watched.may_answer.set()
    for thread in threads:
        thread.join(10)
    assert len(errors) == len({id(error) for error in errors}) == 4
    watched.is_down = False
    store.lease(stored.digest).release()


def test_wrong_bytes_on_the_disk_are_set_aside_and_had_again(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(watched)
    store = open_store(watched, target, tmp_path, host_bytes=0)
    store.lease(stored.digest).release()
    path = disk_files(tmp_path)[stored.digest]
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with store.lease(stored.digest) as lease:
        assert_equal(lease.packed, stored.packed)
    assert len(list((tmp_path / "disk" / "set_aside").iterdir())) == 1
    assert watched.num_gets["packed"] == 2
    disk_files(tmp_path)[stored.digest].unlink()
    with store.lease(stored.digest) as lease:
        assert_equal(lease.packed, stored.packed)


def test_a_wrong_packed_blob_is_rebuilt_and_replaced(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(watched, is_packed=True)
    key = packed_key(stored.digest, target.pack_key)
    right = watched.read_bytes(key)
    watched.damage(key)
    with open_store(watched, target, tmp_path).lease(stored.digest) as lease:
        assert_equal(lease.packed, stored.packed)
    assert watched.read_bytes(key) == right


def test_wrong_canonical_bytes_are_never_served(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(watched)
    watched.damage(canonical_key(stored.digest))
    store = open_store(watched, target, tmp_path)
    for _ in range(6):
        with pytest.raises(AdapterCorrupt):
            store.lease(stored.digest)
    assert disk_files(tmp_path) == {}
    assert not watched.exists(packed_key(stored.digest, target.pack_key))
    assert len(list((tmp_path / "disk" / "set_aside").iterdir())) == 8, "what is set aside is bounded too"


@pytest.mark.parametrize(
    "digest", ["", "0" * 64, "../../etc/passwd", "A" * 64], ids=["empty", "unknown", "path", "case"]
)
def test_what_is_not_there_is_unavailable(
    memory_blobs: MemoryBlobStore, target: PackTarget, tmp_path: Path, digest: str
) -> None:
    with pytest.raises(AdapterUnavailable):
        open_store(memory_blobs, target, tmp_path).lease(digest)


def test_an_adapter_of_another_base_is_unavailable(
    memory_blobs: MemoryBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    stored = store_adapter(memory_blobs)
    other = replace(target, geometry=replace(target.geometry, num_layers=1))
    with pytest.raises(AdapterUnavailable, match="does not fit"):
        open_store(memory_blobs, other, tmp_path).lease(stored.digest)


def test_many_threads_get_right_bytes_within_small_bounds(
    watched: WatchedBlobStore, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    adapters = [store_adapter(watched, seed=seed, rank=1 + seed) for seed in range(6)]
    largest = max(adapter.packed.payload.nbytes for adapter in adapters)
    store = open_store(watched, target, tmp_path, disk_bytes=3 * largest, host_bytes=2 * largest)
    errors = []

    def work(seed: int) -> None:
        chooser = random.Random(seed)
        try:
            for _ in range(40):
                stored = chooser.choice(adapters)
                with store.lease(stored.digest) as lease:
                    assert_equal(lease.packed, stored.packed)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert store.host_used_bytes <= 2 * largest
    assert store.disk_used_bytes <= 3 * largest
    assert sum(path.stat().st_size for path in disk_files(tmp_path).values()) == store.disk_used_bytes
