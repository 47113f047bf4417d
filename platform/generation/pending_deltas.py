"""Output of a request's choices that the client has not read yet."""

from __future__ import annotations

import asyncio
from collections import deque

from loramux.engine.messages import PromptLogprob, TokenLogprobs
from loramux.platform.generation.choice import ChoiceDelta

MAX_SEPARATE = 64
"""Maximum number of deltas queued separately. Further deltas are joined into larger ones."""


class PendingDeltas:
    """A queue that never blocks its writer and stays short even if its reader is slow.

    Up to MAX_SEPARATE deltas are kept as they arrived. Further deltas are joined per choice, so the queue holds at most
    MAX_SEPARATE deltas plus one per choice. Joining keeps all text and log-probabilities.
    """

    def __init__(self) -> None:
        self._separate: deque[ChoiceDelta] = deque()
        self._joined: dict[int, JoinedDeltas] = {}
        self._is_closed = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._separate) + len(self._joined)

    def put(self, delta: ChoiceDelta) -> None:
        # Once deltas are joined, later ones join them too, so that each choice's text stays in order.
        if self._joined or len(self._separate) >= MAX_SEPARATE:
            joined = self._joined.get(delta.index)
            if joined is None:
                joined = self._joined[delta.index] = JoinedDeltas()
            joined.add(delta)
        else:
            self._separate.append(delta)
        self._changed.set()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()

    async def get(self) -> ChoiceDelta | None:
        """Return the next delta, or None once the queue is closed and empty."""
        while not self._separate:
            if self._joined:
                self._separate.extend(joined.delta() for joined in self._joined.values())
                self._joined.clear()
            elif self._is_closed:
                return None
            else:
                self._changed.clear()
                await self._changed.wait()
        return self._separate.popleft()


class JoinedDeltas:
    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._token_ids: list[int] = []
        self._prompt_logprobs: list[PromptLogprob] = []
        self._last: ChoiceDelta | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._logprobs.extend(delta.logprobs)
        self._token_ids.extend(delta.token_ids)
        self._prompt_logprobs.extend(delta.prompt_logprobs)
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
        )
