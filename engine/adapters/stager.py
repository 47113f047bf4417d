"""What brings adapters into host memory, and one that has them there from the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from loramux.adapter_store.formats.packing import PackedAdapter
from loramux.adapter_store.tiers.staged_adapter import NotStaged, StagedAdapter
from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.adapter_store.tiers.tier_figures import LoadCounts, TierFigures


class Stager(Protocol):
    """Called by the engine's thread only, and never waits: see `StagingClient`."""

    figures: TierFigures
    """What is counted in this process."""

    def request(self, digest: str) -> None:
        """Begin to bring an adapter into host memory; `poll` tells what came of it. Once at a time for each digest."""

    def cancel(self, digest: str) -> None:
        """Nobody wants it any more, and `poll` says nothing of it."""

    def poll(self) -> list[StagedAdapter | NotStaged]:
        """What was staged or failed since the last call; each hold is the caller's from now on."""

    def fileno(self) -> int:
        """Of what an idle engine should poll, and `attend` to once it is readable; -1 where there is nothing now."""

    def attend(self) -> None:
        """Take in what has come there, and call back who looked; while somebody looks, to be called between steps."""

    def look(self, then: Callable[[], None]) -> None:
        """Have `attend` call `then` once `contents` are those of now, or cannot be."""

    def contents(self) -> tuple[TierContents, ...]:
        """What the tiers hold."""

    def counts(self) -> LoadCounts:
        """How adapters came since the engine started, in whichever process that was counted."""

    def close(self) -> None:
        """Give up what was requested."""


class MemoryStager:
    """Stages `adapters`, which lie in this process, by digest: for tests and benchmarks.

    What is requested while it `is_holding` is staged after `let_go`.
    """

    def __init__(self, adapters: Mapping[str, PackedAdapter]) -> None:
        self._adapters = adapters
        self.figures = TierFigures()
        self.is_holding = False
        self.num_requests = 0
        self.num_held = 0
        """Adapters that were staged and not released."""
        self._requested: list[str] = []
        self._withheld: list[str] = []

    def request(self, digest: str) -> None:
        assert digest not in self._requested
        assert digest not in self._withheld
        self.num_requests += 1
        (self._withheld if self.is_holding else self._requested).append(digest)

    def cancel(self, digest: str) -> None:
        (self._withheld if digest in self._withheld else self._requested).remove(digest)

    def poll(self) -> list[StagedAdapter | NotStaged]:
        requested, self._requested = self._requested, []
        return [self._staged(digest) for digest in requested]

    def let_go(self) -> None:
        self._requested += self._withheld
        self._withheld.clear()
        self.is_holding = False

    def fileno(self) -> int:
        return -1

    def attend(self) -> None:
        """Nothing comes from anywhere else."""

    def look(self, then: Callable[[], None]) -> None:
        then()

    def contents(self) -> tuple[TierContents, ...]:
        return ()

    def counts(self) -> LoadCounts:
        return self.figures.snapshot()

    def close(self) -> None:
        self._requested.clear()
        self._withheld.clear()

    def _staged(self, digest: str) -> StagedAdapter | NotStaged:
        packed = self._adapters.get(digest)
        if packed is None:
            return NotStaged(digest, "the store has no such adapter")
        self.num_held += 1
        return StagedAdapter(packed, self._release)

    def _release(self, _digest: str) -> None:
        self.num_held -= 1
