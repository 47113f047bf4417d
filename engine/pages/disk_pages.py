"""Copies of prefix pages on a local disk: the third tier of the prefix cache, behind the pool and host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from loramux.engine.pages.page_index import PageCopy, PageIndex
from loramux.engine.protocol.messages import DiskPageCounts
from loramux.engine.sequences.disk_wait import DiskWait

FIRST_WAIT_S = 1.0
"""Longest time that a sequence waits for pages on disk while no prompt has been measured, in seconds."""


class TransferKind(Enum):
    WRITE = auto()
    """Copy a slot of host memory to a slot on disk."""
    READ = auto()
    """Copy a slot on disk to a slot of host memory."""
    ERASE = auto()
    """Overwrite a slot on disk with zeros."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Work of the disk's thread. `page` has the slot on disk. An erasure has no slot of host memory."""

    kind: TransferKind
    page: PageCopy
    host_slot: int = -1
    is_cancelled: bool = False
    """True if the page was deleted in the meantime, so the copy must not be used."""


class DiskSlots(Protocol):
    """Slots on disk, each for one page. A thread reads and writes them. Only the engine's thread calls it."""

    @property
    def num_slots(self) -> int: ...

    @property
    def read_s(self) -> float:
        """Measured time to read a page, in seconds."""
        ...

    def start(self, transfer: Transfer) -> None:
        """Queue a read or a write. Reads come before all others. Neither of its slots may be used before `poll` returns
        it, except that a slot on disk can be overwritten or erased after a read of it that was queued before.
        """
        ...

    def erase(self, pages: Iterable[PageCopy]) -> None:
        """Queue an erasure of each page's slot. Writes may come before them. `poll` returns a transfer for each."""
        ...

    def poll(self) -> list[tuple[Transfer, bool]]:
        """The transfers that have ended since the last call, each with whether it succeeded."""
        ...

    def close(self) -> None:
        """End the thread after its current transfer, and delete everything on disk."""


class NoDiskSlots:
    """The slots of a tier that is turned off."""

    num_slots = 0
    read_s = 0.0

    def start(self, transfer: Transfer) -> None:
        raise AssertionError("there is no slot")

    def erase(self, pages: Iterable[PageCopy]) -> None:
        assert not list(pages), "there is no slot"

    def poll(self) -> list[tuple[Transfer, bool]]:
        return []

    def close(self) -> None:
        """Do nothing, because there is no thread."""


