"""Claims rows of work and runs them, behind the requests of clients, until the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import structlog

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

    `claim` blocks. It returns a row that no server runs, except those of the given tenants. `run_one` runs a row and
    gives its claim back if it is cancelled.

    While this server's own engine does not run, `claim_without_engine` takes the place of `claim`, for rows that can
    end without an engine. Without it, nothing is claimed.
    """

    services: GatewayServices
    claim: Callable[[tuple[str, ...]], C | None]
    run_one: Callable[[C], Coroutine[Any, Any, None]]
    what: str
    max_running: int
    poll_s: float
    """Interval between looks for a row, in seconds."""
    claim_without_engine: Callable[[tuple[str, ...]], C | None] | None = None

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
        while len(running) < self.max_running:
            # If only other servers' engines run, these servers can claim the rows.
            claim = self.claim if self.services.engine.is_own_ready else self.claim_without_engine
            claimed = None if claim is None else await self.services.call(claim, tuple(running))
            if claimed is None:
                return
            running[claimed.tenant_id] = asyncio.create_task(self.run_one(claimed), name=claimed.id)
