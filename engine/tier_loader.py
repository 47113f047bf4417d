"""Loads adapters from the store's tiers into pages, on threads of its own."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from loramux.adapter_store.errors import StoreError
from loramux.adapter_store.packing import PackedAdapter
from loramux.engine.accelerator import Accelerator, Fence
from loramux.engine.adapter_loading import Copied, Fetched, LoadEvent, LoadFailed
from loramux.engine.slot_tables import SlotTables
from loramux.kernels.tables import PoolViews


class PackedLease(Protocol):
    """A hold on a packed adapter in host memory."""

    @property
    def packed(self) -> PackedAdapter: ...

    def release(self) -> None: ...


class AdapterSource(Protocol):
    """Where packed adapters come from; `lease` may take long and is called on loader threads only."""

    def lease(self, digest: str) -> PackedLease: ...


class TierLoader:
    """The adapter pool's loader: fetches and copies on threads, publishes tables on the caller's.

    Copies run beside the steps, but after those submitted before they were asked for; tables are written once the
    pages are filled. `wake` is called from a loader thread after each event, so that an idle engine looks.
    """

    def __init__(
        self,
        source: AdapterSource,
        views: PoolViews,
        tables: SlotTables,
        accelerator: Accelerator,
        num_threads: int,
        wake: Callable[[], None],
    ) -> None:
        self._source = source
        self._views = views
        self._tables = tables
        self._accelerator = accelerator
        self._wake = wake
        self._fetchers = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-fetcher")
        # An adapter that is being copied holds pages and a slot: it never waits behind a slow store.
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="adapter-copier")
        self._events: queue.SimpleQueue[LoadEvent] = queue.SimpleQueue()
        self._leases: dict[str, PackedLease] = {}

    def fetch(self, digest: str) -> None:
        self._fetchers.submit(self._fetch, digest)

    def copy(self, digest: str, pages: list[int]) -> None:
        # Steps submitted so far may still read these pages for their former owners.
        self._copier.submit(self._copy, digest, pages, self._accelerator.fence())

    def publish(self, digest: str, slot: int, pages: list[int]) -> None:
        self._tables.write(slot, pages, self._leases[digest].packed)
        self.drop(digest)

    def drop(self, digest: str) -> None:
        lease = self._leases.pop(digest, None)
        if lease is not None:
            lease.release()

    def events(self) -> list[LoadEvent]:
        found: list[LoadEvent] = []
        while True:
            try:
                found.append(self._events.get_nowait())
            except queue.Empty:
                return found

    def close(self) -> None:
        """Wait for loads under way; later ones are dropped."""
        self._fetchers.shutdown(wait=True, cancel_futures=True)
        self._copier.shutdown(wait=True, cancel_futures=True)
        for digest in list(self._leases):
            self.drop(digest)

    def _fetch(self, digest: str) -> None:
        try:
            lease = self._source.lease(digest)
        except StoreError as error:
            self._report(LoadFailed(digest, str(error)))
            return
        except Exception as error:
            # Whatever else goes wrong must still reach the requests that wait for this adapter.
            self._report(LoadFailed(digest, f"loading failed: {type(error).__name__}"))
            return
        self._leases[digest] = lease
        self._report(Fetched(digest, lease.packed.layout))

    def _copy(self, digest: str, pages: list[int], after: Fence) -> None:
        try:
            payload = torch.from_numpy(self._leases[digest].packed.payload)
            pairs = ((self._views.raw[page], payload[row]) for row, page in enumerate(pages))
            self._accelerator.upload(pairs, after)
        except Exception as error:
            self.drop(digest)
            self._report(LoadFailed(digest, f"copying failed: {type(error).__name__}"))
            return
        self._report(Copied(digest))

    def _report(self, event: LoadEvent) -> None:
        self._events.put(event)
        self._wake()
