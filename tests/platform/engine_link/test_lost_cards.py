from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from loramux.engine.loop.config import EngineConfig
from loramux.engine.server.process import EXIT_DEVICE_FAILED
from loramux.platform.engine_link.local_engine import EngineStartError, LocalEngine, Supervision
from tests.platform.engine_link.supervised_engine import add, end_of, running, until

LOSING_TOKEN = 666


def engine_on(card: str, model: Path, tmp_path: Path) -> LocalEngine:
    config = EngineConfig(
        model_dir=str(model),
        blob_url=f"file://{tmp_path / 'blobs'}",
        cache_dir=str(tmp_path / "cache"),
        dtype="float32",
        pool_bytes=16 << 20,
        num_threads=1,
        max_sequences=2,
    )
    command = (sys.executable, str(Path(__file__).parent / "fake_card_engine.py"), card)
    # No engine is started again, because a start takes seconds. test_supervision.py does that.
    return LocalEngine(config, Supervision(first_delay_s=3600), command)


def test_full_gpu_fails_the_start_with_one_sentence(
    demo_base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = engine_on("full", demo_base, tmp_path)
    said = "the GPU cannot be used: CUDA error: out of memory"
    with pytest.raises(EngineStartError, match=f"^the engine did not start: {said}$"):
        asyncio.run(engine.start())
    assert capfd.readouterr().err.splitlines() == [said]


def test_lost_gpu_ends_every_stream_and_the_engine(
    demo_base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "the GPU failed: CUDA error: the device fell off the bus"

    async def scenario() -> None:
        async with running(engine_on("lost", demo_base, tmp_path)) as engine:
            streams = [
                engine.submit(add("beside", max_tokens=900)),
                engine.submit(add("losing", 5, LOSING_TOKEN)),
                engine.submit(add("waiting", 8, 9)),
            ]
            with capture_logs() as logged:
                ends = await asyncio.gather(*map(end_of, streams))
                assert [end.code for end in ends] == ["engine_unavailable"] * 3
                await until(lambda: any(entry["event"] == "engine died" for entry in logged))
            died = [entry for entry in logged if entry["event"] == "engine died"]
            assert [entry["reason"] for entry in died] == [f"exit code {EXIT_DEVICE_FAILED}: {said}"]
            assert died[0]["restart_in_s"] > 0

    asyncio.run(scenario())
    assert capfd.readouterr().err.splitlines() == [said]
