from __future__ import annotations

import sys
from collections.abc import Mapping

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers.staged_adapter import NotStaged, StagedAdapter
from loramux.engine.adapters.stager import MemoryStager


class WatchedStager(MemoryStager):
    """Counts what is asked of it. Adapters requested while `is_holding` is set are staged after `let_go`.

    Takes at most `max_requests` requests at a time.
    """

    max_requests = sys.maxsize

    def __init__(self, adapters: Mapping[str, PackedAdapter]) -> None:
        self.adapters = dict(adapters)
        super().__init__(self.adapters)
        self.is_holding = False
        self.num_requests = 0
        self.forgotten: list[str] = []
        self.num_held = 0
        """Number of adapters that are staged and not yet released."""
        self._withheld: list[str] = []

    def takes(self, digest: str) -> bool:
        return len(self._requested) + len(self._withheld) < self.max_requests

    def request(self, digest: str) -> None:
        assert digest not in self._requested
        assert digest not in self._withheld
        self.num_requests += 1
        if self.is_holding:
            self._withheld.append(digest)
        else:
            super().request(digest)

    def cancel(self, digest: str) -> None:
        if digest in self._withheld:
            self._withheld.remove(digest)
        else:
            super().cancel(digest)

    def forget(self, digest: str) -> None:
        self.forgotten.append(digest)

    def let_go(self) -> None:
        self.is_holding = False
        for digest in self._withheld:
            super().request(digest)
        self._withheld.clear()

    def close(self) -> None:
        super().close()
        self._withheld.clear()

    def _staged(self, digest: str) -> StagedAdapter | NotStaged:
        staged = super()._staged(digest)
        if isinstance(staged, NotStaged):
            return staged
        self.num_held += 1
        return StagedAdapter(staged.packed, self._release)

    def _release(self, _digest: str) -> None:
        self.num_held -= 1
