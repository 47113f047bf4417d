from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from loramux.adapter_store.errors import AdapterCorrupt
from loramux.adapter_store.formats.files.checksums import CHUNK_BYTES, NUM_LANES, PayloadCheck, lane_sums
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import read_open_packed, write_packed
from loramux.adapter_store.tiers.packed_source import PackedSource
from tests.adapter_store.blobs.watched_blobs import WatchedBlobStore
from tests.adapter_store.tiers.open_source import fetch, open_source


@pytest.fixture(scope="module")
def payload() -> npt.NDArray[np.uint8]:
    """A payload of two full chunks and a partial one."""
    return np.random.default_rng(0).integers(0, 256, 2 * CHUNK_BYTES + 70_003, np.uint8)


@pytest.mark.parametrize("size", [0, 1, 7, 8167, 8168, 8169, 100_001])
def test_lane_sums_match_their_definition(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    num_words = size // (8 * NUM_LANES) * NUM_LANES
    sums = [0] * NUM_LANES
    for index in range(num_words):
        word = int.from_bytes(data[8 * index : 8 * index + 8].tobytes(), "little")
        sums[index % NUM_LANES] = (sums[index % NUM_LANES] + word) % (1 << 64)
    stated = b"".join(one.to_bytes(8, "little") for one in sums) + data[8 * num_words :].tobytes()
    assert lane_sums(data) == hashlib.sha256(stated if size else b"").hexdigest()


def flip(data: npt.NDArray[np.uint8], rng: np.random.Generator) -> None:
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))


