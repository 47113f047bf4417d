"""Stores the answers of a batch's lines, several in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loramux.platform.batches.batch_claims import StoredAnswer, WaitingLine

GATHER_S = 0.1
"""How long an answer waits for others, in seconds. Each transaction delays the reservations of other requests."""
MAX_ANSWERS = 64
"""Maximum number of answers in a transaction."""
MAX_BYTES = 4 << 20
"""Total length of the answers after which a transaction gets no more of them, in bytes."""

Record = Callable[[Sequence[tuple[WaitingLine, StoredAnswer]]], Awaitable[None]]
"""Stores answers, all or none."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    line: WaitingLine
    answer: StoredAnswer
    stored: asyncio.Future[None]


class AnswerWriter:
    def __init__(self, record: Record) -> None:
        self._record = record
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None

    async def store(self, line: WaitingLine, answer: StoredAnswer) -> None:
        """Return when the answer is stored. Raises what `record` raises."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(line, answer, stored))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await stored

    async def _write(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            some = self._next()
            try:
                await self._record([(one.line, one.answer) for one in some])
            except Exception as error:
                _end(some, error)
            else:
                _end(some, None)

    def _next(self) -> list[_Waiting]:
        num_bytes, some = 0, list[_Waiting]()
        for one in self._waiting[:MAX_ANSWERS]:
            if num_bytes >= MAX_BYTES:
                break
            num_bytes += len(one.answer.content)
            some.append(one)
        del self._waiting[: len(some)]
        return some


def _end(waiting: Sequence[_Waiting], error: Exception | None) -> None:
    for one in waiting:
        if one.stored.done():
            # Its line no longer waits.
            continue
        if error is None:
            one.stored.set_result(None)
        else:
            one.stored.set_exception(error)
