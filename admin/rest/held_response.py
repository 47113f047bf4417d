"""A streamed response that holds a transfer slot until the client has read it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

import anyio
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

STALLED_S = 30.0
"""A client that takes longer than this, in seconds, to read a part of the response is disconnected, so that it cannot
hold a slot indefinitely.
"""


class HeldResponse(StreamingResponse):
    """A streamed response that always releases its slot, even if sending fails."""

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
            # `send` waits while the connection's write buffer is full because the client reads too slowly.
            with anyio.fail_after(STALLED_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            # The response ends early. The client notices because the final chunk is missing.
            return
        finally:
            self._release_slot()
