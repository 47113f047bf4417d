"""Which adapters are resident: loading, pinning by running sequences, and LRU eviction of idle ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from loramux.engine.page_pool import PageOwner, PagePool
from loramux.kernels.layout import AdapterLayout

NOBODY = 1 << 62
"""The arrival of a sequence that does not exist: after all that do."""


class AdapterPhase(Enum):
    FETCHING = "fetching"
    """A loader thread brings the packed file into memory."""
    PLACING = "placing"
    """The file is here; pages or a slot are still to be found."""
    COPYING = "copying"
    """A loader thread copies the file into the adapter's pages."""
    RESIDENT = "resident"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class AdapterEntry:
    """One adapter on its way into the pool, or in it. A slot and pages are held from COPYING on."""

    digest: str
    phase: AdapterPhase = AdapterPhase.FETCHING
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_pages: int = 0
    num_users: int = 0
    """Running sequences; the adapter cannot be evicted while there are any."""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A packed file is in memory: its layout, and a hold on it that `copy` consumes."""

    digest: str
    layout: AdapterLayout


@dataclass(frozen=True, slots=True)
class Copied:
    """An adapter's pages are filled."""

    digest: str


@dataclass(frozen=True, slots=True)
class LoadFailed:
    digest: str
    message: str


LoadEvent = Fetched | Copied | LoadFailed


class AdapterLoader(Protocol):
    """Does the slow part of loading elsewhere; its events are collected by the engine thread between steps."""

    def fetch(self, digest: str) -> None:
        """Begin to bring the packed file into memory; ends with Fetched or LoadFailed."""

    def copy(self, digest: str, pages: list[int]) -> None:
        """Begin to copy the fetched file into pages; ends with Copied or LoadFailed."""

    def publish(self, digest: str, slot: int, pages: list[int]) -> None:
        """Write the slot's tables, now, on the engine thread; releases the hold on the fetched file."""

    def drop(self, digest: str) -> None:
        """Release the hold on a fetched file that will not be copied."""

    def events(self) -> list[LoadEvent]:
        """What has happened since the last call, in order."""


