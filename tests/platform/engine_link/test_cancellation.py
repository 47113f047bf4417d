"""Cancelled calls stay cancelled, whatever happens at the same moment. Otherwise, a server would not stop."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from loramux.engine.protocol.messages import Add, StatsRequest
from loramux.platform.engine_link.engine_session import EngineSession
from loramux.platform.engine_link.followed_engine import FollowedEngine, Joining, JoinRefused
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio


class QuietSession(EngineSession):
    """Sends its messages nowhere."""

    def _send_bytes(self, data: bytes) -> None:
        return

    async def wait_lost(self) -> None:
        raise NotImplementedError

    def close(self, running: frozenset[str]) -> list[Add]:
        return self._end_all(running)


class AbsentEngine(FollowedEngine):
    async def _join(self) -> EngineSession:
        raise JoinRefused("there is no engine")


async def test_call_is_cancelled_even_if_its_answer_arrives_at_the_same_moment() -> None:
    session = QuietSession(lambda add, finished: None)
    asking = asyncio.create_task(session.call(StatsRequest(), 60.0))
    await asyncio.sleep(0)
    answer = await ScriptedEngine().call(StatsRequest(), 1.0)
    session._dispatch(msgspec.structs.replace(answer, call_id="0"))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_closing_an_engine_can_be_cancelled() -> None:
    engine = AbsentEngine("nowhere", Joining(first_delay_s=60.0), time.monotonic)
    engine.follow()
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
