from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
import zmq.asyncio

from loramux.platform.cluster.gateway_sessions import GatewaySessions, SessionRefused
from tests.platform.replicas.lab import until
from tests.platform.replicas.served_engine import ServedEngine
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio


async def test_missing_bytes_end_a_session(short_path: Path) -> None:
    served = ServedEngine(ScriptedEngine(), short_path / "engine.sock")
    context = zmq.asyncio.Context()
    sessions = GatewaySessions(served, context)
    async with aclosing(sessions.run("one")) as stream:
        assert await anext(stream)
        with pytest.raises(SessionRefused, match="open already"):
            await anext(sessions.run("one"))
        sessions.receive("one", 0, b"\0\0\0\0")
        with pytest.raises(SessionRefused, match="missing"):
            sessions.receive("one", 5, b"\0")
        assert [data async for data in stream] == []
    with pytest.raises(SessionRefused, match="no such session"):
        sessions.receive("one", 4, b"\0")
    context.destroy(linger=0)
    served.close()


async def test_a_frame_that_is_no_message_ends_only_its_session(short_path: Path) -> None:
    served = ServedEngine(ScriptedEngine(), short_path / "engine.sock")
    context = zmq.asyncio.Context()
    sessions = GatewaySessions(served, context)
    async with aclosing(sessions.run("good")) as good, aclosing(sessions.run("bad")) as bad:
        assert await anext(good)
        assert await anext(bad)
        ended = asyncio.ensure_future(anext(bad, None))
        sessions.receive("bad", 0, b"\0\0\0\3abc")
        await until(ended.done)
        assert ended.result() is None
        sessions.receive("good", 0, b"\0\0\0\0")
    context.destroy(linger=0)
    served.close()
