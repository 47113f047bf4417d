from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from loramux.engine.protocol.messages import EngineCall, StatsRequest
from loramux.platform.replicas.engine_group import EngineGroup
from tests.platform.cluster.test_replica_report import stats
from tests.platform.replicas.lab import until
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio


class CountingEngine(ScriptedEngine):
    """Answers each StatsRequest with the next number of steps, once `answers` is set."""

    def __init__(self, *num_steps: int) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self._num_steps = iter(num_steps)

    async def call(self, message: EngineCall[Any], timeout_s: float) -> Any:
        answer = structs.replace(stats(), num_steps=next(self._num_steps))
        await self.answers.wait()
        return answer


async def test_answers_that_wait_for_a_busy_engine_count_once() -> None:
    quick, busy = CountingEngine(5, 8), CountingEngine(100, 100)
    quick.answers.set()
    group = EngineGroup("none is ready")
    group.show({"quick": quick, "busy": busy}, None)
    first, second = (asyncio.create_task(group.call(StatsRequest(), 60.0)) for _ in range(2))
    # Both questions are answered by one engine before the other answers any.
    await until(lambda: (total := group.stats.total(["quick"])) is not None and total.num_steps == 8)
    busy.answers.set()
    totals = [(await one).num_steps for one in (first, second)]
    assert totals[-1] == 108, "no answer looks like that of an engine that has restarted"