def lose_a_block(data: npt.NDArray[np.uint8], rng: np.random.Generator) -> None:
    begin = int(rng.integers(len(data) // 4096)) * 4096
    data[begin : begin + 4096] = 0


def swap_blocks(data: npt.NDArray[np.uint8], rng: np.random.Generator) -> None:
    one, other = (int(begin) * 4096 for begin in rng.choice(len(data) // 4096, 2, replace=False))
    data[one : one + 4096], data[other : other + 4096] = (
        data[other : other + 4096].copy(),
        data[one : one + 4096].copy(),
    )


def repeat_a_block(data: npt.NDArray[np.uint8], rng: np.random.Generator) -> None:
    one, other = (int(begin) * 4096 for begin in rng.choice(len(data) // 4096, 2, replace=False))
    data[one : one + 4096] = data[other : other + 4096]


def swap_chunks(data: npt.NDArray[np.uint8], rng: np.random.Generator) -> None:
    data[:CHUNK_BYTES], data[CHUNK_BYTES : 2 * CHUNK_BYTES] = (
        data[CHUNK_BYTES : 2 * CHUNK_BYTES].copy(),
        data[:CHUNK_BYTES].copy(),
    )


@pytest.mark.parametrize("damage", [flip, lose_a_block, swap_blocks, repeat_a_block, swap_chunks])
def test_lane_sums_detect_disk_and_memory_damage(payload: npt.NDArray[np.uint8], damage: Callable[..., None]) -> None:
    right, rng = lane_sums(payload), np.random.default_rng(1)
    for _ in range(5):
        data = payload.copy()
        damage(data, rng)
        assert lane_sums(data) != right


def test_a_bit_that_moves_by_less_than_1021_words_is_detected() -> None:
    found = set()
    for word in range(1021):
        data = np.zeros(2048, "<u8")
        data[word] = 1
        found.add(lane_sums(data.view(np.uint8)))
    assert len(found) == 1021


class Reader:
    def __init__(self, data: bytes, piece: int) -> None:
        self._data = data
        self._piece = piece
        self.at = 0

    def __call__(self, into: memoryview) -> int:
        found = self._data[self.at : self.at + min(self._piece, len(into))]
        into[: len(found)] = found
        self.at += len(found)
        return len(found)


@pytest.mark.parametrize("piece", [1 << 30, 1_000_003], ids=["whole", "short reads"])
def test_payload_is_read_once_and_verified(payload: npt.NDArray[np.uint8], piece: int) -> None:
    data, checksum = payload.tobytes(), lane_sums(payload)
    found, reader = np.empty_like(payload), Reader(data, piece)
    assert PayloadCheck().run(found, checksum, reader)
    assert reader.at == len(data)
    np.testing.assert_array_equal(found, payload)
    wrong = data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]
    assert not PayloadCheck().run(found, checksum, Reader(wrong, piece))
    with pytest.raises(EOFError):
        PayloadCheck().run(found, checksum, Reader(data[:-1], piece))


def test_packed_file_is_read_once_in_order_and_in_place(
    target: PackTarget, tmp_path: Path, store_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store_adapter(WatchedBlobStore(), rank=16)
    write_packed(tmp_path / "p", stored.packed, target)
    memory: list[npt.NDArray[np.uint8]] = []

    def allocate(num_bytes: int) -> npt.NDArray[np.uint8]:
        memory.append(np.empty(num_bytes, np.uint8))
        return memory[-1]

    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def watched(descriptor: int, into: list[memoryview], begin: int) -> int:
        num_read = preadv(descriptor, into, begin)
        address = np.frombuffer(into[0], np.uint8).ctypes.data
        assert address == memory[0].ctypes.data + begin - payload_begin, "bytes are read directly into place"
        reads.append((begin, begin + num_read))
        return num_read

    monkeypatch.setattr(os, "preadv", watched)
    path = tmp_path / "p"
    payload_begin = path.stat().st_size - stored.packed.payload.nbytes
    with path.open("rb") as file:
        packed = read_open_packed(file.fileno(), path.stat(), PayloadCheck(), target, stored.digest, allocate)
    assert len(memory) == 1
    assert packed.payload.ctypes.data == memory[0].ctypes.data
    begins, ends = zip(*reads, strict=True)
    assert begins == (payload_begin, *ends[:-1])
    assert ends[-1] == path.stat().st_size


class Bench:
    def __init__(self, target: PackTarget, tmp_path: Path, store_adapter: Any) -> None:
        self.blobs = WatchedBlobStore()
        self._target = target
        self._directory = tmp_path
        self.stored = store_adapter(self.blobs, is_packed=True)
        self.source = self.reopen()

    def reopen(self) -> PackedSource:
        return open_source(self.blobs, self._target, self._directory)

    @property
    def path(self) -> Path:
        (path,) = self._directory.glob("disk/*/*.packed")
        return path

    def fetch(self, source: PackedSource | None = None) -> None:
        found = fetch(source or self.source, self.stored.digest)
        np.testing.assert_array_equal(found.payload, self.stored.packed.payload)


@pytest.fixture
def bench(target: PackTarget, tmp_path: Path, store_adapter: Any) -> Bench:
    return Bench(target, tmp_path, store_adapter)


@pytest.mark.parametrize("restores_times", [True, False], ids=["as if nothing was", "noticeably"])
@pytest.mark.parametrize("position", [0.0, 0.3, 0.999999], ids=["first", "inside", "last"])
def test_changed_file_is_not_served(bench: Bench, restores_times: bool, position: float) -> None:
    bench.fetch()
    bench.fetch()
    path = bench.path
    before = path.stat()
    begin = before.st_size - bench.stored.packed.payload.nbytes
    with path.open("r+b") as file:
        file.seek(begin + int(position * bench.stored.packed.payload.nbytes))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    if restores_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    bench.fetch()
    counts = bench.source.figures.snapshot()
    assert (counts.num_set_aside, bench.blobs.num_gets["packed"]) == (1, 2)
    bench.blobs.is_down = True
    bench.fetch()


def test_missing_or_truncated_file_is_fetched_again(bench: Bench) -> None:
    bench.fetch()
    os.truncate(bench.path, bench.path.stat().st_size - 1)
    bench.fetch()
    bench.path.unlink()
    bench.fetch()
    assert bench.blobs.num_gets["packed"] == 3


def test_misnamed_file_of_another_adapter_is_not_served(bench: Bench, store_adapter: Any) -> None:
    other = store_adapter(bench.blobs, seed=9, is_packed=True)
    bench.fetch()
    path = bench.path
    fetch(bench.source, other.digest)
    path.write_bytes(path.with_name(f"{other.digest}.packed").read_bytes())
    bench.fetch()
    assert bench.source.figures.snapshot().num_set_aside == 1


def test_wrong_bytes_in_every_tier_raise_an_error(bench: Bench) -> None:
    bench.fetch()
    bench.path.write_bytes(b"LMXPACK\x02" + b"\xff" * 100)
    for key in list(bench.blobs.list_keys()):
        bench.blobs.damage(key)
    with pytest.raises(AdapterCorrupt):
        bench.fetch()


@pytest.mark.parametrize("broken", ["hold", "forget", "add"])
def test_disk_tier_failure_does_not_prevent_a_fetch(bench: Bench, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(5, "input/output error")

    if broken == "forget":
        bench.fetch()
        bench.path.write_bytes(b"wrong")
    monkeypatch.setattr(bench.source.disk, broken, fail)
    bench.fetch()
    bench.fetch()
