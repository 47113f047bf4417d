"""Results of loading an adapter into host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers.tier_figures import PassedStage


class StagedAdapter:
    """A lease on an adapter in host memory. The holder must release it."""

    __slots__ = ("_give_back", "packed", "stages")

    def __init__(
        self, packed: PackedAdapter, give_back: Callable[[str], None], stages: Sequence[PassedStage] = ()
    ) -> None:
        self.packed = packed
        self.stages = stages
        self._give_back: Callable[[str], None] | None = give_back

    @property
    def digest(self) -> str:
        return self.packed.digest

    def release(self) -> None:
        """Release the lease. A second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self.digest)


@dataclass(frozen=True, slots=True)
class NotStaged:
    """An adapter that could not be loaded, and why."""

    digest: str
    message: str
    stages: Sequence[PassedStage] = ()
