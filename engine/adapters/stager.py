"""The interface for loading adapters into host memory, and an in-memory implementation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Protocol

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers.staged_adapter import NotStaged, StagedAdapter
from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.adapter_store.tiers.tier_figures import LoadCounts, TierFigures


class Stager(Protocol):
    """Loads adapters into host memory. Only the engine's thread calls it, and it never blocks. See `StagingClient`."""

    max_bytes: int
    """Maximum number of bytes of the adapters that are staged or requested at a time, unless it is only one adapter."""
    figures: TierFigures
    """Tier statistics of this process."""

    def takes(self, digest: str) -> bool:
        """False if the adapter should be requested later, because enough others are being loaded. Requests cannot be
        put in another order.
        """

    def request(self, digest: str) -> None:
        """Start loading an adapter into host memory. `poll` returns the result. Each digest may have at most one
        pending request.
        """

    def cancel(self, digest: str) -> None:
        """Cancel a request. `poll` does not return its result."""

    def forget(self, digest: str) -> None:
        """Delete the adapter's copies in host memory, unless it is in use, and on this machine's disk."""

    def poll(self) -> list[StagedAdapter | NotStaged]:
        """The loads that finished or failed since the last call. The caller must release each `StagedAdapter`."""

    def fileno(self) -> int:
        """File descriptor for an idle engine to poll, or -1. When it is readable, call `attend`."""

    def attend(self) -> None:
        """Receive pending messages, and run the callbacks of `look` calls that are complete. Called between steps."""

    def look(self, then: Callable[[], None]) -> None:
        """Refresh `contents`. `attend` calls `then` once the refresh has finished or failed."""

    def contents(self) -> tuple[TierContents, ...]:
        """The current contents of the tiers."""

    def counts(self) -> LoadCounts:
        """Adapter loads since the engine started, summed over this process and all its staging processes."""

    def close(self) -> None:
        """Cancel all requests."""


class MemoryStager:
    """Stages adapters from this process's memory, without limits. `adapters` is keyed by digest."""

    max_bytes = sys.maxsize

    def __init__(self, adapters: Mapping[str, PackedAdapter]) -> None:
        self._adapters = adapters
        self.figures = TierFigures()
        self._requested: list[str] = []

    def takes(self, digest: str) -> bool:
        return True

    def request(self, digest: str) -> None:
        assert digest not in self._requested
        self._requested.append(digest)

    def cancel(self, digest: str) -> None:
        self._requested.remove(digest)

    def poll(self) -> list[StagedAdapter | NotStaged]:
        requested, self._requested = self._requested, []
        return [self._staged(digest) for digest in requested]

    def forget(self, digest: str) -> None:
        """There is no copy to delete, because `adapters` belongs to the caller."""

    def fileno(self) -> int:
        return -1

    def attend(self) -> None:
        """Does nothing, because there is no other process."""

    def look(self, then: Callable[[], None]) -> None:
        then()

    def contents(self) -> tuple[TierContents, ...]:
        return ()

    def counts(self) -> LoadCounts:
        return self.figures.snapshot()

    def close(self) -> None:
        self._requested.clear()

    def _staged(self, digest: str) -> StagedAdapter | NotStaged:
        packed = self._adapters.get(digest)
        if packed is None:
            return NotStaged(digest, "the store has no such adapter")
        return StagedAdapter(packed, give_back=lambda _digest: None)
