from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loramux.admin.server.http_servers import HttpServer
from loramux.admin.server.listeners import bind, url_of


@dataclass
class RunningServer:
    url: str
    server: HttpServer
    thread: threading.Thread

    def stop(self, is_forced: bool = False) -> None:
        self.server.force_exit = is_forced
        self.server.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()


def start_server(app: ASGIApp) -> RunningServer:
    """Start serving the app and return once it responds."""
    listener = bind("127.0.0.1", 0, "port")
    url = url_of(listener)
    server = HttpServer(app, listener)
    thread = threading.Thread(target=lambda: asyncio.run(server.run_until_stopped()))
    thread.start()
    with httpx.Client(base_url=url, trust_env=False, verify=False) as client:
        for _ in range(500):
            with suppress(httpx.TransportError):
                client.get("/health/live")
                break
            time.sleep(0.02)
    return RunningServer(url, server, thread)


class SharedServer:
    """A server for several tests, because stopping one takes 0.2 s. Each test replaces the app."""

    def __init__(self) -> None:
        self.app: ASGIApp = Response(status_code=503)
        self.url = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


@contextmanager
def open_shared_server() -> Iterator[SharedServer]:
    shared = SharedServer()
    running = start_server(shared)
    shared.url = running.url
    yield shared
    running.stop()
