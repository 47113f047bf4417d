"""The output of one sequence, as it arrives from an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from loramux.engine.messages import Add, Finished, SequenceOutput


class SequenceStream:
    """The output of one sequence. An unread stream buffers its own tokens and does not delay other streams."""

    def __init__(self, add: Add) -> None:
        self.add = add
        self._items: asyncio.Queue[SequenceOutput | Finished] = asyncio.Queue()
        self._num_received = 0
        self._is_ended = False

    def put(self, item: SequenceOutput | Finished) -> None:
        if isinstance(item, SequenceOutput):
            self._num_received += len(item.token_ids)
        self._items.put_nowait(item)

    def fail(self, was_running: bool) -> None:
        """End a stream whose engine is gone. Received tokens are billed. A sequence that never ran costs nothing."""
        has_run = was_running or self._num_received > 0
        self.put(
            Finished(
                sequence_id=self.add.sequence_id,
                reason="error",
                prompt_tokens=len(self.add.prompt) if has_run else 0,
                completion_tokens=self._num_received,
                code="engine_unavailable",
                message=f"the engine stopped while this request was {'running' if has_run else 'waiting'}",
            )
        )

    def __aiter__(self) -> AsyncIterator[SequenceOutput | Finished]:
        return self

    async def __anext__(self) -> SequenceOutput | Finished:
        if self._is_ended:
            raise StopAsyncIteration
        item = await self._items.get()
        self._is_ended = isinstance(item, Finished)
        return item


def refused_stream(add: Add) -> SequenceStream:
    """A stream that refuses a sequence because engines died while running it."""
    stream = SequenceStream(add)
    stream.put(
        Finished(
            sequence_id=add.sequence_id,
            reason="error",
            prompt_tokens=0,
            completion_tokens=0,
            code="request_excluded",
            message="the engine stopped twice while running this request, so the request is refused for a while",
        )
    )
    return stream
