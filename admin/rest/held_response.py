"""An answer that is sent as its client reads it, and holds a slot for as long as that takes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

import anyio
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

STALLED_S = 30.0
"""A client that reads nothing for so long is cut off, so that it cannot hold a slot."""


class HeldResponse(StreamingResponse):
    """Releases its slot however it ends."""

    def __init__(
        self,
        body: AsyncIterator[str | bytes],
        release_slot: Callable[[], None],
        headers: Mapping[str, str],
        media_type: str,
    ) -> None:
        super().__init__(body, 200, headers, media_type)
        self._release_slot = release_slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            # Returns once the part before this one has left for the client.
            with anyio.fail_after(STALLED_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            # The answer ends early, which the client sees: it lacks its last part.
            return
        finally:
            self._release_slot()
