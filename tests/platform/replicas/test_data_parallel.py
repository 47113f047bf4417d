from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from loramux.adapter_store.tiers.tier_figures import LoadCounts, TierCounts
from loramux.engine.protocol.messages import (
    AdapterChange,
    AnswerT,
    EngineCall,
    Load,
    Pin,
    SequenceOutput,
    Stats,
    StatsRequest,
    Unload,
)
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.replicas.data_parallel import DataParallelEngines
from loramux.platform.replicas.reports import UnknownReplica
from loramux.platform.routing.router import Router
from tests.platform.ready_adapters import digest_of
from tests.platform.replicas.lab import ChosenRouter, add, collect, until
from tests.platform.replicas.test_routed_engine import LosableEngine
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio

CALL_S = 5.0


class ChangingEngine(ScriptedEngine):
    """An engine that reports changes to its adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[AdapterChange] = []

    def change(self, number: int, name: str, kind: str) -> None:
        digest = digest_of(name)
        self.changes.append(AdapterChange(number=number, digest=digest, kind=kind))
        if kind == "loaded":
            self.resident[digest] = 1
        else:
            self.resident.pop(digest, None)

    async def call(self, message: EngineCall[AnswerT], timeout_s: float) -> AnswerT:
        if isinstance(message, StatsRequest) and message.changes_after is not None:
            after = message.changes_after
            is_own = not self.changes or after <= self.changes[-1].number
            self.figures = {"changes": tuple(one for one in self.changes if one.number > after or not is_own)}
        return await super().call(message, timeout_s)


@pytest.fixture
async def chosen() -> AsyncIterator[tuple[DataParallelEngines, ChosenRouter, LosableEngine, ScriptedEngine]]:
    """Two engines. The router prefers the first, which can be lost."""
    router = ChosenRouter(["engine-0"])
    first, second = LosableEngine(), ScriptedEngine()
    engines = DataParallelEngines({"engine-0": first, "engine-1": second}, lambda: router)
    await engines.follow()
    yield engines, router, first, second
    await engines.close()


async def test_unstarted_sequences_of_a_dead_engine_run_on_the_other(
    chosen: tuple[DataParallelEngines, ChosenRouter, LosableEngine, ScriptedEngine],
) -> None:
    engines, router, first, second = chosen
    started, waiting = engines.engine.submit(add("started")), engines.engine.submit(add("waiting"))
    first.streams[0].put(SequenceOutput(sequence_id="started", token_ids=(7,)))
    assert isinstance(await anext(started), SequenceOutput)
    first.lose()
    assert (await collect(started))[1].code == "engine_unavailable"
    assert (await collect(waiting))[1].reason == "length"
    assert [one.sequence_id for one in second.adds] == ["waiting"]
    assert engines.engine.is_ready
    assert engines.engine.is_own_ready
    assert engines.engine.trouble is None
    assert engines.capacity() == 16
    # Until the next beat, the router may still choose the dead engine. The sequence runs on the other.
    assert (await collect(engines.engine.submit(add("next"))))[1].reason == "length"
    first.revive()
    await until(lambda: {one.id for one in router.views} == {"engine-0", "engine-1"})
    first.streams.clear()
    engines.engine.submit(add("again"))
    assert [one.add.sequence_id for one in first.streams] == ["again"]


async def test_without_a_ready_engine_requests_are_refused_with_the_reason_of_each(
    chosen: tuple[DataParallelEngines, ChosenRouter, LosableEngine, ScriptedEngine],
) -> None:
    engines, _, first, second = chosen
    first.die()
    second.die()
    await engines.beat()
    assert not engines.engine.is_ready
    assert not engines.engine.is_own_ready
    assert engines.engine.info is None
    reason = "killed by SIGKILL: last words"
    assert engines.engine.trouble == f"no engine is ready: engine-0: {reason}; engine-1: {reason}"
    with pytest.raises(EngineUnavailable, match="no engine is ready"):
        engines.engine.submit(add("one"))
    for message in (StatsRequest(), Load(digest=digest_of("a")), Pin(digest=digest_of("a"))):
        with pytest.raises(EngineUnavailable, match="no engine is ready"):
            await engines.engine.call(message, CALL_S)
    assert [(one.state, one.reason, one.figures) for one in engines.reports()] == [("unreachable", reason, None)] * 2


async def test_server_with_a_hung_engine_is_not_live(
    chosen: tuple[DataParallelEngines, ChosenRouter, LosableEngine, ScriptedEngine],
) -> None:
    engines, _, first, _ = chosen
    assert engines.engine.is_live
    first.is_live = False
    assert not engines.engine.is_live


async def test_requests_follow_an_adapter_that_was_just_loaded() -> None:
    """The next beat would be too late: the first requests for a pushed version arrive at once."""
    found = {f"engine-{number}": ScriptedEngine() for number in range(4)}
    engines = DataParallelEngines(found, lambda: Router(clock=time.monotonic, random=Random(1)))
    await engines.beat()
    for name in map(str, range(12)):
        digest = digest_of(name)
        assert (await engines.engine.call(Load(digest=digest), CALL_S)).state == "resident"
        [holder] = [engine for engine in found.values() if digest in engine.resident]
        await collect(engines.engine.submit(add(name, digest=digest)))
        assert holder.adds[-1].sequence_id == name
        # A second load finds the engine that has it.
        await engines.engine.call(Load(digest=digest), CALL_S)
        assert sum(digest in engine.resident for engine in found.values()) == 1
    assert len([engine for engine in found.values() if engine.resident]) > 1, "adapters are spread"
    await engines.close()


async def test_pins_and_unloads_reach_every_ready_engine(
    chosen: tuple[DataParallelEngines, ChosenRouter, LosableEngine, ScriptedEngine],
) -> None:
    engines, _, first, second = chosen
    digest = digest_of("a")
    second.die()
    await engines.engine.call(Pin(digest=digest), CALL_S)
    second.revive()
    [adapter] = (await engines.engine.call(StatsRequest(), CALL_S)).adapters
    assert not adapter.is_pinned, "the restarted engine must be told again"
    await engines.engine.call(Pin(digest=digest), CALL_S)
    assert (first.pinned, second.pinned) == ({digest}, {digest})
    [adapter] = (await engines.engine.call(StatsRequest(), CALL_S)).adapters
    assert adapter.is_pinned
    await engines.engine.call(Unload(digest=digest, is_purge=True), CALL_S)
    assert (first.purged, second.purged) == ([digest], [digest])


async def test_reports_and_statistics_are_those_of_each_engine(
    chosen: tuple[DataParallelEngines, ChosenRouter, LosableEngine, ScriptedEngine],
) -> None:
    engines, _, _, second = chosen
    second.resident[digest_of("a")] = 3
    second.num_waiting = 5
    await engines.beat()
    one, other = engines.reports()
    assert (one.id, one.address, one.is_own, one.state) == ("engine-0", "cpu", True, "serving")
    assert other.figures is not None
    assert (other.figures.num_waiting, other.figures.num_adapters, other.figures.num_free_pages) == (5, 1, 64)
    assert (await engines.stats_of("engine-1", CALL_S, with_tiers=False)).num_adapter_pages == 3
    total = await engines.engine.call(StatsRequest(), CALL_S)
    assert (total.num_pages, total.num_adapter_pages) == (128, 3)
    with pytest.raises(UnknownReplica):
        await engines.stats_of("engine-2", CALL_S, with_tiers=False)


async def test_disk_tier_of_all_engines_counts_once(
    chosen: tuple[DataParallelEngines, ChosenRouter, LosableEngine, ScriptedEngine],
) -> None:
    engines, _, *both = chosen
    for engine in both:
        engine.resident[digest_of("a")] = 1
        tiers = tuple(
            TierCounts(tier=tier, num_hits=1, num_misses=0, num_evictions=0, used_bytes=7)  # type: ignore[arg-type]
            for tier in ("host", "disk")
        )
        engine.figures = {"loading": LoadCounts(tiers=tiers)}
    stats: Stats = await engines.engine.call(StatsRequest(with_tiers=True), CALL_S)
    one = await both[0].call(StatsRequest(with_tiers=True), CALL_S)
    assert [tier.used_bytes for tier in stats.loading.tiers] == [14, 7]
    assert [tier.num_hits for tier in stats.loading.tiers] == [2, 2]
    host, disk = stats.tiers
    assert (host.used_bytes, host.max_bytes) == (2 * one.tiers[0].used_bytes, 2 * one.tiers[0].max_bytes)
    assert (disk.used_bytes, disk.max_bytes) == (one.tiers[1].used_bytes, one.tiers[1].max_bytes)
    assert (disk.num_adapters, len(disk.adapters)) == (1, 1)


async def test_changes_of_all_engines_are_told_once_in_the_numbers_of_the_group() -> None:
    first, second = ChangingEngine(), ChangingEngine()
    engines = DataParallelEngines({"engine-0": first, "engine-1": second}, ChosenRouter)
    await engines.beat()

    async def told(after: int = 0) -> Sequence[AdapterChange]:
        return (await engines.engine.call(StatsRequest(changes_after=after), CALL_S)).changes

    # The engines number their changes independently.
    first.change(900, "a", "loaded")
    second.change(10, "b", "loaded")
    second.change(11, "a", "loaded")
    changes = await told()
    assert [(one.digest, one.kind) for one in changes] == [(digest_of(name), "loaded") for name in ("a", "b", "a")]
    assert await told(changes[-1].number) == ()
    assert await told() == changes, "a report that failed is repeated"
    # The adapter leaves one engine, and then the other.
    second.change(12, "a", "evicted")
    assert await told(changes[-1].number) == ()
    first.change(901, "a", "evicted")
    [gone] = await told(changes[-1].number)
    assert (gone.digest, gone.kind) == (digest_of("a"), "evicted")
    assert gone.number > changes[-1].number
    # The engine restarts after the clock was set back.
    first.changes.clear()
    first.change(500, "c", "loaded")
    [loaded] = await told(gone.number)
    assert (loaded.digest, loaded.kind) == (digest_of("c"), "loaded")
    assert loaded.number > gone.number
    await engines.close()


async def test_an_engine_that_answers_late_keeps_its_last_report() -> None:
    class LateEngine(ScriptedEngine):
        is_late = False

        async def call(self, message: EngineCall[AnswerT], timeout_s: float) -> AnswerT:
            if self.is_late:
                raise TimeoutError
            return await super().call(message, timeout_s)

    late, router = LateEngine(), ChosenRouter()
    late.resident[digest_of("a")] = 1
    engines = DataParallelEngines({"engine-0": late, "engine-1": ScriptedEngine()}, lambda: router)
    await engines.beat()
    before: Any = router.views[0]
    late.is_late = True
    await engines.beat()
    assert router.views[0] == before
    assert msgspec.structs.asdict(await engines.engine.call(StatsRequest(), CALL_S))["num_pages"] == 128
    await engines.close()
