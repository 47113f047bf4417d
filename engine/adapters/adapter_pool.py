"""Which adapters are resident: loading, pinning by running sequences, and room for those that come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from loramux.engine.adapters.adapter_loading import AdapterLoader, Copied, Fetched, LoadFailed
from loramux.engine.pages.eviction import AFTER_ALL, Evictable, Reclaimer
from loramux.engine.pages.page_pool import PageOwner, PagePool

COPY_COST = 0.5
"""What copying one page of an adapter takes, beside computing one of K and V: a guess, for policies that ask."""

NOT_SHORT = AFTER_ALL
"""The queue position of the sequence that is short of pages, where none is."""


class AdapterPhase(Enum):
    FETCHING = "fetching"
    """The loader brings the adapter into host memory."""
    PLACING = "placing"
    """The file is here; pages or a slot are still to be found."""
    COPYING = "copying"
    """The file is copied into the adapter's pages."""
    RESIDENT = "resident"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class AdapterEntry:
    """One adapter on its way into the pool, or in it. A slot and pages are held from COPYING on."""

    pool: AdapterPool
    digest: str
    phase: AdapterPhase = AdapterPhase.FETCHING
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_pages: int = 0
    num_users: int = 0
    """Running sequences, and a pin; the adapter cannot be evicted while there are any."""
    evict_when_idle: bool = False
    """It is evicted as soon as nobody uses it."""
    is_pinned: bool = False
    """One of its users is no sequence, and keeps it."""
    failure: str = ""
    used_s: float = 0.0
    """When it became resident, or a sequence last began or ended on it."""

    @property
    def key(self) -> str:
        return self.digest

    @property
    def cost(self) -> float:
        return COPY_COST * self.num_pages

    @property
    def has_slot(self) -> bool:
        return True

    @property
    def is_waited_for(self) -> bool:
        return self.pool.position_of(self) < AFTER_ALL

    def evict(self) -> None:
        self.pool.forget(self)


@dataclass(frozen=True, slots=True)
class Demand:
    """What sequences want of the pool before a step.

    A queue position is a sequence's place in the order of those that wait, from 0.
    """

    queue_positions: dict[str, int] = field(default_factory=dict)
    """The position of the first sequence that waits for each adapter, in the order of the positions."""
    short_position: int = NOT_SHORT
    """The position of the first sequence that is short of pages: nobody at a later position gets some."""
    num_free_sequence_slots: int = AFTER_ALL
    """So many sequences could begin in this step: only for their adapters must others give way that are waited for."""
    num_growing: int = 0
    """Pages that running sequences may soon need; adapters that come ahead of their turn leave these alone."""


