"""Load, unload and pin calls from gateways, each kept until it is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loramux.engine.adapters.adapter_load import AdapterLoad, AdapterPhase
from loramux.engine.adapters.adapter_pool import AdapterPool
from loramux.engine.pages.eviction import AFTER_ALL
from loramux.engine.pages.prefix_cache import PrefixCache
from loramux.engine.protocol.messages import AdapterState, Load, Pin, Unload
from loramux.engine.sequences.live_sequences import LiveSequences

FIRST_CALL_POSITION = AFTER_ALL // 2
"""First queue position given to adapters that only calls or lost pins need. Adapters that sequences need have lower
positions.
"""


@dataclass(frozen=True, slots=True)
class PinLimits:
    """Limits on the slots and pages that pinned adapters may take."""

    num_adapters: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A load or pin call that has not been answered yet."""

    owner: bytes
    call: Load | Pin


@dataclass(frozen=True, slots=True)
class PendingUnload:
    """An unload call that has not been answered yet."""

    owner: bytes
    unload: Unload


class AdapterCalls:
    """Answers load, unload and pin calls, and keeps track of waiting calls and granted pins.

    An unload waits until no sequence needs the adapter. A later load or pin supersedes it, because the adapter is back
    in service. A purge is not superseded. While it waits, new sequences are refused, and later loads and pins wait, so
    every purge completes once the sequences before it have ended.

    `post` sends an answer. `leaves_room` returns whether all accepted requests still fit next to the pinned adapters.
    """

    def __init__(
        self,
        adapters: AdapterPool,
        prefixes: PrefixCache,
        live: LiveSequences,
        limits: PinLimits,
        post: Callable[[bytes, AdapterState], None],
        leaves_room: Callable[[], bool],
    ) -> None:
        self._adapters = adapters
        self._prefixes = prefixes
        self._live = live
        self._limits = limits
        self._post = post
        self._leaves_room = leaves_room
        self._waiting: list[WaitingCall] = []
        self._unloads: dict[str, list[PendingUnload]] = {}
        # Page count of each pinned adapter.
        self._pins: dict[str, int] = {}
        # Adapters that were evicted despite their pins, and must be loaded and pinned again.
        self._lost_pins: dict[str, None] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._unloads or self._lost_pins)

    def is_purging(self, digest: str) -> bool:
        """True if an unload of the adapter with `is_purge` is pending."""
        return any(pending.unload.is_purge for pending in self._unloads.get(digest, ()))

    def load(self, owner: bytes, load: Load) -> None:
        self._wait(owner, load)

    def pin(self, owner: bytes, pin: Pin) -> None:
        if not pin.is_pinned:
            self._end_pin(pin.digest)
            self._supersede(pin.digest, (Pin,))
            adapter = self._adapters.find(pin.digest)
            is_resident = adapter is not None and adapter.phase is AdapterPhase.RESIDENT
            self._answer(owner, pin, "resident" if is_resident else "absent", adapter if is_resident else None)
            return
        asked = {one.call.digest for one in self._waiting if isinstance(one.call, Pin)}
        if len({*self._pins, *asked, pin.digest}) > self._limits.num_adapters:
            self._fail(owner, pin, "pin_limit", f"at most {self._limits.num_adapters} adapters may be pinned")
            return
        self._wait(owner, pin)

    def unload(self, owner: bytes, unload: Unload) -> None:
        self._end_pin(unload.digest)
        self._supersede(unload.digest, (Load, Pin))
        self._unloads.setdefault(unload.digest, []).append(PendingUnload(owner, unload))

    def drop(self, owner: bytes) -> None:
        """Drop the unanswered calls of a gateway that has disconnected, but keep its granted pins."""
        self._waiting = [one for one in self._waiting if one.owner != owner]
        for digest, pending in list(self._unloads.items()):
            kept = [one for one in pending if one.owner != owner]
            if kept:
                self._unloads[digest] = kept
            else:
                del self._unloads[digest]

    def add_wanted(self, wanted: dict[str, int]) -> None:
        """Add to `wanted` the adapters of lost pins and of waiting calls, at positions after those of all sequences."""
        digests = [*self._lost_pins, *[one.call.digest for one in self._waiting]]
        for place, digest in enumerate(digests):
            if not self.is_purging(digest):
                wanted.setdefault(digest, FIRST_CALL_POSITION + place)

    def retire(self, digest: str) -> None:
        """Let no new sequence use this copy of an adapter. A pinned adapter is loaded and pinned again."""
        adapter = self._adapters.find(digest)
        if adapter is not None and adapter.is_pinned:
            self._adapters.unpin(digest)
            self._lost_pins[digest] = None
        self._adapters.retire(digest)

    def settle(self, settled: list[AdapterLoad]) -> None:
        """Answer all calls that can be answered now, and restore lost pins. `settled` lists adapters that just became
        resident or failed.
        """
        for adapter in settled:
            self._settle(adapter)
        for digest in list(self._unloads):
            if not self._live.wants(digest) and self._adapters.unload(digest):
                self._prefixes.purge(digest)
                answered = self._unloads.pop(digest)
                if any(pending.unload.is_purge for pending in answered):
                    self._adapters.forget_copy(digest)
                for pending in answered:
                    self._answer(pending.owner, pending.unload, "absent")
        for digest in list(self._lost_pins):
            adapter = self._adapters.prefetch(digest)
            if adapter.phase is AdapterPhase.RESIDENT and self._try_pin(adapter):
                del self._lost_pins[digest]
        self._waiting = [one for one in self._waiting if not self._is_done(one)]

    def _settle(self, adapter: AdapterLoad) -> None:
        """Answer Load calls for an adapter that has just become resident, or all calls for an adapter that failed to
        load.

        A Load succeeds even if the adapter has been evicted in the meantime.
        """
        if self.is_purging(adapter.digest):
            return
        if adapter.failure is not None and adapter.digest in self._lost_pins:
            self._end_pin(adapter.digest)
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if one.call.digest == adapter.digest and adapter.failure is not None:
                self._fail(one.owner, one.call, "adapter_unavailable", adapter.failure)
            elif one.call.digest == adapter.digest and isinstance(one.call, Load):
                self._answer(one.owner, one.call, "resident", adapter)
            else:
                self._waiting.append(one)

    def _is_done(self, waiting: WaitingCall) -> bool:
        """Answer a waiting call if possible, and return whether it was answered."""
        owner, call = waiting.owner, waiting.call
        if self.is_purging(call.digest):
            return False
        # Request the adapter again, because it may have been loaded and evicted since the last check.
        adapter = self._adapters.prefetch(call.digest)
        is_new = isinstance(call, Pin) and call.digest not in self._pins
        if is_new and sum(self._pins.values()) + adapter.num_pages > self._limits.num_pages:
            limit = f"at most {self._limits.num_pages} of the pool's pages may be pinned"
            self._fail(owner, call, "pin_limit", f"{limit}, and this adapter's {adapter.num_pages} would exceed that")
            return True
        if adapter.phase is not AdapterPhase.RESIDENT:
            return False
        if is_new and not self._try_pin(adapter):
            self._fail(
                owner, call, "pin_limit", "this pin would leave too few pages for a request that was already accepted"
            )
            return True
        self._answer(owner, call, "resident", adapter)
        return True

    def _wait(self, owner: bytes, call: Load | Pin) -> None:
        if not self.is_purging(call.digest):
            for pending in self._unloads.pop(call.digest, ()):
                self._fail_superseded(pending.owner, pending.unload)
            self._adapters.prefetch(call.digest)
        self._waiting.append(WaitingCall(owner, call))

    def _try_pin(self, adapter: AdapterLoad) -> bool:
        self._adapters.pin(adapter)
        if self._leaves_room():
            self._pins[adapter.digest] = adapter.num_pages
            return True
        self._adapters.unpin(adapter.digest)
        return False

    def _end_pin(self, digest: str) -> None:
        self._pins.pop(digest, None)
        self._lost_pins.pop(digest, None)
        adapter = self._adapters.find(digest)
        if adapter is not None and adapter.is_pinned:
            self._adapters.unpin(digest)

    def _supersede(self, digest: str, kinds: tuple[type[Load] | type[Pin], ...]) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if one.call.digest == digest and isinstance(one.call, kinds):
                self._fail_superseded(one.owner, one.call)
            else:
                self._waiting.append(one)

    def _fail_superseded(self, owner: bytes, call: Load | Unload | Pin) -> None:
        self._fail(owner, call, "superseded", "a later call requested the opposite")

    def _answer(self, owner: bytes, call: Load | Unload | Pin, state: str, adapter: AdapterLoad | None = None) -> None:
        num_pages = 0 if adapter is None else adapter.num_pages
        self._post(owner, AdapterState(call_id=call.call_id, digest=call.digest, state=state, num_pages=num_pages))

    def _fail(self, owner: bytes, call: Load | Unload | Pin, code: str, message: str) -> None:
        answer = AdapterState(call_id=call.call_id, digest=call.digest, state="failed", code=code, message=message)
        self._post(owner, answer)
