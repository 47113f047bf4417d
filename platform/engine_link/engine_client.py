"""The one interface between a gateway and an engine; the bridge from asyncio to the synchronous engine loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from loramux.engine.messages import AdapterState, Add, EngineReady, Finished, SequenceOutput, Stats


class EngineUnavailable(Exception):
    """The engine is not running; try again once it has restarted."""


class EngineClient(Protocol):
    """How a gateway runs sequences. Implementations: in-process (tests) and a local engine process.

    `submit` returns at once; iterating yields SequenceOutput records and, as the very last item, one Finished. An
    engine that dies ends every stream with Finished(reason="error", code="engine_unavailable"). `abort` never blocks
    and its stream still ends with a Finished. A stream that is no longer read keeps nothing else waiting.
    """

    @property
    def info(self) -> EngineReady | None:
        """Facts of the running engine, or None while there is none."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_live(self) -> bool:
        """Whether the engine made a step lately or needed none; false while a hung one cannot be replaced."""

    @property
    def trouble(self) -> str | None:
        """Why it is not ready, for operators only; None where it is, or where nothing is known."""

    def submit(self, add: Add) -> AsyncIterator[SequenceOutput | Finished]:
        """Run one sequence; raises EngineUnavailable at once while the engine is not ready."""

    def abort(self, sequence_id: str, keep: int | None = None) -> None: ...

    def extend(self, sequence_id: str, max_tokens: int) -> None:
        """Raise a sequence's limit; one that has ended is left as it was. Never blocks."""

    async def load(self, digest: str, timeout_s: float) -> AdapterState: ...

    async def unload(self, digest: str, timeout_s: float) -> AdapterState: ...

    async def pin(self, digest: str, is_pinned: bool, timeout_s: float) -> AdapterState:
        """Load an adapter and keep it resident, or let it go again."""
        ...

    async def stats(self, timeout_s: float, with_tiers: bool = False) -> Stats:
        """How the engine stands; `with_tiers` also lists what its host and disk tier hold, which takes longer."""
        ...

    async def close(self) -> None: ...
