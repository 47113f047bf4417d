"""Output of a request's choices that the client has not read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from loramux.engine.protocol.messages import PromptLogprob, TokenLogprobs
from loramux.platform.generation.choice import ChoiceDelta, TextToken
from loramux.platform.tool_calls.events import Part, joined_parts


class PendingDeltas:
    """A queue that never blocks its writer and stays short if its reader is slow.

    A reader that keeps up gets each delta as it was written. For a slow reader, all deltas of a choice except the last
    are joined, so that at most two per choice are waiting.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, bool], ChoiceDelta | JoinedDeltas] = {}
        """Keyed by the choice's index and by whether the delta is the choice's last one."""
        self._is_closed = False
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delta: ChoiceDelta) -> None:
        key = (delta.index, delta.finish_reason is not None)
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = delta
        elif isinstance(waiting, JoinedDeltas):
            waiting.add(delta)
        else:
            self._waiting[key] = JoinedDeltas([waiting, delta])
        self._wake_reader()

    def close(self) -> None:
        self._is_closed = True
        self._wake_reader()

    async def get(self) -> ChoiceDelta | None:
        """Return the next delta, or None once the queue is closed and empty."""
        while not self._waiting:
            if self._is_closed:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        waiting = self._waiting.pop(next(iter(self._waiting)))
        return waiting.delta() if isinstance(waiting, JoinedDeltas) else waiting

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class JoinedDeltas:
    """Deltas of one choice, merged without losing text, tokens or log-probabilities."""

    def __init__(self, deltas: Iterable[ChoiceDelta] = ()) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text_tokens: list[TextToken] = []
        self._token_ids: list[int] = []
        self._prompt_logprobs: list[PromptLogprob] = []
        self._parts: list[Part] = []
        self._pooled = b""
        self._last: ChoiceDelta | None = None
        for delta in deltas:
            self.add(delta)

    def add(self, delta: ChoiceDelta) -> None:
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._logprobs.extend(delta.logprobs)
        self._text_tokens.extend(delta.text_tokens)
        self._token_ids.extend(delta.token_ids)
        self._prompt_logprobs.extend(delta.prompt_logprobs)
        self._parts.extend(delta.parts)
        self._pooled += delta.pooled
        self._last = delta

    def delta(self) -> ChoiceDelta:
        assert self._last is not None
        return ChoiceDelta(
            self._last.index,
            "".join(self._texts),
            tuple(self._logprobs),
            self._last.finish_reason,
            tuple(self._token_ids),
            "".join(self._reasoning),
            tuple(self._prompt_logprobs),
            joined_parts(self._parts),
            self._last.stop_reason,
            self._pooled,
            tuple(self._text_tokens),
        )
