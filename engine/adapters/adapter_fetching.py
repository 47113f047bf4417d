"""Bringing packed adapters into host memory beside the steps, out of a store in this process."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from loramux.adapter_store.cancellation import Cancellation
from loramux.adapter_store.errors import StoreError
from loramux.adapter_store.formats.packing import PackedAdapter
from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.adapter_store.tiers.tier_figures import TierFigures


class PackedLease(Protocol):
    """A hold on a packed adapter in host memory."""

    @property
    def packed(self) -> PackedAdapter: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a fetch: a hold, which is the receiver's from now on, or else why there is none."""

    digest: str
    lease: PackedLease | None
    message: str = ""


class Fetcher(Protocol):
    """Called by the engine's thread only. Each digest is fetched once at a time."""

    def fetch(self, digest: str) -> None:
        """Begin to bring an adapter into host memory; an Outcome tells what came of it."""

    def cancel(self, digest: str) -> None:
        """Nobody wants it any more, and no Outcome will come."""

    def outcomes(self) -> list[Outcome]:
        """What came since the last call; the engine looks when it is woken, and before each step."""

    def contents(self) -> tuple[TierContents, ...]:
        """What the tiers hold, as of the last `look` where that takes one."""

    def look(self, then: Callable[[], None]) -> None:
        """Have `attend` call `then` once `contents` are those of now, or cannot be."""

    def protect(self, group: str, digests: Collection[str], floor_bytes: int) -> None:
        """Keep up to `floor_bytes` of these adapters in host memory; see `HostTier.protect`."""

    def fileno(self) -> int:
        """Of what an idle engine should poll, and `attend` to once it is readable; -1 where there is nothing now.

        While somebody looks, it attends between any two steps.
        """

    def attend(self) -> None:
        """Take in what has come there."""

    def close(self) -> None:
        """Give up what is on its way."""


class AdapterSource(Protocol):
    """Where packed adapters come from; `lease` may take long and is called on loader threads only.

    Once `cancel` is given it may raise a StoreError at once.
    """

    def lease(self, digest: str, *, cancel: Cancellation) -> PackedLease: ...


@dataclass(slots=True, eq=False)
class _Fetch:
    digest: str
    cancellation: Cancellation = field(default_factory=Cancellation)


class LeasingFetcher:
    """Leases adapters from a source on threads. `wake` is called from them, so that an idle engine looks."""

    def __init__(self, source: AdapterSource, num_threads: int, wake: Callable[[], None], figures: TierFigures) -> None:
        self._source = source
        self._wake = wake
        self._figures = figures
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-fetcher")
        self._through: queue.SimpleQueue[tuple[_Fetch, Outcome]] = queue.SimpleQueue()
        # Touched by the engine's thread only.
        self._fetches: dict[str, _Fetch] = {}

    def fetch(self, digest: str) -> None:
        fetch = self._fetches[digest] = _Fetch(digest)
        self._threads.submit(self._lease, fetch)

    def cancel(self, digest: str) -> None:
        # What it may already have reported is passed over, and its hold given back, where outcomes are collected.
        self._fetches.pop(digest).cancellation.cancel()

    def outcomes(self) -> list[Outcome]:
        found: list[Outcome] = []
        while True:
            try:
                fetch, outcome = self._through.get_nowait()
            except queue.Empty:
                return found
            if self._fetches.get(fetch.digest) is fetch:
                del self._fetches[fetch.digest]
                found.append(outcome)
            elif outcome.lease is not None:
                outcome.lease.release()

    def contents(self) -> tuple[TierContents, ...]:
        return ()

    def look(self, then: Callable[[], None]) -> None:
        then()

    def protect(self, group: str, digests: Collection[str], floor_bytes: int) -> None:
        """A source keeps what it wants."""

    def fileno(self) -> int:
        return -1

    def attend(self) -> None:
        """Threads wake the engine by themselves."""

    def close(self) -> None:
        fetches, self._fetches = self._fetches, {}
        for fetch in fetches.values():
            fetch.cancellation.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.outcomes()

    def _lease(self, fetch: _Fetch) -> None:
        if fetch.cancellation.is_cancelled:
            return
        try:
            with self._figures.of_load(fetch.digest):
                outcome = Outcome(fetch.digest, self._source.lease(fetch.digest, cancel=fetch.cancellation))
        except StoreError as error:
            outcome = Outcome(fetch.digest, None, str(error))
        except Exception as error:
            # Whatever else goes wrong must still reach the requests that wait for this adapter.
            outcome = Outcome(fetch.digest, None, f"loading failed: {type(error).__name__}")
        self._through.put((fetch, outcome))
        self._wake()
