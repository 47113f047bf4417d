"""Both listeners on one event loop, and their shutdown."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
import uvicorn

from loramux.admin.server.bounded_connection import BoundedConnection
from loramux.admin.server.connection_limits import KEEP_ALIVE_S
from loramux.admin.server.connection_registry import ConnectionRegistry
from loramux.admin.server.forwarded_clients import ForwardedClients
from loramux.admin.server.listeners import prepare_to_listen
from loramux.admin.server.stop_signals import StopSignals
from loramux.engine.server.gc_freeze import freeze_gc

log = structlog.get_logger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Time, in seconds, after which a thread that runs Python code releases the interpreter lock to a waiting thread."""

LAST_WORDS_S = 2.0
"""Time for streams to end after the engine has been stopped, in seconds."""


class HttpServer(uvicorn.Server):
    """One listener with its ConnectionRegistry. It does not handle signals."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        book: ConnectionRegistry | None = None,
        keep_alive_s: int = KEEP_ALIVE_S,
        root_path: str = "",
    ) -> None:
        self._book = book or ConnectionRegistry()
        if self._book.proxies:
            max_per_address = self._book.limits.max_per_address
            app = ForwardedClients(
                app, self._book.proxies, max_per_address, lambda: self._book.note("forwarded_address_full"), root_path
            )
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedConnection,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=keep_alive_s,
                # By default, uvicorn trusts these headers from any process on this machine.
                proxy_headers=False,
            )
        )
        self.server_state = self._book
        self._listener = listener
        self.is_listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        prepare_to_listen(self._listener)
        await super().startup(sockets)
        self.is_listening.set()

    async def on_tick(self, counter: int) -> bool:
        # uvicorn ticks ten times a second, and a sweep is due every second.
        if counter % 10 == 0:
            self._book.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # A request that is still running ends as if its client had disconnected, which every route handles. Otherwise,
        # the request would be cancelled with the event loop and reported as a server error.
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=LAST_WORDS_S)

    async def run_until_stopped(self) -> None:
        await self.serve(sockets=[self._listener])

    def stop(self) -> None:
        """Accept no more connections and stop when the running requests have ended."""
        self.should_exit = True


async def serve_until_stopped(
    gateway: HttpServer,
    admin: HttpServer,
    signals: StopSignals,
    drain_s: float,
    announce: Callable[[], None],
    begin_drain: Callable[[], None],
    stop_engine: Callable[[], Awaitable[None]],
) -> None:
    """Serve both listeners, announce them, and drain on a signal.

    The gateway drains first. The admin listener serves metrics until the gateway has stopped. `begin_drain` is called
    before the OpenAI listener closes. After `drain_s`, or at a second signal, the engine is stopped, which ends the
    remaining requests.
    """
    freeze_gc()
    # With the default of 5 ms, the event loop could wait ten times as long for the interpreter lock.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    async with asyncio.TaskGroup() as group:
        gateway_task = group.create_task(gateway.run_until_stopped())
        group.create_task(admin.run_until_stopped())
        await gateway.is_listening.wait()
        await admin.is_listening.wait()
        announce()
        await signals.drain.wait()
        begin_drain()
        gateway.stop()
        if num_requests := len(gateway.server_state.tasks):
            # Otherwise, the process would seem to hang at a terminal.
            log.info(
                "stopping: running requests have drain_s to finish, and a second signal ends them now",
                num_requests=num_requests,
                drain_s=drain_s,
            )
        hurry = asyncio.create_task(signals.hurry.wait())
        await asyncio.wait({gateway_task, hurry}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not gateway_task.done():
            await stop_engine()
            await asyncio.wait({gateway_task}, timeout=LAST_WORDS_S)
        gateway.force_exit = True
        admin.stop()
        admin.force_exit = True
