"""Claims rows of work and runs them, behind the requests of clients, until the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import structlog

from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.requests.services import GatewayServices


class Claimed(Protocol):
    """A claimed row, such as an eval."""

    @property
    def id(self) -> str: ...

    @property
    def tenant_id(self) -> str: ...


C = TypeVar("C", bound=Claimed)
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLoop(Generic[C]):
    """Runs at most `max_running` rows at once, each of another tenant. Several servers can do so on one database.

    A server whose own engine does not run claims nothing. `claim` blocks. It returns a row that no server runs, except
    those of the given tenants. `run_one` runs a row and gives its claim back if it is cancelled.
    """

    services: GatewayServices
    claim: Callable[[tuple[str, ...]], C | None]
    run_one: Callable[[C], Coroutine[Any, Any, None]]
    what: str
    max_running: int
    poll_s: float
    """Interval between looks for a row, in seconds."""

    async def run(self, draining: asyncio.Event) -> None:
        """Run until cancelled or until `draining` is set. The tasks of running rows are then cancelled."""
        running: dict[str, asyncio.Task[None]] = {}
        try:
            while not draining.is_set():
                try:
                    await self._fill(running)
                except Exception as error:
                    log.warning(f"{self.what} cannot be claimed; trying again", error=repr(error))
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.poll_s):
                        await draining.wait()
        finally:
            tasks = list(running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fill(self, running: dict[str, asyncio.Task[None]]) -> None:
        for tenant_id in [tenant_id for tenant_id, task in running.items() if task.done()]:
            del running[tenant_id]
        while len(running) < self.max_running and runs_own_engine(self.services.engine):
            claimed = await self.services.call(self.claim, tuple(running))
            if claimed is None:
                return
            running[claimed.tenant_id] = asyncio.create_task(self.run_one(claimed), name=claimed.id)


def runs_own_engine(engine: EngineClient) -> bool:
    """Return whether this server's own engine runs. A RoutedEngine is also ready if only other servers' engines are,
    but then these servers can claim the rows.
    """
    return engine.is_ready and engine.trouble is None
