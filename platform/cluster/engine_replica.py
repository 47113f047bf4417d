"""The class that Ray Serve runs as a replica: an engine process, and the sessions of gateways with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import structlog
import zmq.asyncio

from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.messages import Stats, StatsRequest
from loramux.platform.cluster.gateway_sessions import GatewaySessions
from loramux.platform.cluster.replica_report import CoarseState, HeldState, ReplicaIdentity, as_values
from loramux.platform.cluster.spare_worker import start_spare
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_process import ENGINE_COMMAND
from loramux.platform.engine_link.local_engine import LocalEngine, Supervision

STATS_WAIT_S = 1.0
NOT_READY_S = 120.0
"""A replica whose engine has not been ready for this many seconds is unhealthy, so Ray replaces it."""

log = structlog.get_logger()


class ReplicaUnhealthy(Exception):
    """The engine does not run, so Ray Serve replaces the replica. The message says why."""


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig
    start_timeout_s: float
    step_timeout_s: float
    is_on_loopback: bool
    """True if only this machine may reach the replica."""
    command: tuple[str, ...] | None = None
    """The command line that starts the engine, or None for loramux's own engine."""


class EngineReplica:
    """Runs the engine that `loramux serve` would start on this machine. Ray Serve calls the public methods.

    `settings` are ReplicaSettings as JSON. The engine runs in a process of its own and is supervised as in `loramux
    serve`: an engine that dies is restarted within seconds. Ray replaces only a replica whose engine does not start.
    """

    async def __init__(self, settings: str) -> None:  # type: ignore[misc]
        # Ray Serve awaits the constructor.
        parsed = msgspec.json.decode(settings, type=ReplicaSettings)
        if parsed.is_on_loopback:
            stay_on_loopback()
        if parsed.engine.is_sandbox_required:
            from loramux.adapter_store.validation.validator import check_sandbox

            # The server has checked its own machine only.
            await asyncio.to_thread(check_sandbox)
        supervision = Supervision(step_timeout_s=parsed.step_timeout_s, start_timeout_s=parsed.start_timeout_s)
        self._engine = LocalEngine(parsed.engine, supervision, parsed.command or ENGINE_COMMAND)
        self._sessions = GatewaySessions(self._engine, zmq.asyncio.Context())
        self._ready_s = time.monotonic()
        await self._engine.start()
        assert self._engine.info is not None
        self._identity = ReplicaIdentity.of(self._engine.info, parsed.engine.max_sequences)
        self._coarse = CoarseState(self._identity)
        self._last_work = 0
        # On a machine of its own, Ray may need the memory, and starts a replica elsewhere.
        self._spare = asyncio.create_task(_keep_spare()) if parsed.is_on_loopback else None

    async def session(self, session_id: str) -> AsyncGenerator[bytes, None]:
        async for data in self._sessions.run(session_id):
            yield data

    async def send(self, session_id: str, offset: int, data: bytes) -> None:
        self._sessions.receive(session_id, offset, data)

    async def check_health(self) -> None:
        now_s = time.monotonic()
        if self._engine.is_ready:
            self._ready_s = now_s
        if now_s - self._ready_s > NOT_READY_S:
            raise ReplicaUnhealthy(f"the engine does not run: {self._engine.trouble}")

    async def record_replica_metadata(self) -> dict[str, Any]:
        return as_values(self._identity)

    async def record_routing_stats(self) -> dict[str, Any]:
        stats = await self._stats()
        if stats is not None:
            return as_values(self._coarse.observe(stats))
        # A busy engine that answers late must not look idle.
        return as_values(self._coarse.last if self._engine.is_ready else HeldState())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of running, waiting and loading sequences, and how many can run at once. Lines of batches
        use what is free, so they do not count."""
        stats = await self._stats()
        if stats is not None:
            self._last_work = stats.num_foreground
        elif not self._engine.is_ready:
            self._last_work = 0
        return {"work": float(self._last_work), "capacity": float(self._identity.capacity)}

    async def _stats(self) -> Stats | None:
        try:
            return await self._engine.call(StatsRequest(), STATS_WAIT_S)
        except (EngineUnavailable, TimeoutError):
            return None


async def _keep_spare() -> None:
    try:
        await asyncio.to_thread(start_spare)
    except Exception as error:
        # The next replica only starts more slowly.
        log.warning("Ray keeps no process in reserve", reason=str(error))


def stay_on_loopback() -> None:
    """Make Ray Serve's server in this process listen on 127.0.0.1 only.

    Ray Serve has no setting for it. The server starts after the constructor of the replica, and is used only by calls
    by value, which loramux does not make.
    """
    from ray.serve._private import replica

    listen = replica.add_port_to_grpc_server

    def listen_on_loopback(server: Any, address: str, *args: Any, **kwargs: Any) -> Any:
        return listen(server, address.replace("[::]", "127.0.0.1"), *args, **kwargs)

    replica.add_port_to_grpc_server = listen_on_loopback
