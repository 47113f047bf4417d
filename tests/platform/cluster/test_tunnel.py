from __future__ import annotations

import asyncio

import pytest

from loramux.platform.cluster.tunnel import MAX_CHUNK_BYTES, PAUSE_BYTES, TunnelTransport

pytestmark = pytest.mark.anyio


class Recorder(asyncio.Protocol):
    def __init__(self) -> None:
        self.calls: list[object] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.calls.append("made")

    def data_received(self, data: bytes) -> None:
        self.calls.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls.append(("lost", exc))

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")


async def test_bytes_gather_until_they_are_taken() -> None:
    recorder = Recorder()
    tunnel = TunnelTransport(recorder)
    taking = asyncio.ensure_future(tunnel.take())
    await asyncio.sleep(0)
    tunnel.write(b"ab")
    tunnel.write(b"c")
    assert await taking == b"abc"
    tunnel.receive(b"d")
    tunnel.write(b"last")
    tunnel.close()
    tunnel.write(b"too late")
    tunnel.receive(b"too late")
    assert (await tunnel.take(), await tunnel.take()) == (b"last", b"")
    tunnel.lose()
    tunnel.lose()
    assert recorder.calls == ["made", b"d", ("lost", None)]


async def test_a_reader_that_is_slow_pauses_the_writer() -> None:
    recorder = Recorder()
    tunnel = TunnelTransport(recorder)
    tunnel.write(b"x" * (PAUSE_BYTES + MAX_CHUNK_BYTES + 1))
    assert recorder.calls == ["made", "pause"]
    assert len(await tunnel.take()) == MAX_CHUNK_BYTES
    assert recorder.calls == ["made", "pause"]
    await tunnel.take()
    assert recorder.calls == ["made", "pause", "resume"]
    assert await tunnel.take() == b"x"