class AdapterPool:
    """Adapters by digest, with a slot and pages each while resident.

    Idle adapters stay until their pages or their slot are needed by what the eviction policy values more.
    """

    def __init__(
        self,
        pages: PagePool,
        num_slots: int,
        loader: AdapterLoader,
        reclaimer: Reclaimer,
        clock: Callable[[], float] = time.monotonic,
        *,
        on_residency: Callable[[str, bool], None],
    ) -> None:
        self._pages = pages
        self._loader = loader
        self._reclaimer = reclaimer
        self._clock = clock
        reclaimer.waited_for = self
        self._entries: dict[str, AdapterEntry] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._placing: list[AdapterEntry] = []
        # As of the last poll.
        self._demand = Demand()
        self.on_residency = on_residency
        """Called when an adapter has become resident, and when it no longer is."""
        self.num_slots = num_slots
        self.num_pinned_pages = 0
        self.num_loads = 0
        self.num_evictions = 0

    def num_pages_wanted(self, position: int) -> int:
        """Pages that a fetched adapter waits for; a sequence at a later position is not admitted into these."""
        if not self._placing or self.position_of(self._placing[0]) > position:
            return 0
        return self._placing[0].num_pages

    def entries(self) -> Iterator[AdapterEntry]:
        return iter(self._entries.values())

    def idle_s(self, entry: AdapterEntry) -> float:
        """How long no sequence has used a resident adapter."""
        return 0.0 if entry.num_users > entry.is_pinned else self._clock() - entry.used_s

    def prefetch(self, digest: str) -> AdapterEntry:
        """Begin to load the adapter unless it is resident or on its way; never waits."""
        entry = self._entries.get(digest)
        if entry is None:
            entry = self._entries[digest] = AdapterEntry(self, digest)
            self._loader.fetch(digest)
        return entry

    def find(self, digest: str) -> AdapterEntry | None:
        return self._entries.get(digest)

    def acquire(self, entry: AdapterEntry) -> int:
        """Pin a resident adapter for one running sequence and return its slot."""
        assert entry.phase is AdapterPhase.RESIDENT
        if entry.num_users == 0:
            self._reclaimer.policy.discard(entry)
        entry.num_users += 1
        entry.used_s = self._clock()
        return entry.slot

    def release(self, digest: str) -> None:
        """Undo one `acquire`; without users the adapter becomes evictable."""
        entry = self._entries[digest]
        assert entry.num_users > 0
        entry.num_users -= 1
        if entry.num_users == 0:
            self._rest(entry)

    @property
    def is_copying(self) -> bool:
        """Whether an adapter holds pages that nobody can evict until it is resident."""
        return any(entry.phase is AdapterPhase.COPYING for entry in self._entries.values())

    def gives_way(self, entry: AdapterEntry, position: int) -> bool:
        """Whether the adapter's slot is wanted by one before `position` in the queue: the one with fewest users."""
        if not self._placing or self._free_slots or self.position_of(self._placing[0]) >= position:
            return False
        resident = (one for one in self._entries.values() if one.phase is AdapterPhase.RESIDENT and not one.is_pinned)
        return entry is min(resident, key=lambda one: one.num_users, default=None)

    def can_spare(self, num_pages: int, position: int) -> bool:
        """Whether one at `position` in the queue may have pages, beside what a fetched adapter before it wants."""
        return self._reclaimer.can_make_room(num_pages + self.num_pages_wanted(position), position)

    def num_pages_of_others(self, entry: AdapterEntry | None, position: int) -> int:
        """Evictable pages, for one at `position` in the queue, that will be so no longer once it uses this adapter."""
        if entry is None or entry.num_users or self.position_of(entry) < position:
            return 0
        return entry.num_pages

    def poll(self, demand: Demand) -> list[AdapterEntry]:
        """Advance loading by what has happened; returns the adapters that became resident or failed.

        Fetched adapters get room in the order of their positions, and take none from an adapter that an earlier
        sequence waits for, so that the first always gets on. A failed adapter is forgotten, so that the next request
        tries again, and so is one that nobody wants whose position is near.
        """
        self._demand = demand
        settled: list[AdapterEntry] = []
        for event in self._loader.events():
            entry = self._entries[event.digest]
            match event:
                case Fetched(layout=layout):
                    entry.num_pages = layout.num_pages
                    if not self._fits_beside_pins(entry):
                        self._loader.drop(entry.digest)
                        is_ever = layout.num_pages <= self._pages.num_pages
                        room = "what pinned adapters leave of the page pool" if is_ever else "the whole page pool"
                        self._fail(entry, f"the adapter is larger than {room}")
                        settled.append(entry)
                    else:
                        entry.phase = AdapterPhase.PLACING
                        self._placing.append(entry)
                case Copied():
                    self._loader.publish(entry.digest, entry.slot, entry.pages)
                    entry.phase = AdapterPhase.RESIDENT
                    self.num_loads += 1
                    settled.append(entry)
                    self.on_residency(entry.digest, True)
                    self._rest(entry)
                case LoadFailed(message=message):
                    self._fail(entry, message)
                    settled.append(entry)
        self._place()
        return settled

    def unload(self, digest: str) -> bool:
        """Forget the adapter if nobody uses it and it is not being copied; False otherwise."""
        entry = self._entries.get(digest)
        if entry is None:
            return True
        if entry.phase is AdapterPhase.FETCHING:
            self._loader.cancel(digest)
            del self._entries[digest]
            return True
        if entry.phase is AdapterPhase.PLACING:
            # It holds nothing yet but the file in memory.
            self._placing.remove(entry)
            self._loader.drop(digest)
            del self._entries[digest]
            return True
        if entry.phase is not AdapterPhase.RESIDENT or entry.num_users:
            return False
        self._reclaimer.policy.discard(entry)
        self.forget(entry)
        return True

    def evict_when_idle(self, digest: str) -> None:
        """Evict the adapter now or, while someone uses it, as soon as nobody does."""
        entry = self._entries.get(digest)
        if entry is None:
            return
        entry.evict_when_idle = True
        # Nobody takes this copy into use any more.
        self.on_residency(digest, False)
        if entry.phase is AdapterPhase.RESIDENT and entry.num_users == 0:
            self._reclaimer.policy.discard(entry)
            self.forget(entry)

    def position_of(self, entry: AdapterEntry) -> int:
        """The position of the first sequence that waits for the adapter; after all others where none does."""
        return self._demand.queue_positions.get(entry.digest, AFTER_ALL)

    def num_pages_before(self, position: int) -> int:
        """Pages of idle adapters for which a sequence waits before `position` in the queue."""
        return sum(entry.num_pages for entry, _ in self._idle_and_wanted(before=position))

    def last_after(self, position: int) -> Evictable | None:
        """The idle adapter that is wanted last, if that is after `position`."""
        last = max(self._idle_and_wanted(), key=lambda one: one[1], default=None)
        return last[0] if last is not None and last[1] > position else None

    def forget(self, entry: AdapterEntry) -> None:
        """Evict an adapter that the policy no longer holds."""
        assert entry.num_users == 0
        assert entry.phase is AdapterPhase.RESIDENT
        del self._entries[entry.digest]
        self._give_back(entry)
        self.on_residency(entry.digest, False)
        self.num_evictions += 1

    def _place(self) -> None:
        """Give room to fetched adapters in turn; the first that does not fit keeps those behind it waiting.

        One that nobody at a near position waits for stays in host memory: here it would be evicted before it is used.
        """
        for entry in [one for one in self._placing if one.digest not in self._demand.queue_positions]:
            self.unload(entry.digest)
        self._placing.sort(key=self.position_of)
        while self._placing and self._find_room(self._placing[0]):
            entry = self._placing.pop(0)
            entry.slot = self._free_slots.pop()
            entry.pages = self._pages.alloc(entry.num_pages, PageOwner.ADAPTER)
            entry.phase = AdapterPhase.COPYING
            self._loader.copy(entry.digest, entry.pages)

    def _find_room(self, entry: AdapterEntry) -> bool:
        """Make a slot and pages free for a fetched adapter, if its queue position allows it."""
        position, num_pages = self.position_of(entry), entry.num_pages
        if position > self._demand.short_position:
            return False
        if position >= self._demand.num_free_sequence_slots:
            # It comes ahead of its turn: who is waited for stays, and who runs can grow.
            position = AFTER_ALL
            if not self._reclaimer.can_make_room(num_pages + self._demand.num_growing, position):
                return False
        has_slot = bool(self._free_slots) or self._reclaimer.evict_one(position, slots_only=True)
        return has_slot and self._reclaimer.make_room(num_pages, position)

    def _idle_and_wanted(self, before: int = AFTER_ALL) -> Iterator[tuple[AdapterEntry, int]]:
        """Idle adapters that are waited for, with their queue positions, in the order of these; up to one position."""
        for digest, position in self._demand.queue_positions.items():
            if position >= before:
                return
            entry = self._entries.get(digest)
            if entry is not None and entry.num_users == 0 and entry.phase is AdapterPhase.RESIDENT:
                yield entry, position

    def _rest(self, entry: AdapterEntry) -> None:
        """Nobody uses the adapter any more, or yet."""
        entry.used_s = self._clock()
        if entry.evict_when_idle:
            self.forget(entry)
        else:
            self._reclaimer.policy.add(entry)

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

    # Pins

    def pin(self, entry: AdapterEntry) -> None:
        """Keep a resident adapter until `unpin`."""
        assert not entry.is_pinned
        self.acquire(entry)
        entry.is_pinned = True
        self.num_pinned_pages += entry.num_pages

    def unpin(self, digest: str) -> None:
        entry = self._entries[digest]
        assert entry.is_pinned
        entry.is_pinned = False
        self.num_pinned_pages -= entry.num_pages
        self.release(digest)

    def num_pages_beside(self, digest: str | None, num_pages: int) -> int:
        """What a sequence can never have: its adapter's pages, `num_pages` of them, and those that are pinned."""
        entry = None if digest is None else self._entries.get(digest)
        if entry is not None and entry.is_pinned:
            return self.num_pinned_pages
        return self.num_pinned_pages + num_pages

    @property
    def can_place_all(self) -> bool:
        """Whether every adapter that waits for room will find some, whatever is pinned."""
        return all(self._fits_beside_pins(entry) for entry in self._placing)

    def _fits_beside_pins(self, entry: AdapterEntry) -> bool:
        return entry.num_pages <= self._pages.num_pages - self.num_pinned_pages
