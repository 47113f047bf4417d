"""Server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
"""The last event of a stream of OpenAI's chunks."""

WRITE_CHUNK = "loramux.write_chunk"
"""Key in a scope of the function that writes a part of a started response's body. Middleware that reads only the start
of responses does not see these parts.
"""


def event(document: Any, kind: str | None = None) -> bytes:
    """Encode an event, whose type is `kind` if it has one."""
    name = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    # JSON escapes newlines, so one data line contains the whole document.
    return name + b"data: " + msgspec.json.encode(document) + b"\n\n"


class EventStream(Response):
    """Sends events as they arrive. The producer of the events must detect that the client has disconnected."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        # Turn off buffering in proxies, which would deliver the whole stream only at its end.
        self.init_headers({**headers, "cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_part(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        write: Callable[[bytes], Awaitable[None]] = scope.get(WRITE_CHUNK, send_part)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await write(data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