class AdapterPool:
    """Adapters by digest, with a slot and pages each while resident.

    Idle adapters stay until their pages or their slot are needed; the least recently used goes first.
    """

    def __init__(self, pages: PagePool, num_slots: int, loader: AdapterLoader) -> None:
        self._pages = pages
        self._loader = loader
        self._entries: dict[str, AdapterEntry] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))
        # Resident adapters without users, least recently used first.
        self._idle: OrderedDict[str, AdapterEntry] = OrderedDict()
        self._placing: list[AdapterEntry] = []
        # Arrival of the oldest waiting sequence of each adapter, as of the last poll.
        self._wanted: Mapping[str, int] = {}
        self.num_loads = 0
        self.num_evictions = 0

    def num_pages_wanted(self, arrival: int) -> int:
        """Pages that a fetched adapter waits for; a sequence that arrived after its own is not admitted into these."""
        if not self._placing or self._turn(self._placing[0]) > arrival:
            return 0
        return self._placing[0].num_pages

    def entries(self) -> Iterator[AdapterEntry]:
        return iter(self._entries.values())

    def prefetch(self, digest: str) -> AdapterEntry:
        """Begin to load the adapter unless it is resident or on its way; never waits."""
        entry = self._entries.get(digest)
        if entry is None:
            entry = self._entries[digest] = AdapterEntry(digest)
            self._loader.fetch(digest)
        return entry

    def find(self, digest: str) -> AdapterEntry | None:
        return self._entries.get(digest)

    def acquire(self, entry: AdapterEntry) -> int:
        """Pin a resident adapter for one running sequence and return its slot."""
        assert entry.phase is AdapterPhase.RESIDENT
        entry.num_users += 1
        self._idle.pop(entry.digest, None)
        return entry.slot

    def release(self, digest: str) -> None:
        """Undo one `acquire`; without users the adapter becomes the most recently used idle one."""
        entry = self._entries[digest]
        assert entry.num_users > 0
        entry.num_users -= 1
        if entry.num_users == 0:
            self._idle[digest] = entry

    def poll(self, wanted: Mapping[str, int]) -> list[AdapterEntry]:
        """Advance loading by what has happened; returns the adapters that became resident or failed.

        `wanted` holds the arrival of the oldest waiting sequence of each adapter that one waits for. Fetched adapters
        get room in that order and take none from an adapter that an older sequence waits for, so that the oldest
        always gets on. A failed adapter is forgotten, so that the next request tries again.
        """
        self._wanted = wanted
        settled: list[AdapterEntry] = []
        for event in self._loader.events():
            entry = self._entries[event.digest]
            match event:
                case Fetched(layout=layout):
                    entry.num_pages = layout.num_pages
                    if layout.num_pages > self._pages.num_pages:
                        self._loader.drop(entry.digest)
                        self._fail(entry, "the adapter is larger than the whole page pool")
                        settled.append(entry)
                    else:
                        entry.phase = AdapterPhase.PLACING
                        self._placing.append(entry)
                case Copied():
                    self._loader.publish(entry.digest, entry.slot, entry.pages)
                    entry.phase = AdapterPhase.RESIDENT
                    self._idle[entry.digest] = entry
                    self.num_loads += 1
                    settled.append(entry)
                case LoadFailed(message=message):
                    self._fail(entry, message)
                    settled.append(entry)
        self._place()
        return settled

    def evict_idle(self, num_pages: int, arrival: int) -> bool:
        """Evict idle adapters, least recently used first, until `num_pages` are free; False when it cannot.

        For a sequence of this arrival: what an older one waits for stays.
        """
        while not self._pages.can_alloc(num_pages):
            oldest = self._oldest_idle(arrival)
            if oldest is None:
                return False
            self._evict(oldest)
        return True

    def unload(self, digest: str) -> bool:
        """Evict the adapter if it is idle; False while it is loading or in use."""
        entry = self._entries.get(digest)
        if entry is None:
            return True
        if entry.digest not in self._idle:
            return False
        self._evict(entry)
        return True

    def _place(self) -> None:
        """Give room to fetched adapters in turn; the first that does not fit keeps those behind it waiting."""
        self._placing.sort(key=self._turn)
        while self._placing:
            entry = self._placing[0]
            oldest = self._oldest_idle(self._turn(entry))
            if not self._free_slots and oldest is not None:
                self._evict(oldest)
            if not self._free_slots or not self.evict_idle(entry.num_pages, self._turn(entry)):
                return
            self._placing.pop(0)
            entry.slot = self._free_slots.pop()
            entry.pages = self._pages.alloc(entry.num_pages, PageOwner.ADAPTER)
            entry.phase = AdapterPhase.COPYING
            self._loader.copy(entry.digest, entry.pages)

    def _turn(self, entry: AdapterEntry) -> int:
        """Arrival of the oldest sequence that waits for the adapter; after all others where none does."""
        return self._wanted.get(entry.digest, NOBODY)

    def _oldest_idle(self, arrival: int) -> AdapterEntry | None:
        """The least recently used idle adapter that no sequence from before `arrival` waits for."""
        return next((entry for entry in self._idle.values() if self._turn(entry) >= arrival), None)

    def _evict(self, entry: AdapterEntry) -> None:
        assert entry.num_users == 0
        assert entry.phase is AdapterPhase.RESIDENT
        self._idle.pop(entry.digest)
        del self._entries[entry.digest]
        self._give_back(entry)
        self.num_evictions += 1

    def _fail(self, entry: AdapterEntry, message: str) -> None:
        entry.phase = AdapterPhase.FAILED
        entry.failure = message
        del self._entries[entry.digest]
        self._give_back(entry)

    def _give_back(self, entry: AdapterEntry) -> None:
        self._pages.free(entry.pages)
        entry.pages = []
        if entry.slot >= 0:
            self._free_slots.append(entry.slot)
            entry.slot = -1
