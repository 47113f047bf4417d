"""The base class of clients of an engine process: holds one connection and counts crash strikes."""

from __future__ import annotations

from collections.abc import AsyncIterator

from loramux.engine.protocol.messages import AdapterState, Add, EngineReady, Finished, SequenceOutput, Stats
from loramux.platform.base_draw import BaseOrder
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_session import EngineSession
from loramux.platform.engine_link.sequence_stream import refused_stream


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

    def submit(self, add: Add, order: BaseOrder | None = None) -> AsyncIterator[SequenceOutput | Finished]:
        connection = self._connected()
        return refused_stream(add) if self._strikes.is_refused(add) else connection.submit(add)

    def abort(self, sequence_id: str) -> None:
        if self._connection is not None:
            self._connection.abort(sequence_id)

    def extend(self, sequence_id: str, max_tokens: int) -> None:
        if self._connection is not None:
            self._connection.extend(sequence_id, max_tokens)

    async def load(self, digest: str, timeout_s: float) -> AdapterState:
        return await self._connected().load(digest, timeout_s)

    async def unload(self, digest: str, timeout_s: float, is_purge: bool = False) -> AdapterState:
        return await self._connected().unload(digest, timeout_s, is_purge)

    async def pin(self, digest: str, is_pinned: bool, timeout_s: float) -> AdapterState:
        return await self._connected().pin(digest, is_pinned, timeout_s)

    async def stats(self, timeout_s: float, with_tiers: bool = False) -> Stats:
        return await self._connected().stats(timeout_s, with_tiers)

    def _connected(self) -> EngineSession:
        if self._connection is None:
            raise EngineUnavailable("the engine is not running")
        return self._connection

    def _note_end(self, add: Add, finished: Finished) -> None:
        if finished.reason in ("stop", "length"):
            self._strikes.acquit(add)
