"""The interface between an asyncio gateway and the synchronous engine loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from loramux.engine.protocol.messages import Add, AnswerT, EngineCall, EngineReady, Finished, SequenceOutput
from loramux.platform.base_draw import BaseOrder


class EngineUnavailable(Exception):
    """The engine is not running. Try again once it has restarted."""


class EngineClient(Protocol):
    """The interface through which a gateway runs sequences.

    `submit` immediately returns an iterator, which yields SequenceOutput records and then one Finished record. If the
    engine dies, every stream ends with Finished(reason="error", code="engine_unavailable"). `abort` never blocks, and
    the aborted stream still ends with a Finished record. An unread stream blocks nothing else.

    Implementations: `LocalEngine` and `JoinedEngine` for an engine on this machine, `PeerEngine` for the engine of
    another server, `ReplicaEngine` for the engine of a replica in a cluster, `RoutedEngine` for several engines,
    `EngineGroup` for those of their calls that concern no sequence, and `ScriptedEngine` for tests.
    """

    @property
    def info(self) -> EngineReady | None:
        """The running engine's startup announcement. None while no engine is running."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_own_ready(self) -> bool:
        """True if an engine of this server is ready. `is_ready` can also mean another server's engine."""

    @property
    def is_live(self) -> bool:
        """False from the time that the engine hangs until its process is gone, otherwise True."""

    @property
    def trouble(self) -> str | None:
        """Why the engine is not ready, for operators only. None if it is ready or the reason is unknown."""

    def submit(self, add: Add, order: BaseOrder | None = None) -> AsyncIterator[SequenceOutput | Finished]:
        """Run one sequence. Raises EngineUnavailable immediately if the engine is not ready.

        Only RoutedEngine uses `order`. Every other client runs all sequences on one base model.
        """

    def abort(self, sequence_id: str) -> None: ...

    def extend(self, sequence_id: str, max_tokens: int) -> None:
        """Raise a sequence's token limit. Ignored if the sequence has ended. Never blocks."""

    async def call(self, message: EngineCall[AnswerT], timeout_s: float) -> AnswerT:
        """Send a Load, Unload, Pin, ForgetPrefixes or StatsRequest, and return the engine's answer.

        Raises EngineUnavailable, or TimeoutError if the answer does not arrive in time.
        """
        ...

    async def close(self) -> None: ...
