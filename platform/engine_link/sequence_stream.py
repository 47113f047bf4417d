"""The output of one sequence, as it arrives from an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from loramux.engine.protocol.messages import Add, Finished, SequenceOutput
from loramux.engine.server.gateway_link import HeldTokens


class SequenceStream:
    """The output of one sequence. An unread stream buffers its own tokens and does not delay other streams.

    A reader that keeps up gets each output as it was sent. A slower reader gets all waiting outputs merged into one.
    """

    def __init__(self, add: Add) -> None:
        self.add = add
        self.max_tokens = add.max_tokens
        """The limit of the Add message, or of the last Extend message."""
        self.num_received = 0
        self.num_scored = 0
        """Number of prompt tokens whose log-probabilities have arrived."""
        self.has_state = False
        """True if the pooled state has arrived."""
        self._outputs: list[SequenceOutput] = []
        self._finished: Finished | None = None
        self._reader: asyncio.Future[None] | None = None
        self._is_ended = False

    def put(self, item: SequenceOutput | Finished) -> None:
        if isinstance(item, Finished):
            self._finished = item
        else:
            self.num_received += len(item.token_ids)
            self.num_scored += len(item.prompt_logprobs)
            self.has_state |= bool(item.pooled)
            self._outputs.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def fail(self, was_running: bool) -> None:
        """End a stream whose engine is gone. Received tokens are billed. A sequence that never ran costs nothing."""
        has_run = was_running or self.num_received > 0
        self.put(
            Finished(
                sequence_id=self.add.sequence_id,
                reason="error",
                prompt_tokens=len(self.add.prompt) if has_run else 0,
                completion_tokens=self.num_received,
                code="engine_unavailable",
                message=f"the engine stopped while this request was {'running' if has_run else 'waiting'}",
            )
        )

    def __aiter__(self) -> AsyncIterator[SequenceOutput | Finished]:
        return self

    async def __anext__(self) -> SequenceOutput | Finished:
        if self._is_ended:
            raise StopAsyncIteration
        while not self._outputs and self._finished is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            return outputs[0] if len(outputs) == 1 else self._joined(outputs)
        assert self._finished is not None
        self._is_ended = True
        return self._finished

    def _joined(self, outputs: list[SequenceOutput]) -> SequenceOutput:
        held = HeldTokens()
        for output in outputs:
            held.join(output)
        return held.output(self.add.sequence_id)


def excluded_stream(add: Add) -> SequenceStream:
    """Return a stream that ends with the code `request_excluded`, because engines died while running the sequence."""
    message = "the engine stopped twice while running this request, so the request is refused for a while"
    return refused_stream(add, "request_excluded", message)


def refused_stream(add: Add, code: str, message: str) -> SequenceStream:
    """Return a stream that ends with an error before the sequence has run."""
    stream = SequenceStream(add)
    end = Finished(
        sequence_id=add.sequence_id,
        reason="error",
        prompt_tokens=0,
        completion_tokens=0,
        code=code,
        message=message,
    )
    stream.put(end)
    return stream
