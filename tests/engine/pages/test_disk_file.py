from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.pages import host_memory
from loramux.engine.pages.disk_file import DiskFile
from loramux.engine.pages.disk_pages import Transfer, TransferKind
from loramux.engine.pages.host_memory import PinnedHostMemory
from loramux.engine.pages.page_index import PageCopy
from loramux.engine.protocol.errors import ConfigNotUsable
from tests.engine.pages.test_host_memory import FLOAT, pool_of

PAGE_BYTES = FLOAT.pool_page_bytes
NUM_HOST_SLOTS = 4


def wait_until(is_true: Callable[[], bool]) -> None:
    """A thread that has died must not stop the test run."""
    deadline_s = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)


class Disk:
    """A file with 3 slots behind host memory with 4."""

    def __init__(self, directory: Path, num_bytes: int = 3 * PAGE_BYTES + 1) -> None:
        self.num_wakes = 0
        self.memory = PinnedHostMemory(
            [pool_of(FLOAT, has_cache_groups=False)], HostAccelerator(), NUM_HOST_SLOTS * PAGE_BYTES
        )
        self.file = DiskFile(self.memory, directory, num_bytes, self.wake)
        for slot in range(NUM_HOST_SLOTS):
            self.fill(slot, slot)

    def wake(self) -> None:
        self.num_wakes += 1

    def fill(self, slot: int, seed: int) -> None:
        row = torch.randint(0, 256, (PAGE_BYTES,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        self.memory.content(slot)[:] = row.numpy().data

    def content(self, slot: int) -> bytes:
        return bytes(self.memory.content(slot))

    def run(self, kind: TransferKind, slot: int, host_slot: int = -1, key: bytes = b"k") -> bool:
        """Wait for one transfer, and return whether it succeeded."""
        transfer = Transfer(kind, PageCopy(key, slot, None, b"owner"), host_slot)
        if kind is TransferKind.ERASE:
            self.file.erase([transfer.page])
        else:
            self.file.start(transfer)
        [(found, is_done)] = self.ended(1)
        assert (found.kind, found.page) == (kind, transfer.page)
        return is_done

    def ended(self, count: int) -> list[tuple[Transfer, bool]]:
        """Wait for `count` transfers."""
        ended: list[tuple[Transfer, bool]] = []

        def have_ended() -> bool:
            ended.extend(self.file.poll())
            return len(ended) >= count

        wait_until(have_ended)
        return ended

    def stored(self, slot: int) -> bytes:
        return os.pread(self.file._file.fileno(), PAGE_BYTES, slot * PAGE_BYTES)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.file.close()


def test_pages_come_back_into_other_slots(disk: Disk) -> None:
    assert disk.file.num_slots == 3
    assert disk.file.read_s > 0
    written = [disk.content(slot) for slot in range(3)]
    for slot in range(3):
        assert disk.run(TransferKind.WRITE, 2 - slot, slot)
    for slot in range(3):
        assert disk.run(TransferKind.READ, 2 - slot, 3)
        assert disk.content(3) == written[slot]
    # The thread wakes the engine after a transfer has ended.
    wait_until(lambda: disk.num_wakes == 3)


def test_a_slot_with_other_bytes_is_not_used(disk: Disk) -> None:
    assert disk.run(TransferKind.WRITE, 1, 0)
    os.pwrite(disk.file._file.fileno(), bytes([disk.content(0)[100] ^ 1]), PAGE_BYTES + 100)
    assert not disk.run(TransferKind.READ, 1, 2)


def test_a_slot_of_another_page_is_not_used(disk: Disk) -> None:
    assert disk.run(TransferKind.WRITE, 1, 0, b"one")
    assert not disk.run(TransferKind.READ, 1, 2, b"another")
    assert disk.run(TransferKind.READ, 1, 2, b"one")


def test_a_torn_file_is_not_used(disk: Disk) -> None:
    for slot in range(3):
        assert disk.run(TransferKind.WRITE, slot, slot)
    os.ftruncate(disk.file._file.fileno(), 2 * PAGE_BYTES - 1)
    assert [disk.run(TransferKind.READ, slot, 3) for slot in range(3)] == [True, False, False]


def test_a_slot_that_was_written_in_part_is_not_used(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.run(TransferKind.WRITE, 1, 0)
    pwrite, written = os.pwrite, []

    def torn(descriptor: int, content: memoryview, offset: int) -> int:
        """Write the first half, then fail."""
        if written:
            raise OSError("torn")
        written.append(pwrite(descriptor, content[: PAGE_BYTES // 2], offset))
        return written[0]

    monkeypatch.setattr(os, "pwrite", torn)
    assert not disk.run(TransferKind.WRITE, 1, 2)
    assert not disk.run(TransferKind.READ, 1, 3)


def test_a_disk_without_space_refuses_writes_and_keeps_other_pages(disk: Disk) -> None:
    assert disk.run(TransferKind.WRITE, 0, 0)
    own = disk.file._file
    with open("/dev/full", "r+b", buffering=0) as full:
        disk.file._file = full
        assert not disk.run(TransferKind.WRITE, 1, 1)
        disk.file._file = own
    assert disk.run(TransferKind.READ, 0, 3)
    assert disk.content(3) == disk.content(0)


def test_an_erased_slot_has_zeros(disk: Disk) -> None:
    assert disk.run(TransferKind.WRITE, 1, 0)
    assert disk.stored(1) == disk.content(0)
    assert disk.run(TransferKind.ERASE, 1)
    assert disk.stored(1) == bytes(PAGE_BYTES)
    assert not disk.run(TransferKind.READ, 1, 3)


def test_a_fault_of_one_transfer_does_not_end_the_thread(disk: Disk) -> None:
    class BrokenFence:
        def wait(self) -> None:
            raise RuntimeError("the device failed")

    own = disk.memory.fence
    disk.memory.fence = BrokenFence  # type: ignore[method-assign]
    assert not disk.run(TransferKind.WRITE, 0, 0)
    disk.memory.fence = own  # type: ignore[method-assign]
    assert disk.run(TransferKind.WRITE, 0, 0)


def test_reading_is_measured_with_pages_that_cannot_be_compressed(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert all(len(set(disk.stored(slot))) > 200 for slot in range(3))
    disk.file.close()


def test_reads_come_first_and_writes_take_turns_with_erasures(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert disk.run(TransferKind.WRITE, 0, 0)

    class SlowFence:
        def wait(self) -> None:
            # Until then, the others are queued behind this one.
            file = disk.file
            wait_until(lambda: (len(file._reads), len(file._writes), len(file._erasures)) == (1, 2, 3))

    transfers = [
        Transfer(kind, PageCopy(b"k", 0, None, b""), 1)
        for kind in (TransferKind.READ, TransferKind.WRITE, TransferKind.WRITE, TransferKind.READ)
    ]
    fences = [SlowFence()]
    disk.memory.fence = lambda: fences.pop() if fences else HostAccelerator().fence()  # type: ignore[method-assign]
    for transfer in transfers:
        disk.file.start(transfer)
    disk.file.erase([PageCopy(b"k", 1, None, b"")] * 3)
    read, write, erase = TransferKind.READ, TransferKind.WRITE, TransferKind.ERASE
    ended = [transfer for transfer, _ in disk.ended(7)]
    assert [transfer.kind for transfer in ended] == [read, read, write, erase, write, erase, erase]
    assert [transfer for transfer in ended if transfer.kind is not erase] == [transfers[at] for at in (0, 3, 1, 2)]
    disk.file.close()


def test_erasing_many_pages_needs_one_lock_and_no_fence(disk: Disk) -> None:
    disk.memory.fence = None  # type: ignore[method-assign,assignment]
    disk.file.erase(PageCopy(b"%d" % number, number % 3, None, b"") for number in range(100))
    assert all(is_done for _, is_done in disk.ended(100))


def test_the_file_has_no_name(disk: Disk, tmp_path: Path) -> None:
    """It is gone when its process ends, and no other process can open it."""
    assert disk.run(TransferKind.WRITE, 0, 0)
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(disk.file._file.fileno())
    assert (status.st_nlink, status.st_size, status.st_mode & 0o777) == (0, 3 * PAGE_BYTES, 0o600)


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [
        (PAGE_BYTES - 1, r"kv_disk_bytes is 6143 bytes, but a page of keys and values takes 6144"),
        (1 << 62, r"for kv_disk_bytes cannot be reserved in .*; lower it"),
    ],
    ids=["less than a page", "more than the disk has"],
)
def test_a_size_that_cannot_be_used_is_refused(num_bytes: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigNotUsable, match=message):
        Disk(tmp_path, num_bytes)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigNotUsable, match=r"the file for kv_disk_bytes cannot be created in .*/file"):
        Disk(tmp_path / "file")


def test_slots_in_several_pieces_of_host_memory_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 2 * PAGE_BYTES)
    disk = Disk(tmp_path)
    assert disk.run(TransferKind.WRITE, 0, 3)
    assert disk.run(TransferKind.READ, 0, 1)
    assert disk.content(1) == disk.content(3)
    disk.file.close()
