"""Live parts of pages, updated through server-sent events while the page is open."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from starlette.responses import Response, StreamingResponse

from loramux.admin.console.oidc.role_confirmation import ConfirmInBrowser
from loramux.admin.console.visit import Visit, find_session
from loramux.migrations.database import DATABASE_TROUBLE
from loramux.platform.errors import RateLimited, Unavailable

MAX_STREAMS = 200
"""Maximum number of streams per page on this server. A page without a stream is correct but does not update."""
MAX_STREAMS_EACH = 10
"""Maximum number of streams per page and tenant on this server, over all of the tenant's sessions. Each stream renders
its parts every second or two.
"""
LIFETIME_S = 600.0
"""Maximum duration of a stream, in seconds. The browser then reconnects automatically."""

Render = Callable[[], Awaitable[str]]


class LiveParts:
    """Resends each part of a page when it changes, until the session ends or LIFETIME_S have passed."""

    def __init__(self) -> None:
        self._num_of: Counter[str] = Counter()

    def stream(self, visit: Visit, every_s: float, parts: Mapping[str, Render]) -> Response:
        """Stream the parts, which are keyed by event name.

        Raises RateLimited if the tenant has too many live pages open, or Unavailable if the server has too many
        overall.
        """
        has_all = not visit.is_platform and self._num_of[visit.session.principal.holder] >= MAX_STREAMS_EACH
        if has_all or self._num_of.total() >= MAX_STREAMS:
            kind = RateLimited if has_all else Unavailable
            raise kind("too many live pages are open; open this page again later", retry_after_s=30)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(visit, every_s, parts), media_type="text/event-stream", headers=headers)

    async def _is_authorized(self, visit: Visit) -> bool:
        try:
            return await find_session(visit.site, visit.request, is_use=False) is not None
        except ConfirmInBrowser:
            # The browser then reloads the page, which redirects to the provider.
            return False

    async def _events(self, visit: Visit, every_s: float, parts: Mapping[str, Render]) -> AsyncIterator[bytes]:
        self._num_of[visit.session.principal.holder] += 1
        try:
            shown: dict[str, str] = {}
            loop = asyncio.get_running_loop()
            end_s = loop.time() + LIFETIME_S
            while loop.time() < end_s:
                try:
                    if not await self._is_authorized(visit):
                        yield _event("signed-out", "")
                        return
                    now = {name: await render() for name, render in parts.items()}
                except DATABASE_TROUBLE:
                    # Without the database, the session's rights are unknown. Show only a notice until the database
                    # answers.
                    trouble = visit.site.templates.render("live_trouble.html", **visit.frame())
                    now = {name: trouble if number == 0 else "" for number, name in enumerate(parts)}
                changed = [_event(name, html) for name, html in now.items() if shown.get(name) != html]
                shown = now
                # Always send something, so that a disconnected client is noticed.
                yield b"".join(changed) or b": still so\n\n"
                await asyncio.sleep(every_s)
        finally:
            self._num_of[visit.session.principal.holder] -= 1
            self._num_of += Counter()


class LiveModule(Protocol):
    """A module of `pages/` whose page has one live part."""

    EVERY_S: float
    """Interval between looks for a change, in seconds."""

    async def facts(self, visit: Visit, /) -> dict[str, Any]:
        """Return the values of the page's templates."""


class LivePage:
    """A page with one live part, `name`. Its templates are `NAME.html` and `NAME_live.html`."""

    def __init__(self, name: str, module: LiveModule) -> None:
        self._name = name
        self._module = module
        self._live = LiveParts()

    async def show(self, visit: Visit) -> Response:
        return visit.page(f"{self._name}.html", **await self._module.facts(visit))

    async def live(self, visit: Visit) -> Response:
        async def render() -> str:
            values = await self._module.facts(visit)
            return visit.site.templates.render(f"{self._name}_live.html", **visit.frame(), **values)

        return self._live.stream(visit, self._module.EVERY_S, {self._name: render})


def _event(name: str, html: str) -> bytes:
    lines = "\n".join(f"data: {line}" for line in html.splitlines()) or "data:"
    return f"event: {name}\n{lines}\n\n".encode()
