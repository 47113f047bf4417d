"""Parts of pages that are sent anew while they are looked at, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.responses import Response, StreamingResponse

from loramux.admin.console.session_cookie import SESSION, read_cookie
from loramux.admin.console.visit import DATABASE_TROUBLE, Visit, find_session
from loramux.platform.errors import Unavailable

MAX_STREAMS = 200
"""Of all sessions together; a page beyond them is still right, and grows old."""
LIFETIME_S = 600.0
"""After which the browser connects again by itself, so that nothing lasts for ever."""

Render = Callable[[], Awaitable[str]]


class LiveParts:
    """Sends what `render` gives whenever it has changed, for as long as the session lives."""

    def __init__(self) -> None:
        self._num_streams = 0

    def stream(self, visit: Visit, event: str, every_s: float, render: Render) -> Response:
        """Raises Unavailable where too many are watched already."""
        if self._num_streams >= MAX_STREAMS:
            raise Unavailable("too many pages are being watched; open this one again later", retry_after_s=30)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(
            self._events(visit, event, every_s, render), media_type="text/event-stream", headers=headers
        )

    async def _events(self, visit: Visit, event: str, every_s: float, render: Render) -> AsyncIterator[bytes]:
        token = read_cookie(visit.request, SESSION) or ""
        self._num_streams += 1
        try:
            shown = None
            loop = asyncio.get_running_loop()
            end_s = loop.time() + LIFETIME_S
            while loop.time() < end_s:
                try:
                    session = await find_session(visit.site, visit.request, is_use=False)
                except DATABASE_TROUBLE:
                    # Whether it still may look cannot be known now: it waits, and sees nothing meanwhile.
                    session = visit.session if visit.site.sessions.recent(token, is_use=False) else None
                    if session is None:
                        yield b": waiting\n\n"
                        await asyncio.sleep(every_s)
                        continue
                if session is None:
                    yield b"event: signed-out\ndata:\n\n"
                    return
                html = await render()
                if html != shown:
                    shown = html
                    yield _event(event, html)
                else:
                    yield b": still so\n\n"
                await asyncio.sleep(every_s)
        finally:
            self._num_streams -= 1


def _event(name: str, html: str) -> bytes:
    lines = "\n".join(f"data: {line}" for line in html.splitlines())
    return f"event: {name}\n{lines}\n\n".encode()
