"""Takes adapters from host memory into pages, on a thread of its own but for small copies."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from loramux.adapter_store.tiers.tier_figures import TierFigures
from loramux.engine.adapters.adapter_fetching import Fetcher, Outcome, PackedLease
from loramux.engine.adapters.adapter_loading import Copied, Fetched, LoadEvent, LoadFailed
from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.device.accelerator import Accelerator, Fence
from loramux.engine.device.device_faults import reason_of
from loramux.kernels.tables import PoolViews

QUICK_COPY_BYTES = 512 << 10
"""What the thread of the steps copies itself between two steps where the pool is in host memory: that takes a tenth of
a millisecond, as long as waking another thread and waiting for the interpreter's lock that it takes."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """One adapter on its way into pages, from `fetch` to `publish`, `drop` or `cancel`."""

    digest: str
    lease: PackedLease | None = None

    def release(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()


class TierLoader:
    """The adapter pool's loader: has a fetcher fetch, copies on a thread, publishes tables on the caller's.

    Copies, but for a few small ones within host memory, run beside the steps, and all of them after those submitted
    before they were asked for; tables are written once the pages are filled. `wake` is called after each event, mostly
    from a loader thread, so that an idle engine looks.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        views: PoolViews,
        tables: SlotTables,
        accelerator: Accelerator,
        wake: Callable[[], None],
        figures: TierFigures | None = None,
    ) -> None:
        self._fetcher = fetcher
        self._views = views
        self._tables = tables
        self._accelerator = accelerator
        self._wake = wake
        self._figures = figures or TierFigures()
        # An adapter that is being copied holds pages and a slot: it never waits behind a slow store.
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="adapter-copier")
        self._copied: queue.SimpleQueue[tuple[_Fetch, LoadEvent]] = queue.SimpleQueue()
        # Touched by the caller's thread only.
        self._fetches: dict[str, _Fetch] = {}
        self._quick_bytes_left = QUICK_COPY_BYTES

    def fetch(self, digest: str) -> None:
        self._fetches[digest] = _Fetch(digest)
        if self._figures.timelines is not None:
            self._figures.timelines.begin(digest)
        self._fetcher.fetch(digest)

    def cancel(self, digest: str) -> None:
        del self._fetches[digest]
        self._fetcher.cancel(digest)

    def copy(self, digest: str, pages: list[int]) -> None:
        fetch = self._fetches[digest]
        assert fetch.lease is not None
        # Steps submitted so far may still read these pages for their former owners.
        after = self._accelerator.fence()
        num_bytes = fetch.lease.packed.payload.nbytes
        if self._accelerator.device.type == "cpu" and num_bytes <= self._quick_bytes_left:
            self._quick_bytes_left -= num_bytes
            self._copy(fetch, pages, after)
        else:
            self._copier.submit(self._copy, fetch, pages, after)

    def publish(self, digest: str, slot: int, pages: list[int]) -> None:
        lease = self._fetches[digest].lease
        assert lease is not None
        self._tables.write(slot, pages, lease.packed)
        self.drop(digest)

    def drop(self, digest: str) -> None:
        fetch = self._fetches.pop(digest, None)
        if fetch is not None:
            fetch.release()

    def events(self) -> list[LoadEvent]:
        self._quick_bytes_left = QUICK_COPY_BYTES
        found: list[LoadEvent] = [self._fetched(outcome) for outcome in self._fetcher.outcomes()]
        while True:
            try:
                fetch, event = self._copied.get_nowait()
            except queue.Empty:
                return found
            if self._fetches.get(fetch.digest) is not fetch:
                continue
            if isinstance(event, LoadFailed):
                self.drop(fetch.digest)
            found.append(event)

    def close(self) -> None:
        """Give up what is being fetched and wait for copies under way; later ones are dropped."""
        self._fetcher.close()
        self._copier.shutdown(wait=True, cancel_futures=True)
        for digest in list(self._fetches):
            self.drop(digest)

    def _fetched(self, outcome: Outcome) -> LoadEvent:
        if outcome.lease is None:
            del self._fetches[outcome.digest]
            return LoadFailed(outcome.digest, outcome.message)
        self._fetches[outcome.digest].lease = outcome.lease
        return Fetched(outcome.digest, outcome.lease.packed.layout)

    def _copy(self, fetch: _Fetch, pages: list[int], after: Fence) -> None:
        assert fetch.lease is not None
        try:
            packed = fetch.lease.packed
            with self._figures.of_load(fetch.digest), self._figures.timed("pool", "copy", packed.payload.nbytes):
                self._accelerator.upload(self._views.raw, pages, torch.from_numpy(packed.payload), after)
        except Exception as error:
            fetch.release()
            print(f"copying adapter {fetch.digest} into the page pool failed: {reason_of(error)}", file=sys.stderr)
            self._report(fetch, LoadFailed(fetch.digest, f"copying failed: {type(error).__name__}"))
            return
        self._report(fetch, Copied(fetch.digest))

    def _report(self, fetch: _Fetch, event: LoadEvent) -> None:
        self._copied.put((fetch, event))
        self._wake()
