"""The pool of resident adapters: loads adapters, keeps adapters in use, and evicts idle adapters to make room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers.staged_adapter import NotStaged, StagedAdapter
from loramux.engine.adapters.adapter_changes import AdapterChanges
from loramux.engine.adapters.adapter_load import AdapterLoad, AdapterPhase
from loramux.engine.adapters.page_copier import Copier
from loramux.engine.adapters.slot_tables import TableWriter
from loramux.engine.adapters.stager import Stager
from loramux.engine.pages.eviction import AFTER_ALL, Evictable, EvictionPolicy, Reclaimer
from loramux.engine.pages.page_pool import PageOwner, PagePool

NOT_SHORT = AFTER_ALL
"""Value of `PoolDemand.short_position` when no sequence is short of pages."""


class PoolDemand(msgspec.Struct, frozen=True, gc=False):
    """What the sequences need from the pool before a step.

    A queue position is a sequence's index among the waiting sequences, starting at 0.
    """

    queue_positions: dict[str, int] = {}
    """For each adapter, the position of the first sequence waiting for it, in ascending order. Adapters that no
    sequence is waiting for, only a call or a lost pin, come last.
    """
    short_position: int = NOT_SHORT
    """Position of the first sequence that is short of pages, or `kv_pages.RUNNING` if a running sequence is. Adapters
    that only later sequences need get no pages.
    """
    num_free_sequence_slots: int = AFTER_ALL
    """Number of sequences that could start in this step. Only loads for these sequences may evict adapters that later
    sequences need.
    """
    num_growing: int = 0
    """Number of pages that running sequences may soon need. Adapters loaded ahead of their turn leave this many pages
    free.
    """


class AdapterPool:
    """All requested adapters, by digest. A resident adapter has a slot and pages, and so has one that was retired while
    sequences use it.

    `stager` loads adapters into host memory, `copier` copies them from there into pages, and `tables` record their
    locations. Idle adapters stay until their pages or slot are needed. `policy` decides which idle adapter is evicted
    first. The `reclaimer` first evicts adapters that no sequence is waiting for. If several workers share the base,
    `num_pages_of` returns the number of pages of each worker's share of a staged adapter.
    """

    def __init__(
        self,
        pages: PagePool,
        num_slots: int,
        stager: Stager,
        copier: Copier,
        tables: TableWriter,
        policy: EvictionPolicy,
        clock: Callable[[], float] = time.monotonic,
        *,
        on_residency: Callable[[str, bool], None],
        num_pages_of: Callable[[PackedAdapter], int] | None = None,
    ) -> None:
        self._pages = pages
        self._stager = stager
        self._copier = copier
        self._tables = tables
        self.reclaimer = Reclaimer(pages, policy, waited_for=self)
        self._clock = clock
        self._num_pages_of = num_pages_of
        self._loads: dict[str, AdapterLoad] = {}
        # Adapters with users, by slot. Retired ones are only here.
        self._used: dict[int, AdapterLoad] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))
        # Loads that the stager has not been asked for, and those that it has.
        self._queued: dict[str, AdapterLoad] = {}
        self._loading: dict[str, AdapterLoad] = {}
        # Loads waiting for a slot and pages.
        self._staged: list[AdapterLoad] = []
        self._copying: dict[str, AdapterLoad] = {}
        # Size in bytes of the last staged adapter, the estimate for those that are not staged yet.
        self._last_bytes = 0
        # True if an adapter has been wanted since adapters were last requested.
        self._has_new = False
        # The demand passed to the last `poll`.
        self._demand = PoolDemand()
        self.on_residency = on_residency
        """Called with an adapter's digest, and True when it becomes resident or False when it stops being usable."""
        self.changes = AdapterChanges()
        self.num_slots = num_slots
        self.num_pinned_pages = 0
        self.num_loads = 0
        self.num_evictions = 0

    def num_pages_wanted(self, position: int) -> int:
        """Number of pages that a sequence at `position` must leave for the first staged adapter."""
        if not self._staged or self.position_of(self._staged[0]) > position:
            return 0
        return self._staged[0].num_pages

    def loads(self) -> Iterator[AdapterLoad]:
        return iter(self._loads.values())

    def idle_s(self, load: AdapterLoad) -> float:
        """Seconds since a resident adapter was last used, or 0 while a sequence uses it."""
        return 0.0 if load.num_users > load.is_pinned else self._clock() - load.used_s

    def prefetch(self, digest: str) -> AdapterLoad:
        """Return the adapter's load. `poll` requests a new one from the stager."""
        load = self._loads.get(digest)
        if load is None:
            load = self._loads[digest] = self._queued[digest] = AdapterLoad(self, digest)
            self._has_new = True
        return load

    def find(self, digest: str) -> AdapterLoad | None:
        return self._loads.get(digest)

    def acquire(self, load: AdapterLoad) -> int:
        """Add a running sequence to a resident adapter's users, and return the adapter's slot."""
        assert load.phase is AdapterPhase.RESIDENT
        if load.num_users == 0:
            self.reclaimer.policy.discard(load)
            self._used[load.slot] = load
        load.num_users += 1
        load.used_s = self._clock()
        return load.slot

    def release(self, slot: int) -> None:
        """Undo one `acquire`, which returned `slot`. An adapter without users becomes evictable."""
        load = self._used[slot]
        load.num_users -= 1
        if load.num_users == 0:
            del self._used[slot]
            self._rest(load)

    @property
    def is_copying(self) -> bool:
        """True if an adapter is being copied. Its pages cannot be evicted until it is resident."""
        return bool(self._copying)

    @property
    def has_slot(self) -> bool:
        """True if a slot is free, or an idle adapter has one."""
        resident = (one for one in self._loads.values() if one.phase is AdapterPhase.RESIDENT)
        return bool(self._free_slots) or any(one.num_users == 0 for one in resident)

    def must_yield_slot(self, load: AdapterLoad, position: int) -> bool:
        """True if this adapter has the fewest users of all unpinned adapters, no slot is free, and a sequence before
        `position` needs a slot.
        """
        if not self._staged or self._free_slots or self.position_of(self._staged[0]) >= position:
            return False
        resident = (one for one in self._loads.values() if one.phase is AdapterPhase.RESIDENT and not one.is_pinned)
        return load is min(resident, key=lambda one: one.num_users, default=None)

    def can_spare(self, num_pages: int, position: int) -> bool:
        """True if a sequence at `position` can get `num_pages` pages and still leave enough for a staged adapter ahead
        of it.
        """
        return self.reclaimer.can_make_room(num_pages + self.num_pages_wanted(position), position)

    def num_pages_lost_by_using(self, load: AdapterLoad | None, position: int) -> int:
        """Number of pages that a sequence at `position` could no longer evict if it used this adapter."""
        if load is None or load.num_users or self.position_of(load) < position:
            return 0
        return load.num_pages

    def poll(self, demand: PoolDemand) -> list[AdapterLoad]:
        """Advance all loads and return the adapters that became resident or failed.

        Adapters are requested and get room in queue order. A staged adapter never evicts an adapter that an earlier
        sequence is waiting for, so the first sequence in the queue always makes progress. A failed load is removed, so
        the next request tries again. Adapters that neither a sequence near the front of the queue nor a call needs are
        not requested, and removed once they are staged.
        """
        self._demand = demand
        settled: list[AdapterLoad] = []
        for load, failure in self._copier.poll():
            del self._copying[load.digest]
            if failure is None:
                self._publish(load)
            else:
                self._fail(load, failure)
            settled.append(load)
        self._request()
        # The stager answers requests for adapters in host memory at once. They do not delay others by a step.
        while answers := self._stager.poll():
            for staged in answers:
                load = self._loading.pop(staged.digest)
                load.stages += staged.stages
                failure = staged.message if isinstance(staged, NotStaged) else self._take(load, staged)
                if failure is not None:
                    self._fail(load, failure)
                    settled.append(load)
            self._request()
        self._place()
        return settled

    def request_new(self) -> None:
        """Request adapters that were first wanted after `poll`, and have been added to its demand."""
        if self._has_new:
            self._request()

    def close(self) -> None:
        """Cancel pending loads, and wait for the current copy."""
        self._stager.close()
        self._copier.close()
        for load in self._loads.values():
            load.release()

    def unload(self, digest: str) -> bool:
        """Remove the adapter and return True. Return False if the adapter is in use or being copied."""
        load = self._loads.get(digest)
        if load is None:
            return True
        if load.phase is AdapterPhase.REQUESTED:
            if self._queued.pop(digest, None) is None:
                del self._loading[digest]
                self._stager.cancel(digest)
            del self._loads[digest]
            return True
        if load.phase is AdapterPhase.STAGED:
            # So far, the load holds only host memory.
            self._staged.remove(load)
            load.release()
            del self._loads[digest]
            return True
        if load.phase is not AdapterPhase.RESIDENT or load.num_users:
            return False
        self.reclaimer.policy.discard(load)
        self.forget(load)
        return True

    def forget_copy(self, digest: str) -> None:
        """Delete the copy in host memory of an adapter that has been unloaded."""
        self._stager.forget(digest)

    def retire(self, digest: str) -> None:
        """Let no new sequence use a resident adapter. Sequences that use it keep it until they end. If others want it,
        another copy is loaded.
        """
        load = self._loads.get(digest)
        if load is None or load.phase is not AdapterPhase.RESIDENT:
            return
        load.is_retired = True
        self._withdraw(load)
        if load.num_users == 0:
            self.reclaimer.policy.discard(load)
            self._give_back(load)

    def in_slot(self, slot: int) -> AdapterLoad:
        """The adapter in a slot that a sequence uses."""
        return self._used[slot]

    def has_retired(self, digest: str) -> bool:
        """True if sequences use a copy of the adapter that no new sequence can use."""
        return any(load.is_retired and load.digest == digest for load in self._used.values())

    def is_waited_for(self, load: AdapterLoad) -> bool:
        return load.digest in self._demand.queue_positions

    def position_of(self, load: AdapterLoad) -> int:
        """Position of the first sequence or call waiting for the adapter, or AFTER_ALL if none is waiting."""
        return self._demand.queue_positions.get(load.digest, AFTER_ALL)

    def num_pages_before(self, position: int) -> int:
        """Number of pages of idle adapters that sequences before `position` are waiting for."""
        return sum(load.num_pages for load, _ in self._idle_and_wanted(before=position))

    def last_after(self, position: int) -> Evictable | None:
        """The idle adapter whose first waiting sequence is last in the queue, or None if no such sequence is after
        `position`.
        """
        last = max(self._idle_and_wanted(), key=lambda one: one[1], default=None)
        return last[0] if last is not None and last[1] > position else None

    def forget(self, load: AdapterLoad) -> None:
        """Evict an adapter that has already been removed from the eviction policy."""
        assert load.num_users == 0
        assert load.phase is AdapterPhase.RESIDENT
        self._withdraw(load)
        self._give_back(load)

    def _withdraw(self, load: AdapterLoad) -> None:
        del self._loads[load.digest]
        self.on_residency(load.digest, False)
        self.changes.note(load.digest, "evicted")
        self.num_evictions += 1

    def _take(self, load: AdapterLoad, staged: StagedAdapter) -> str | None:
        """Queue a staged adapter for a slot and pages. Returns an error message if the adapter needs more pages than
        are unpinned.
        """
        load.staged = staged
        packed = staged.packed
        load.num_bytes = self._last_bytes = packed.payload.nbytes
        load.num_pages = packed.num_pages if self._num_pages_of is None else self._num_pages_of(packed)
        load.vocab_size = packed.layout.rows.vocab_size
        load.num_labels = packed.layout.rows.num_labels
        if self._fits_beside_pins(load):
            load.phase = AdapterPhase.STAGED
            self._staged.append(load)
            return None
        num_pages = self._pages.num_pages
        is_ever = load.num_pages <= num_pages
        room = "the unpinned part of the page pool" if is_ever else "the whole page pool"
        num_free = num_pages - self.num_pinned_pages if is_ever else num_pages
        return f"the adapter takes {load.num_pages} pages, but {room} has only {num_free}"

    def _publish(self, load: AdapterLoad) -> None:
        assert load.staged is not None
        self._tables.write(load.slot, load.pages, load.staged.packed)
        load.release()
        load.phase = AdapterPhase.RESIDENT
        self.num_loads += 1
        self.on_residency(load.digest, True)
        self.changes.note(load.digest, "loaded")
        self._rest(load)

    def _request(self) -> None:
        """Request the first adapters in queue order from the stager, as many as its limits allow.

        Adapters behind them go back to the queue. Staged ones do so at once. Those that are being loaded do so only to
        make room for another, because a small change of the order may bring them back.
        """
        self._has_new = False
        if not self._queued and not self._staged:
            return
        for digest in [one for one in self._queued if one not in self._demand.queue_positions]:
            self.unload(digest)
        kept = self._first_to_load()
        for load in [one for one in self._staged if one.digest not in kept]:
            self._put_back(load)
        if not self._queued:
            return
        behind = [load for load in self._loading.values() if load.digest not in kept]
        for digest in [one for one in kept if one in self._queued]:
            while behind and not self._stager.takes(digest):
                self._put_back(behind.pop())
            if self._stager.takes(digest):
                self._loading[digest] = self._queued.pop(digest)
                self._stager.request(digest)

    def _first_to_load(self) -> dict[str, None]:
        """The adapters in queue order that are not yet being copied, as many as fit in host memory, and at least one.

        An adapter of unknown size counts like the last staged one.
        """
        num_bytes, max_bytes = sum(load.num_bytes for load in self._copying.values()), self._stager.max_bytes
        kept: dict[str, None] = {}
        for digest in self._demand.queue_positions:
            load = self._loads.get(digest)
            # An adapter has a slot from COPYING on.
            if load is None or load.slot >= 0:
                continue
            num_bytes += load.num_bytes or self._last_bytes
            if kept and num_bytes > max_bytes:
                break
            kept[digest] = None
        return kept

    def _put_back(self, load: AdapterLoad) -> None:
        """Return an adapter that is being loaded or staged to the queue, or remove it if it is no longer wanted."""
        self.unload(load.digest)
        if self.is_waited_for(load):
            load.phase, load.stages = AdapterPhase.REQUESTED, []
            self._loads[load.digest] = self._queued[load.digest] = load

    def _place(self) -> None:
        """Place staged adapters in queue order. The first adapter that does not fit blocks the rest."""
        self._staged.sort(key=self.position_of)
        while self._staged and self._find_room(self._staged[0]):
            load = self._staged.pop(0)
            load.slot = self._free_slots.pop()
            load.pages = self._pages.alloc(load.num_pages, PageOwner.ADAPTER)
            load.phase = AdapterPhase.COPYING
            self._copying[load.digest] = load
            self._copier.copy(load)

    def _find_room(self, load: AdapterLoad) -> bool:
        """Free a slot and pages for a staged adapter, if its queue position allows it."""
        position, num_pages = self.position_of(load), load.num_pages
        if position > self._demand.short_position:
            return False
        if position >= self._demand.num_free_sequence_slots:
            # For an adapter loaded ahead of its turn, evict no adapter that a sequence is waiting for, and leave
            # running sequences room to grow.
            position = AFTER_ALL
            if not self.reclaimer.can_make_room(num_pages + self._demand.num_growing, position):
                return False
        has_slot = bool(self._free_slots) or self.reclaimer.evict_one(position, slots_only=True)
        return has_slot and self.reclaimer.make_room(num_pages, position)

    def _idle_and_wanted(self, before: int = AFTER_ALL) -> Iterator[tuple[AdapterLoad, int]]:
        """The idle adapters that sequences before `before` are waiting for, each with the position of the first such
        sequence, in ascending order.
        """
        for digest, position in self._demand.queue_positions.items():
            if position >= before:
                return
            load = self._loads.get(digest)
            if load is not None and load.num_users == 0 and load.phase is AdapterPhase.RESIDENT:
                yield load, position

    def _rest(self, load: AdapterLoad) -> None:
        """Free an adapter without users if it is retired. Otherwise, make it evictable."""
        load.used_s = self._clock()
        if load.is_retired:
            self._give_back(load)
        else:
            self.reclaimer.policy.add(load)

    def _fail(self, load: AdapterLoad, message: str) -> None:
        load.failure = message
        load.release()
        del self._loads[load.digest]
        self._give_back(load)

    def _give_back(self, load: AdapterLoad) -> None:
        self._pages.free(load.pages)
        load.pages = []
        if load.slot >= 0:
            self._free_slots.append(load.slot)
            load.slot = -1

    def pin(self, load: AdapterLoad) -> None:
        """Keep a resident adapter until `unpin`."""
        assert not load.is_pinned
        self.acquire(load)
        load.is_pinned = True
        self.num_pinned_pages += load.num_pages

    def unpin(self, digest: str) -> None:
        load = self._loads[digest]
        assert load.is_pinned
        load.is_pinned = False
        self.num_pinned_pages -= load.num_pages
        self.release(load.slot)

    def num_pages_beside(self, digest: str | None, num_pages: int) -> int:
        """Number of pages unavailable to a sequence: the pages of pinned adapters, plus the `num_pages` pages of its
        own adapter unless that adapter is pinned.
        """
        load = None if digest is None else self._loads.get(digest)
        if load is not None and load.is_pinned:
            return self.num_pinned_pages
        return self.num_pinned_pages + num_pages

    @property
    def can_place_all(self) -> bool:
        """True if every staged adapter still fits next to the pinned adapters."""
        return all(self._fits_beside_pins(load) for load in self._staged)

    def _fits_beside_pins(self, load: AdapterLoad) -> bool:
        return load.num_pages <= self._pages.num_pages - self.num_pinned_pages
