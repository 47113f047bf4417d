from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from loramux.engine.protocol.messages import Add, Finished, SamplingParams, SequenceOutput
from loramux.platform.engine_link.local_engine import LocalEngine

PATIENCE_S = 60
"""Time limit, in seconds, for operations that are almost instant on an idle machine."""


def add(name: str, *prompt: int, max_tokens: int = 4, **more: Any) -> Add:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    return Add(sequence_id=name, prompt=prompt or (5, 6, 7), max_tokens=max_tokens, sampling=sampling, **more)


async def end_of(stream: AsyncIterator[SequenceOutput | Finished]) -> Finished:
    items = [item async for item in stream]
    assert isinstance(items[-1], Finished)
    return items[-1]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110  other processes set no event here
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(engine: LocalEngine) -> AsyncIterator[LocalEngine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
