"""Both ways of reaching an engine are measured, and a lost connection ends the run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.answers import RunFailed
from benchmarks.sharing.forwarding import Sample, main, run_clients
from loramux.platform.engine_link.engine_connection import EngineConnection


@pytest.mark.campaign
def test_both_ways_are_measured(short_path: Path) -> None:
    out = short_path / "forwarding.json"
    small = ["--clients", "2", "--requests", "2", "--tokens", "8", "--rounds", "1"]
    assert main([*small, "--allow-busy", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == ["own engine", "another server"]
    assert [row["request"]["count"] for row in rows] == [4, 4]
    # On a busy machine, tokens that arrive late come in one chunk.
    assert all(2 <= row["chunk"]["count"] <= 4 * 7 for row in rows)
    assert all(0 < row[kind]["p50_us"] < 60e6 for row in rows for kind in ("request", "chunk"))


def test_a_lost_connection_ends_the_run(short_path: Path) -> None:
    path = short_path / "engine.sock"
    engine = subprocess.Popen([sys.executable, "-m", "benchmarks.sharing.stamping_engine", "{}", str(path)])

    async def lose() -> None:
        async with asyncio.timeout(60):
            session = await EngineConnection.open(path, lambda *_: None)
            engine.kill()
            with pytest.raises(RunFailed, match="a connection ended"):
                await run_clients(session, 1, 1, 2, Sample([], []), 60.0)
            session.close(frozenset())

    try:
        asyncio.run(lose())
    finally:
        engine.kill()
        engine.wait()


def test_a_run_without_an_end_fails(short_path: Path) -> None:
    path = short_path / "engine.sock"
    script = '{"interval_s": 1000.0}'
    engine = subprocess.Popen([sys.executable, "-m", "benchmarks.sharing.stamping_engine", script, str(path)])

    async def wait() -> None:
        session = await EngineConnection.open(path, lambda *_: None)
        with pytest.raises(RunFailed, match="no end after 0 s"):
            await run_clients(session, 1, 1, 2, Sample([], []), 0.2)
        session.close(frozenset())

    try:
        asyncio.run(wait())
    finally:
        engine.kill()
        engine.wait()