class DiskPages:
    """Copies by key of the pages that host memory has evicted.

    A page comes from a slot of host memory and returns to one, and the slot is busy until then: `write` and `read` take
    it, and `poll` gives it back. A copy stays when its page is read. All transfers run on a thread. Only the index here
    says whose page a slot contains, so a page that is deleted from it can no longer be found, and its slot is then
    overwritten with zeros before another page gets it.
    """

    def __init__(self, slots: DiskSlots | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without `slots`, the tier is off and finds nothing."""
        self._slots: DiskSlots = NoDiskSlots() if slots is None else slots
        self._clock = clock
        self._index = PageIndex(self._slots.num_slots)
        self._free = list(range(self._slots.num_slots - 1, -1, -1))
        self._writing: dict[bytes, Transfer] = {}
        self._reading: dict[bytes, Transfer] = {}
        # Pages that are read once host memory has free slots, in the order in which they were wanted.
        self._wanted: dict[bytes, PageCopy] = {}
        self._waits: list[DiskWait] = []
        self._num_erasing = 0
        self._num_written = 0
        self._num_read = 0
        self._num_evictions = 0
        self._num_lost = 0
        self._num_failed = 0
        self._read_tokens = 0
        self._recomputed_tokens = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def is_on(self) -> bool:
        return self._slots.num_slots > 0

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def num_writing(self) -> int:
        """Number of slots of host memory that are being written to disk."""
        return len(self._writing)

    @property
    def busy_host_slots(self) -> list[int]:
        """The slots of host memory that `poll` will give back."""
        return [transfer.host_slot for transfer in (*self._writing.values(), *self._reading.values())]

    def find(self, key: bytes) -> PageCopy | None:
        return self._index.find(key)

    def owners(self) -> set[bytes]:
        """The owners of all pages that can be found, or will be once they are written or read."""
        moving = [one.page for one in (*self._writing.values(), *self._reading.values()) if not one.is_cancelled]
        return {page.owner for page in (*self._index, *moving)}

    def write(self, evicted: PageCopy) -> bool:
        """Write a page that host memory evicts to disk, unless there is a copy already. Returns True if its slot of
        host memory is busy.
        """
        found = self._index.find(evicted.key)
        if found is not None:
            self._index.touch(found)
            return False
        if evicted.key in self._writing:
            return False
        slot = self._take_slot(evicted.owner)
        if slot is None:
            self.count_lost(evicted)
            return False
        page = PageCopy(evicted.key, slot, evicted.digest, evicted.owner)
        self._writing[page.key] = transfer = Transfer(TransferKind.WRITE, page, evicted.slot)
        self._slots.start(transfer)
        return True

    def count_lost(self, evicted: PageCopy) -> None:
        """Count a page that host memory evicts without writing it, because the disk is too slow, if there is no copy
        yet.
        """
        self._num_lost += self.is_on and self._index.find(evicted.key) is None

    def want(self, pages: Iterable[PageCopy]) -> None:
        """Have pages read as soon as there is room for them: see `take_wanted`."""
        for page in pages:
            # Otherwise, pages that leave host memory to make room for this one could replace it.
            self._index.touch(page)
            if page.key not in self._reading:
                self._wanted.setdefault(page.key, page)

    def take_wanted(self) -> PageCopy | None:
        """Remove and return the first page that is wanted, or None. The caller calls `read` if it has a slot for it."""
        key = next(iter(self._wanted), None)
        return None if key is None else self._wanted.pop(key)

    def read(self, page: PageCopy, host_slot: int) -> None:
        """Read a page into a slot of host memory."""
        self._reading[page.key] = transfer = Transfer(TransferKind.READ, page, host_slot)
        self._slots.start(transfer)

    def poll(self) -> list[tuple[int, PageCopy | None]]:
        """The slots of host memory that are no longer busy, each with the page on disk that has been read into it."""
        returned: list[tuple[int, PageCopy | None]] = []
        for transfer, is_done in self._slots.poll():
            self._num_failed += not is_done
            match transfer.kind:
                case TransferKind.WRITE:
                    del self._writing[transfer.page.key]
                    self._note_written(transfer, is_done)
                    returned.append((transfer.host_slot, None))
                case TransferKind.READ:
                    del self._reading[transfer.page.key]
                    is_usable = self._note_read(transfer, is_done)
                    returned.append((transfer.host_slot, transfer.page if is_usable else None))
                case TransferKind.ERASE:
                    # If the disk refused, only the next page overwrites the slot. Nothing can find the old one.
                    self._num_erasing -= 1
                    self._free.append(transfer.page.slot)
        self._end_waits()
        return returned

    def read_s(self, num_pages: int) -> float:
        """Expected time until `num_pages` more pages are read, in seconds."""
        return (len(self._wanted) + len(self._reading) + num_pages) * self._slots.read_s

    def wait_for(
        self, pages: Iterable[PageCopy], beside: Iterable[PageCopy], seconds: float, num_tokens: int
    ) -> DiskWait:
        """Begin the wait of a sequence that needs these pages, for at most `seconds` from now: see DiskWait."""
        until_s = self._clock() + seconds
        wait = DiskWait(frozenset(one.key for one in pages), until_s, num_tokens, frozenset(one.key for one in beside))
        self._waits.append(wait)
        return wait

    def awaited(self) -> set[bytes]:
        """The keys of the pages for which waiting sequences need slots of host memory, and of those that are still
        being read although no sequence waits for them any longer.
        """
        self._end_waits()
        return {*self._reading, *(key for wait in self._waits for key in wait.keys | wait.beside)}

    def is_reading(self, wait: DiskWait) -> bool:
        """True if pages of a wait are still to come, and its time is not over."""
        if not wait.keys or self._clock() >= wait.until_s:
            return False
        return any(key in self._wanted or key in self._reading for key in wait.keys)

    def count_decision(self, read_tokens: int, recomputed_tokens: int) -> None:
        """Count tokens with which a sequence can begin because their pages were read, and tokens that it computes
        although their pages are on disk.
        """
        self._read_tokens += read_tokens
        self._recomputed_tokens += recomputed_tokens

    @property
    def is_deleting(self) -> bool:
        """True if a deleted page is being written. `poll` has it erased once that has ended."""
        return any(transfer.is_cancelled for transfer in self._writing.values())

    def forget(self, key: bytes) -> None:
        """Delete a page, if there is one."""
        page = self._index.find(key)
        if page is not None:
            self._discard([page])
        self._cancel(lambda page: page.key == key)

    def purge(self, digest: str) -> None:
        """Delete all pages that depend on an adapter."""
        self._discard(self._index.with_digest(digest))
        self._cancel(lambda page: page.digest == digest)

    def purge_owners(self, owners: Iterable[bytes]) -> None:
        """Delete all pages of some owners."""
        deleted = set(owners)
        self._discard(self._index.of_owners(deleted))
        self._cancel(lambda page: page.owner in deleted)

    def counts(self) -> DiskPageCounts:
        return DiskPageCounts(
            num_slots=self._slots.num_slots,
            num_pages=len(self),
            num_written=self._num_written,
            num_read=self._num_read,
            num_evictions=self._num_evictions,
            num_lost=self._num_lost,
            num_failed=self._num_failed,
            read_tokens=self._read_tokens,
            recomputed_tokens=self._recomputed_tokens,
        )

    def close(self) -> None:
        self._slots.close()

    def check_integrity(self) -> None:
        """Assert that each slot is free, has one page, or is being written or erased."""
        self._index.check_integrity()
        slots = [*self._free, *(page.slot for page in self._index)]
        slots += [transfer.page.slot for transfer in self._writing.values()]
        assert len(set(slots)) == len(slots) == self._slots.num_slots - self._num_erasing
        assert all(self._index.find(key) is page for key, page in self._wanted.items())

    def _note_written(self, transfer: Transfer, is_done: bool) -> None:
        page = transfer.page
        if is_done and not transfer.is_cancelled:
            self._num_written += 1
            self._index.add(page)
        else:
            # The slot may still have a part of this page, or the page before it.
            self._erase([page])

    def _note_read(self, transfer: Transfer, is_done: bool) -> bool:
        """Returns True if the page can be used."""
        page = transfer.page
        is_known = self._index.find(page.key) is page
        if is_done:
            self._num_read += 1
            if is_known:
                self._index.touch(page)
        elif is_known:
            self._discard([page])
        return is_done and not transfer.is_cancelled

    def _end_waits(self) -> None:
        """Remove the waits that are over, and do not read what only they wanted."""
        waits = [wait for wait in self._waits if self.is_reading(wait)]
        if len(waits) < len(self._waits):
            self._waits = waits
            awaited = {key for wait in waits for key in wait.keys}
            self._wanted = {key: page for key, page in self._wanted.items() if key in awaited}

    def _take_slot(self, owner: bytes) -> int | None:
        """A slot for a page of this owner, or None if all slots are being written or erased."""
        if self._free:
            return self._free.pop()
        oldest = self._index.oldest_for(owner)
        if oldest is None:
            return None
        self._num_evictions += 1
        self._index.remove(oldest)
        self._wanted.pop(oldest.key, None)
        return oldest.slot

    def _cancel(self, is_deleted: Callable[[PageCopy], bool]) -> None:
        """Cancel the transfers of deleted pages. A page that is being read may be missing in the index, because
        another page has taken its slot on disk.
        """
        for transfer in (*self._writing.values(), *self._reading.values()):
            transfer.is_cancelled |= is_deleted(transfer.page)

    def _discard(self, pages: list[PageCopy]) -> None:
        for page in pages:
            self._index.remove(page)
            self._wanted.pop(page.key, None)
        self._erase(pages)

    def _erase(self, pages: list[PageCopy]) -> None:
        self._num_erasing += len(pages)
        self._slots.erase(pages)
