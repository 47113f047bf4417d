"""The base class of clients of an engine process: holds one connection and counts crash strikes."""

from __future__ import annotations

from collections.abc import AsyncIterator

from loramux.engine.protocol.messages import Add, AnswerT, EngineCall, EngineReady, Finished, SequenceOutput
from loramux.platform.base_draw import BaseOrder
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_session import EngineSession
from loramux.platform.engine_link.sequence_stream import excluded_stream


class ConnectedEngine:
    """Passes the calls of an EngineClient to `_connection`, which subclasses open and close."""

    def __init__(self, strikes: CrashStrikes) -> None:
        self._connection: EngineSession | None = None
        self._strikes = strikes

    @property
    def info(self) -> EngineReady | None:
        return None if self._connection is None else self._connection.info

    @property
    def is_ready(self) -> bool:
        return self._connection is not None

    @property
    def is_own_ready(self) -> bool:
        return self.is_ready

    def submit(self, add: Add, order: BaseOrder | None = None) -> AsyncIterator[SequenceOutput | Finished]:
        connection = self._connected()
        return excluded_stream(add) if self._strikes.is_refused(add) else connection.submit(add)

    def abort(self, sequence_id: str) -> None:
        if self._connection is not None:
            self._connection.abort(sequence_id)

    def extend(self, sequence_id: str, max_tokens: int) -> None:
        if self._connection is not None:
            self._connection.extend(sequence_id, max_tokens)

    async def call(self, message: EngineCall[AnswerT], timeout_s: float) -> AnswerT:
        return await self._connected().call(message, timeout_s)

    def _connected(self) -> EngineSession:
        if self._connection is None:
            raise EngineUnavailable("the engine is not running")
        return self._connection

    def _note_end(self, add: Add, finished: Finished) -> None:
        if finished.reason in ("stop", "length"):
            self._strikes.acquit(add)
