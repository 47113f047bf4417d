from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.messages import Add, Finished, Load, SamplingParams, SequenceOutput, StatsRequest
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.local_engine import LocalEngine, Supervision
from tests.platform.engine_link.supervised_engine import PATIENCE_S


def configuration(model: Path, tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        model_dir=str(model),
        blob_url=f"file://{tmp_path / 'blobs'}",
        cache_dir=str(tmp_path / "cache"),
        pool_bytes=64 << 20,
        num_threads=1,
    )


@asynccontextmanager
async def running(config: EngineConfig) -> AsyncIterator[LocalEngine]:
    # No engine is started again, because a start takes seconds. test_process_life.py does that.
    engine = LocalEngine(config, Supervision(first_delay_s=3600))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def add(name: str, max_tokens: int = 8, digest: str | None = None, pause_s: float = 0.0) -> Add:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    return Add(
        sequence_id=name,
        prompt=(5, 6, 7),
        max_tokens=max_tokens,
        sampling=sampling,
        digest=digest,
        pause_s=pause_s,
    )


async def collect(engine: LocalEngine, message: Add) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    async for item in engine.submit(message):
        if isinstance(item, Finished):
            return tokens, item
        tokens.extend(item.token_ids)
    raise AssertionError("a stream ended without Finished")


def test_engine_serves_and_ends_with_its_parent_process(demo_base: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(configuration(demo_base, tmp_path)) as engine:
            results = await asyncio.gather(*(collect(engine, add(f"s{i}", 5 + i)) for i in range(6)))
            assert [len(tokens) for tokens, _ in results] == [5, 6, 7, 8, 9, 10]
            assert all(tokens[:5] == results[0][0] for tokens, _ in results)
            stats = await engine.call(StatsRequest(), PATIENCE_S)
            assert stats.completion_tokens == 45
            assert (stats.num_running, stats.num_kv_pages) == (0, 0)

            # An adapter missing from the store fails only its own request.
            missing, good = await asyncio.gather(
                collect(engine, add("missing", digest="0" * 64)), collect(engine, add("good"))
            )
            assert missing[1].code == "adapter_unavailable"
            assert good[0][:5] == results[0][0]
            assert (await engine.call(Load(digest="1" * 64), PATIENCE_S)).state == "failed"

            # If this process is slower than the engine, the sequence waits at its limit.
            stream = engine.submit(add("long", 900, pause_s=PATIENCE_S))
            received = await anext(stream)
            assert isinstance(received, SequenceOutput)
            engine.abort("long")
            rest = [item async for item in stream]
            assert isinstance(rest[-1], Finished)
            assert (rest[-1].reason, 0 < rest[-1].completion_tokens <= 900) == ("abort", True)

            # An engine ends when its parent is gone. Its streams end with the tokens received so far, and new requests
            # are refused.
            stream = engine.submit(add("doomed", 900, pause_s=PATIENCE_S))
            await anext(stream)
            process, pid = engine._process, engine.pid
            assert process is not None
            assert process._process.stdin is not None
            process._process.stdin.close()
            rest = [item async for item in stream]
            assert isinstance(rest[-1], Finished)
            assert (rest[-1].reason, rest[-1].code) == ("error", "engine_unavailable")
            assert rest[-1].completion_tokens >= 1
            async with asyncio.timeout(PATIENCE_S):
                assert await process.wait() == 0
            with pytest.raises(EngineUnavailable):
                engine.submit(add("early"))
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(scenario())
