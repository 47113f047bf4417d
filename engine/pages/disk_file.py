"""A file with copies of the pool's pages, and the thread that writes and reads it."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from loramux.engine.device.accelerator import Fence
from loramux.engine.pages.disk_pages import Transfer, TransferKind
from loramux.engine.pages.host_memory import PinnedHostMemory
from loramux.engine.pages.page_index import PageCopy
from loramux.engine.pages.pool_size import in_gib, num_pages_in
from loramux.engine.protocol.errors import ConfigNotUsable

MEASURED_BYTES = 32 << 20
"""Number of bytes whose reading is timed at startup."""

NUM_ROUNDS = 3
"""Number of times that they are read. The shortest time counts."""


class DiskFile:
    """Slots in one file, each for a page. A thread of its own writes and reads them, and checks what it has read.

    The file has no name, so the system frees its space when this process ends, in whatever way. No process finds pages
    of an earlier one, which may have had another base, another format, or tenants that have been deleted since. The
    checksums are in memory, and cover the page's key, so a slot with other bytes, or with another page, is not used.
    """

    def __init__(
        self, memory: PinnedHostMemory, directory: Path, num_bytes: int, wake: Callable[[], None] = lambda: None
    ) -> None:
        """Reserve the space, measure how long reading takes, and start the thread, which calls `wake` after each read.

        Overwrites slots of `memory`, which must not have pages yet. Raises ConfigNotUsable if no slot fits, or if the
        disk lacks the space.
        """
        self.num_slots = num_pages_in(num_bytes, memory.page_bytes, "kv_disk_bytes")
        self._memory = memory
        self._page_bytes = memory.page_bytes
        self._wake = wake
        self._zeros = bytes(self._page_bytes)
        size = self.num_slots * self._page_bytes
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigNotUsable(
                f"the file for kv_disk_bytes cannot be created in {directory}: {error.strerror}"
            ) from error
        try:
            # Otherwise, the registry's or the blob store's next write could be the one for which there is no space.
            os.posix_fallocate(self._file.fileno(), 0, size)
            self.read_s = self._measured_read_s()
        except OSError as error:
            self._file.close()
            raise ConfigNotUsable(
                f"{in_gib(size)} for kv_disk_bytes cannot be reserved in {directory}: {error.strerror}; lower it"
            ) from error
        self._checksums = [0] * self.num_slots
        # Guards the queues. A sequence may wait for a read, but nothing waits for the other transfers.
        self._changed = threading.Condition()
        self._reads: deque[tuple[Transfer, Fence]] = deque()
        self._writes: deque[tuple[Transfer, Fence]] = deque()
        # A tenant may have a hundred thousand pages to erase.
        self._erasures: deque[PageCopy] = deque()
        self._ended: list[tuple[Transfer, bool]] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    def start(self, transfer: Transfer) -> None:
        # On a GPU, copies to and from the slot of host memory may still be running.
        fence = self._memory.fence()
        queue = self._reads if transfer.kind is TransferKind.READ else self._writes
        with self._changed:
            queue.append((transfer, fence))
            self._changed.notify()

    def erase(self, pages: Iterable[PageCopy]) -> None:
        with self._changed:
            self._erasures.extend(pages)
            self._changed.notify()

    def poll(self) -> list[tuple[Transfer, bool]]:
        if not self._ended:
            return []
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        has_written = False
        while True:
            with self._changed:
                while not (self._reads or self._writes or self._erasures or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    return
                # Writes and erasures take turns, because slots of host memory are busy until the writes end.
                fence: Fence | None = None
                if self._erasures and not self._reads and (has_written or not self._writes):
                    transfer = Transfer(TransferKind.ERASE, self._erasures.popleft())
                else:
                    transfer, fence = (self._reads or self._writes).popleft()
            has_written = transfer.kind is TransferKind.WRITE
            try:
                if fence is not None:
                    fence.wait()
                is_done = self._carry_out(transfer)
            except Exception:
                # Whatever the fault, its slots would be busy for ever if this thread ended.
                is_done = False
            with self._changed:
                self._ended.append((transfer, is_done))
            if transfer.kind is TransferKind.READ:
                self._wake()

    def _carry_out(self, transfer: Transfer) -> bool:
        """Returns False if the slot does not contain the page. Raises OSError."""
        page = transfer.page
        match transfer.kind:
            case TransferKind.WRITE:
                content = self._memory.content(transfer.host_slot)
                # A slot that is written only in part must not equal a page.
                self._checksums[page.slot] = _checksum(page.key, content)
                self._write(page.slot, content)
                return True
            case TransferKind.READ:
                content = self._memory.content(transfer.host_slot)
                self._read(page.slot, content)
                return _checksum(page.key, content) == self._checksums[page.slot]
            case TransferKind.ERASE:
                self._write(page.slot, memoryview(self._zeros))
                return True

    def _write(self, slot: int, content: memoryview) -> None:
        offset = slot * self._page_bytes
        while content:
            written = os.pwrite(self._file.fileno(), content, offset)
            content, offset = content[written:], offset + written

    def _read(self, slot: int, content: memoryview) -> None:
        offset = slot * self._page_bytes
        while content:
            num_read = os.preadv(self._file.fileno(), [content], offset)
            if not num_read:
                raise OSError("the file is too short")
            content, offset = content[num_read:], offset + num_read

    def _measured_read_s(self) -> float:
        count = max(1, min(MEASURED_BYTES // self._page_bytes, self.num_slots, self._memory.num_slots))
        descriptor = self._file.fileno()
        for slot in range(count):
            # A file system that compresses would not store zeros at all.
            content = self._memory.content(slot)
            content[:] = os.urandom(self._page_bytes)
            self._write(slot, content)
        os.fsync(descriptor)
        rounds: list[float] = []
        for _ in range(NUM_ROUNDS):
            # Later, most pages are no longer in the system's own cache of files.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            started_s = time.perf_counter()
            for slot in range(count):
                self._read(slot, self._memory.content(slot))
                _checksum(b"", self._memory.content(slot))
            rounds.append(time.perf_counter() - started_s)
        # As in PinnedHostMemory, a pause of this process must not turn the tier off.
        return min(rounds) / count


def _checksum(key: bytes, content: memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(key))
