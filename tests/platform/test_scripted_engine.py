from __future__ import annotations

import pytest

from loramux.engine.protocol.messages import Load, StatsRequest, Unload
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio


async def test_fake_engine_reports_like_a_real_one() -> None:
    engine = ScriptedEngine()
    assert (await engine.call(Load(digest="d" * 64), 1)).state == "resident"
    stats = await engine.call(StatsRequest(), 1)
    assert [adapter.digest for adapter in stats.adapters] == ["d" * 64]
    assert stats.num_free_pages == stats.num_pages - 1
    assert (await engine.call(Unload(digest="d" * 64), 1)).state == "absent"
    await engine.close()
    assert engine.info is None
