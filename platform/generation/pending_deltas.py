"""What a request's choices said and its client has not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque

from loramux.engine.messages import TokenLogprobs
from loramux.platform.generation.choice import ChoiceDelta

MAX_SEPARATE = 64
"""Deltas that wait one by one; what a client takes even later comes in larger pieces."""


class PendingDeltas:
    """A queue that never makes its writer wait and that a slow reader cannot make long.

    Up to MAX_SEPARATE deltas wait as they came. Beyond that they join, choice by choice, so that what waits is no more
    than MAX_SEPARATE deltas, one more a choice, and the plain text and log-probabilities that the request has paid for.
    """

    def __init__(self) -> None:
        self._separate: deque[ChoiceDelta] = deque()
        self._joined: dict[int, JoinedDeltas] = {}
        self._is_closed = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._separate) + len(self._joined)

    def put(self, delta: ChoiceDelta) -> None:
        # Behind joined deltas everything joins, so that each choice's text keeps its order.
        if self._joined or len(self._separate) >= MAX_SEPARATE:
            joined = self._joined.get(delta.index)
            if joined is None:
                joined = self._joined[delta.index] = JoinedDeltas()
            joined.add(delta)
        else:
            self._separate.append(delta)
        self._changed.set()

    def close(self) -> None:
        """Nothing more will be put."""
        self._is_closed = True
        self._changed.set()

    async def get(self) -> ChoiceDelta | None:
        """The next delta; None once it is closed and all were taken."""
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
    """Several deltas of one choice, of which only the last may end it."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: ChoiceDelta | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self._texts.append(delta.text)
        self._logprobs.extend(delta.logprobs)
        self._last = delta

    def delta(self) -> ChoiceDelta:
        assert self._last is not None
        return ChoiceDelta(self._last.index, "".join(self._texts), tuple(self._logprobs), self._last.finish_reason)
