"""Base class for clients of an engine that another process supervises. They reconnect when the engine is replaced."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from loramux.engine.protocol.messages import Add, Finished
from loramux.platform.engine_link.connected_engine import ConnectedEngine
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_session import EngineSession

GATHER_S = 1.0
"""Time in which the ends of all sequences arrive that an engine was running when it died, in seconds."""

log = structlog.get_logger()


class JoinRefused(Exception):
    """The engine cannot be joined. The message says why and how to fix it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    answer_timeout_s: float = 5.0
    first_delay_s: float = 0.1
    max_delay_s: float = 2.0


class FollowedEngine(ConnectedEngine, ABC):
    """Ends the open streams when the engine is lost, and then joins the next engine at the same path or address.

    A request that an engine was running when it died gets a strike. Clients of engines that can run the same requests
    share `strikes`.
    """

    def __init__(
        self, place: str, joining: Joining, clock: Callable[[], float], strikes: CrashStrikes | None = None
    ) -> None:
        super().__init__(strikes if strikes is not None else CrashStrikes(clock))
        self._place = place
        self._joining = joining
        self._lost: dict[str, Add] = {}
        self._ran_at_death: list[Add] = []
        """Sequences that the supervisor has reported as running at an engine's death, and that are not struck yet."""
        self._striking: asyncio.TimerHandle | None = None
        self._trouble: str | None = None
        self._follower: asyncio.Task[None] | None = None

    @abstractmethod
    async def _join(self) -> EngineSession:
        """Connect to the engine. Raises JoinRefused if there is no engine or it is the wrong one."""

    @property
    def is_live(self) -> bool:
        """Always true, because the engine's supervisor watches for hangs."""
        return True

    @property
    def trouble(self) -> str | None:
        return None if self.is_ready else self._trouble

    def follow(self) -> None:
        """Start a background task that joins the next engine whenever the current one is lost."""
        self._follower = asyncio.create_task(self._follow(), name="engine-follower")

    async def close(self) -> None:
        try:
            if self._follower is not None:
                self._follower.cancel()
                # `await self._follower` could not distinguish the task's cancellation from the caller's.
                await asyncio.wait({self._follower})
        finally:
            self._strike()
            self._leave()

    async def _follow(self) -> None:
        """Loop forever: wait until the engine is lost, end its streams, and join the next engine."""
        while True:
            if self._connection is None:
                self._connection = await self._rejoin()
                # Only the supervisor knows which sequences were running when an engine died. The next engine reports
                # them.
                ran = self._connection.info.ran_at_death
                self._strikes.strike([self._lost[name] for name in ran if name in self._lost])
                self._lost = {}
                log.info("engine joined", place=self._place)
            await self._connection.wait_lost()
            self._trouble = "the engine is gone; the server that started it may be restarting it"
            self._log_loss()
            self._strike()
            self._lost = self._connection.open_adds
            self._leave()

    async def _rejoin(self) -> EngineSession:
        delay_s = self._joining.first_delay_s
        while True:
            await asyncio.sleep(delay_s)
            try:
                return await self._join()
            except Exception as error:
                # Retry after any failure.
                if self._trouble != str(error):
                    log.info("engine cannot be joined; trying again", place=self._place, reason=str(error))
                self._trouble = str(error)
            delay_s = min(2 * delay_s, self._joining.max_delay_s)

    def _note_end(self, add: Add, finished: Finished) -> None:
        super()._note_end(add, finished)
        if finished.code == "engine_unavailable" and finished.prompt_tokens > 0:
            self._ran_at_death.append(add)
            if self._striking is None:
                # If the other server has more engines, the connection stays.
                self._striking = asyncio.get_running_loop().call_later(GATHER_S, self._strike)

    def _strike(self) -> None:
        """Record one death of an engine for the sequences that it was running."""
        if self._striking is not None:
            self._striking.cancel()
            self._striking = None
        ran, self._ran_at_death = self._ran_at_death, []
        self._strikes.strike(ran)

    def _log_loss(self) -> None:
        log.error("engine lost", place=self._place)

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(frozenset())
