from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loramux.engine.architectures.model_files import model_sha256
from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.messages import Add, Finished, SamplingParams, SequenceOutput, StatsRequest
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.engine_link.followed_engine import Joining, JoinRefused
from loramux.platform.engine_link.joined_engine import JoinedEngine
from loramux.platform.engine_link.local_engine import LocalEngine


@asynccontextmanager
async def supervised(model: Path, short_path: Path) -> AsyncIterator[LocalEngine]:
    config = EngineConfig(
        model_dir=str(model),
        blob_url=f"file://{short_path / 'blobs'}",
        cache_dir=str(short_path / "cache"),
        pool_bytes=64 << 20,
        num_threads=1,
    )
    engine = LocalEngine(config, socket_directory=short_path / "run")
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def add(name: str, max_tokens: int = 8) -> Add:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    return Add(sequence_id=name, prompt=(5, 6, 7), max_tokens=max_tokens, sampling=sampling)


async def collect(engine: EngineClient, message: Add) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    async for item in engine.submit(message):
        if isinstance(item, Finished):
            return tokens, item
        tokens.extend(item.token_ids)
    raise AssertionError("a stream ended without Finished")


async def until_ready(*engines: EngineClient) -> None:
    async with asyncio.timeout(60):
        while not all(engine.is_ready for engine in engines):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def kill_while_it_runs(local: LocalEngine, *engines: EngineClient) -> list[Finished]:
    streams = [engine.submit(add("doomed", 900)) for engine in engines]
    for stream in streams:
        assert isinstance(await anext(stream), SequenceOutput)
    assert local.pid is not None
    os.kill(local.pid, signal.SIGKILL)
    ends = [[item async for item in stream][-1] for stream in streams]
    return [end for end in ends if isinstance(end, Finished)]


@pytest.mark.campaign
def test_joined_engine_starts_and_stops_with_its_supervisor(demo_base: Path, short_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(demo_base, short_path) as local:
            assert local.socket_path == short_path / "run" / "engine.sock"
            assert (local.socket_path.stat().st_mode & 0o777, (short_path / "run").stat().st_mode & 0o777) == (
                0o600,
                0o700,
            )
            quick = Joining(first_delay_s=0.05, max_delay_s=0.1)
            joined = JoinedEngine(local.socket_path, model_sha256(demo_base), quick)
            await joined.start()
            assert joined.info == local.info

            with pytest.raises(JoinRefused, match="serves another model"):
                await JoinedEngine(local.socket_path, "0" * 64).start()

            # Both gateways use the same sequence IDs on one engine, and each gets only its own tokens.
            results = await asyncio.gather(*(collect(engine, add("same", 40)) for engine in (local, joined)))
            assert results[0] == results[1]
            assert len(results[0][0]) == 40

            # Closing one gateway ends its own sequences and no others.
            leaver = JoinedEngine(local.socket_path, model_sha256(demo_base))
            await leaver.start()
            leaving = leaver.submit(add("left behind", 900))
            await anext(leaving)
            staying = joined.submit(add("staying", 300))
            await leaver.close()
            assert isinstance([item async for item in leaving][-1], Finished)
            assert len([item async for item in staying]) > 1
            stats = await joined.call(StatsRequest(), 5.0)
            assert (stats.num_running, stats.num_waiting) == (0, 0)

            ends = await kill_while_it_runs(local, local, joined)
            assert [end.code for end in ends] == ["engine_unavailable"] * 2
            assert all(end.completion_tokens >= 1 for end in ends)
            with pytest.raises(EngineUnavailable):
                joined.submit(add("early"))
            assert joined.trouble is not None
            await until_ready(local, joined)
            # Each gateway learns which of its requests were running when the engine died, and records a strike against
            # each.
            assert joined.info is not None
            assert joined.info.ran_at_death == ("doomed",)
            assert [len(engine._strikes) for engine in (local, joined)] == [1, 1]
            assert (await collect(joined, _another()))[1].reason == "length"

            # A gateway checks adapters for the base that it first joined.
            joined._base_sha256 = "0" * 64
            with pytest.raises(JoinRefused, match="now serves other weights"):
                await joined._join()
            await joined.close()
        assert not (short_path / "run" / "engine.sock").exists()

    asyncio.run(scenario())


def _another() -> Add:
    return Add(sequence_id="other", prompt=(9, 9), max_tokens=4, sampling=SamplingParams(ignore_eos=True))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param("nothing", "there is no engine", id="nothing there"),
        pytest.param("file", "is not a socket", id="a file"),
        pytest.param("stale", "is gone", id="a socket that nobody listens on"),
        pytest.param("silent", "does not answer", id="somebody else's socket"),
        pytest.param("long", "too long", id="a path that no socket has"),
    ],
)
def test_joining_without_an_engine_is_refused_with_a_reason(make: str, said: str, short_path: Path) -> None:
    path = short_path / "engine.sock" if make != "long" else short_path / ("x" * 100)
    listener = socket.socket(socket.AF_UNIX)
    if make == "file":
        path.write_text("hello")
    elif make in ("stale", "silent"):
        listener.bind(str(path))
    if make == "silent":
        listener.listen()

    async def scenario() -> None:
        with pytest.raises(JoinRefused, match=said):
            await JoinedEngine(path, "", Joining(answer_timeout_s=0.3)).start()

    asyncio.run(scenario())
    listener.close()
