"""A server that receives webhooks, and can refuse, hang or answer slowly."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Target:
    url: str = ""
    status: int = 204
    hangs: bool = False
    paths: list[str] = field(default_factory=list)
    received: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    has_received: threading.Event = field(default_factory=threading.Event)
    is_held: threading.Lock = field(default_factory=threading.Lock)
    """While a test holds it, nothing is answered."""
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.received]


@contextmanager
def listening_target(context: ssl.SSLContext | None = None) -> Iterator[Target]:
    target = Target()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            target.paths.append(self.path)
            target.received.append(({name.lower(): value for name, value in self.headers.items()}, body))
            target.has_received.set()
            if target.hangs:
                target.is_over.wait()
                return
            with target.is_held:
                self.send_response(target.status)
            self.send_header("content-length", "0")
            if target.status == 302:
                self.send_header("location", target.url)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    target.url = f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield target
    finally:
        target.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()
