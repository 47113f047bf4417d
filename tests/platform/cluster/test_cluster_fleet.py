from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loramux.engine.protocol.messages import (
    AdapterState,
    EngineCall,
    Finished,
    ForgetPrefixes,
    Load,
    Pin,
    SequenceOutput,
    StatsRequest,
    Unload,
)
from loramux.platform.cluster.replica_report import HeldState
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.replicas.reports import UnknownReplica
from loramux.platform.replicas.residency import summarise
from loramux.platform.routing.views import digest_prefix
from tests.platform.cluster.calls_here import Cluster, open_cluster
from tests.platform.ready_adapters import digest_of
from tests.platform.replicas.lab import PATIENCE_S, add, collect, until
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio


async def ready(cluster: Cluster, number: int) -> None:
    """Beat until the router knows `number` replicas."""

    def are_known() -> bool:
        cluster.fleet.beat()
        return len([view for view in cluster.router.views if not view.is_draining]) == number

    await until(are_known)


async def test_a_sequence_runs_on_the_chosen_replica(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        first, second = cluster.calls.open("first"), cluster.calls.open("second")
        await ready(cluster, 2)
        cluster.router.wanted = ["second"]
        tokens, end = await collect(cluster.engine.submit(add("a", max_tokens=5)))
        assert (len(tokens), end.reason, end.completion_tokens) == (5, "length", 5)
        assert [one.sequence_id for one in second.scripted.adds] == ["a"]
        assert not first.scripted.adds
        assert cluster.metric("loramux_forwarded_sequences_total", outcome="completed") == 1
        assert cluster.router.in_flight == []


async def test_calls_that_arrive_twice_count_once(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        replica = cluster.calls.open("only")
        cluster.calls.sends_twice = True
        await ready(cluster, 1)
        ends = await asyncio.gather(*(collect(cluster.engine.submit(add(str(n), max_tokens=3))) for n in range(20)))
        assert all(end.completion_tokens == 3 for _, end in ends)
        assert len(replica.scripted.adds) == 20


async def test_without_replicas_requests_are_refused_with_the_reason(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        cluster.fleet.beat()
        assert not cluster.engine.is_ready
        assert cluster.engine.trouble == "the cluster runs no replica: start them with 'loramux cluster up'"
        with pytest.raises(EngineUnavailable):
            cluster.engine.submit(add("a"))
        with pytest.raises(EngineUnavailable):
            await cluster.engine.call(StatsRequest(), 1.0)


async def test_a_killed_replica_ends_started_sequences_and_moves_the_others(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        doomed, other = cluster.calls.open("doomed"), cluster.calls.open("other")
        doomed.scripted.script = lambda sequence: Script(
            token_ids=(1,) * 5, stall_after=2 if sequence.sequence_id == "started" else 0
        )
        await ready(cluster, 2)
        cluster.router.wanted = ["doomed"]
        started = aiter(cluster.engine.submit(add("started", max_tokens=5)))
        waiting = asyncio.ensure_future(collect(cluster.engine.submit(add("waiting", max_tokens=5))))
        received = 0
        while received < 2:
            output = await anext(started)
            assert isinstance(output, SequenceOutput)
            received += len(output.token_ids)
        await until(lambda: len(doomed.scripted.adds) == 2)
        cluster.calls.kill("doomed")
        end = await anext(started)
        assert isinstance(end, Finished)
        assert (end.code, end.completion_tokens) == ("engine_unavailable", 2)
        tokens, end = await waiting
        assert (len(tokens), end.reason) == (5, "length")
        assert [one.sequence_id for one in other.scripted.adds] == ["waiting"]
        assert cluster.metric("loramux_forwarded_sequences_total", outcome="moved") == 1
        assert cluster.router.in_flight == []


async def test_a_replica_that_is_stopped_still_runs_what_it_has(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        stopping, other = cluster.calls.open("stopping"), cluster.calls.open("other")
        stopping.scripted.script = lambda sequence: Script(token_ids=(1,) * 6)
        await ready(cluster, 2)
        cluster.router.wanted = ["stopping"]
        # The sequence pauses at its limit until the gateway raises it.
        stream = aiter(cluster.engine.submit(add("long", max_tokens=4, pause_s=30.0)))
        assert isinstance(await anext(stream), SequenceOutput)
        cluster.calls.stop("stopping")
        assert cluster.calls.kept == {"stopping", "other"}
        await collect(cluster.engine.submit(add("new")))
        assert [one.sequence_id for one in other.scripted.adds] == ["new"]
        states = {report.id: report.state for report in cluster.fleet.reports()}
        assert states == {"other": "serving", "stopping": "draining"}
        cluster.engine.extend("long", 8)
        items = [item async for item in stream]
        assert isinstance(items[-1], Finished)
        assert (items[-1].reason, items[-1].completion_tokens) == ("stop", 7)
        cluster.fleet.beat()
        assert [report.id for report in cluster.fleet.reports()] == ["other"]
        # The replica may end now, because no session with it is open.
        await until(lambda: cluster.calls.kept == {"other"})


async def test_a_replica_that_is_stopped_takes_requests_until_another_is_ready(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        old = cluster.calls.open("old")
        await ready(cluster, 1)
        # As in a rolling change: the cluster lists the new replica before the gateway has connected to it.
        new = cluster.calls.open("new")
        cluster.calls.stop("old")
        await collect(cluster.engine.submit(add("a")))
        assert len(old.scripted.adds) == 1
        await until(lambda: any(view.id == "new" for _ in [cluster.fleet.beat()] for view in cluster.router.views))
        await collect(cluster.engine.submit(add("b")))
        assert len(new.scripted.adds) == 1
        cluster.fleet.beat()
        assert [report.id for report in cluster.fleet.reports()] == ["new"]
        # Without other replicas, nobody needs it any more, and the cluster can be stopped.
        cluster.calls.stop("new")
        assert cluster.fleet.reports() == []


async def test_a_new_replica_gets_requests_at_once(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        cluster.calls.open("old")
        await ready(cluster, 1)
        new = cluster.calls.open("new")
        await ready(cluster, 2)
        cluster.router.wanted = ["new"]
        await collect(cluster.engine.submit(add("a")))
        assert len(new.scripted.adds) == 1


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        ({"version": "9.9"}, "it runs loramux 9.9, but this gateway runs "),
        ({"protocol": 1}, "it speaks protocol 1, but this gateway speaks "),
        ({"base_id": "other"}, "it serves another base model than this gateway"),
        ({"base": "other"}, "it serves the base in another dtype, quantisation or page size than the replicas in use"),
        ({"capacity": 0}, "it is no replica of loramux, or runs another version of loramux"),
    ],
    ids=["version", "protocol", "base", "dtype", "malformed"],
)
async def test_a_replica_that_would_answer_otherwise_is_refused(
    short_path: Path, identity: dict[str, object], reason: str
) -> None:
    async with open_cluster(short_path) as cluster:
        cluster.calls.open("good")
        await ready(cluster, 1)
        bad = cluster.calls.open("bad", **identity)
        await ready(cluster, 1)
        (report,) = [one for one in cluster.fleet.reports() if one.id == "bad"]
        assert report.state == "refused"
        assert report.reason is not None
        assert report.reason.startswith(reason)
        assert cluster.metric("loramux_peers", state="refused") == 1
        await collect(cluster.engine.submit(add("a")))
        assert not bad.scripted.adds


async def test_a_replica_whose_engine_is_not_what_it_reports_is_not_used(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        cluster.calls.open("liar", base="other")
        await until(lambda: any("different base" in (cluster.engine.trouble or "") for _ in [cluster.fleet.beat()]))
        assert not cluster.engine.is_ready


async def test_a_rolled_out_change_of_dtype_moves_all_requests_to_the_new_replicas(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        cluster.calls.open("old")
        await ready(cluster, 1)
        new = cluster.calls.open("new")
        new.scripted.quantization = "int8"
        # The new replica reports its own engine's fingerprint.
        new.identity = type(new.identity).of(new.scripted.info, 8)  # type: ignore[arg-type]
        cluster.calls.list()
        assert {one.id: one.state for one in cluster.fleet.reports()}["new"] == "refused"
        cluster.calls.stop("old")
        await until(lambda: any(view.id == "new" for _ in [cluster.fleet.beat()] for view in cluster.router.views))
        await collect(cluster.engine.submit(add("a")))
        assert len(new.scripted.adds) == 1


async def test_the_router_sees_what_replicas_report(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        replica = cluster.calls.open("only")
        replica.state = HeldState(holds=summarise([digest_of("a")]), num_sequences=10, num_free_pages=32)
        await ready(cluster, 1)
        cluster.calls.list()
        (view,) = cluster.router.views
        assert view.holds == {digest_prefix(digest_of("a"))}
        assert (view.num_running, view.num_waiting, view.pages_free_fraction) == (8, 2, 0.5)
        # A report that no replica writes is ignored.
        replica.state = HeldState(holds=b"cut")
        cluster.calls.list()
        assert cluster.router.views[0].holds == {digest_prefix(digest_of("a"))}
        assert cluster.metric("loramux_replica_refusals_total", reason="summary") == 1


async def test_statistics_are_added_up_and_never_decrease(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        cluster.calls.open("first")
        cluster.calls.open("second")
        await ready(cluster, 2)
        for name in ("first", "second"):
            cluster.router.wanted = [name]
            await collect(cluster.engine.submit(add(name, max_tokens=5)))
        stats = await cluster.engine.call(StatsRequest(), PATIENCE_S)
        assert stats.completion_tokens == 10
        assert stats.num_pages == 128
        one = await cluster.fleet.stats_of("first", PATIENCE_S, with_tiers=False)
        assert one.completion_tokens == 5
        cluster.calls.kill("first")
        await ready(cluster, 1)
        stats = await cluster.engine.call(StatsRequest(), PATIENCE_S)
        assert (stats.completion_tokens, stats.num_pages) == (10, 64)
        with pytest.raises(UnknownReplica):
            await cluster.fleet.stats_of("first", PATIENCE_S, with_tiers=False)


async def test_an_adapter_is_loaded_on_one_replica_and_unloaded_and_pinned_on_all(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        replicas = [cluster.calls.open(name) for name in ("first", "second", "third")]
        await ready(cluster, 3)
        digest = digest_of("a")
        state = await cluster.engine.call(Load(digest=digest), PATIENCE_S)
        assert state.state == "resident"
        assert sum(digest in one.scripted.resident for one in replicas) == 1
        await cluster.engine.call(Pin(digest=digest), PATIENCE_S)
        assert all(digest in one.scripted.pinned for one in replicas)
        stats = await cluster.engine.call(StatsRequest(), PATIENCE_S)
        assert [(one.digest, one.is_pinned) for one in stats.adapters] == [(digest, True)]
        await cluster.engine.call(Unload(digest=digest), PATIENCE_S)
        assert not any(digest in one.scripted.resident for one in replicas)


@pytest.mark.parametrize(
    "purge", [ForgetPrefixes(isolation_keys=(b"x",)), Unload(digest=digest_of("a"), is_purge=True)]
)
async def test_a_purge_is_incomplete_while_a_replica_cannot_be_reached(
    short_path: Path, purge: EngineCall[AdapterState]
) -> None:
    async with open_cluster(short_path) as cluster:
        first, second = (cluster.calls.open(name) for name in ("first", "second"))
        await ready(cluster, 2)
        second.served.die()
        await ready(cluster, 1)
        with pytest.raises(EngineUnavailable):
            await cluster.engine.call(purge, PATIENCE_S)
        assert first.scripted.forgotten_prefixes + first.scripted.purged, "the others have purged it"
        await cluster.engine.call(Unload(digest=digest_of("b")), PATIENCE_S)
        cluster.calls.stop("second")
        assert (await cluster.engine.call(purge, PATIENCE_S)).state == "absent", "a replica that ends loses its pages"


async def test_an_engine_that_is_restarted_is_joined_again(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        replica = cluster.calls.open("only")
        await ready(cluster, 1)
        replica.served.die()
        await until(lambda: not cluster.engine.is_ready)
        replica.served.revive()
        await ready(cluster, 1)
        _, end = await collect(cluster.engine.submit(add("a", max_tokens=3)))
        assert end.completion_tokens == 3


async def test_a_request_that_killed_engines_of_two_replicas_runs_on_no_other(short_path: Path) -> None:
    async with open_cluster(short_path) as cluster:
        replicas = {name: cluster.calls.open(name) for name in ("first", "second", "third")}
        await ready(cluster, 3)

        async def kill(name: str) -> None:
            replica = replicas[name]
            cluster.router.wanted = [name]
            replica.scripted.script = lambda one: Script(token_ids=(1,), stall_after=0)
            running = asyncio.create_task(collect(cluster.engine.submit(add(name))))
            await until(lambda: replica.scripted.num_running == 1)
            replica.served.die(ran=frozenset({name}))
            assert (await running)[1].code == "engine_unavailable"

        for number, name in enumerate(("first", "second")):
            await kill(name)
            await ready(cluster, 2 - number)
        _, end = await collect(cluster.engine.submit(add("again")))
        assert end.code == "request_excluded"
        assert not replicas["third"].scripted.adds
