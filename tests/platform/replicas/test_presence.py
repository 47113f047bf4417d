from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loramux.engine.protocol.messages import Finished, SequenceOutput
from loramux.migrations.database import Database
from loramux.platform.replicas import presence, replica_book, replica_table
from loramux.platform.replicas.replica_table import ReplicaTable, Summary
from tests.platform.ready_adapters import digest_of
from tests.platform.replicas.lab import Replica, add, beat, collect, open_replica, own_row, two_replicas, until
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio


@pytest.fixture
async def replicas(
    accounts: Database, threads: ThreadPoolExecutor, short_path: Path, anyio_backend: object
) -> AsyncIterator[tuple[Replica, Replica]]:
    async with two_replicas(accounts, threads, short_path) as replicas:
        yield replicas


async def test_replicas_find_each_other_and_forward(
    clocked: Database, threads: ThreadPoolExecutor, short_path: Path
) -> None:
    async with two_replicas(clocked, threads, short_path) as (first, second):
        digest = digest_of("acme/one")
        second.scripted.resident[digest] = 1
        await beat(second, first)
        assert first.engine.holds_elsewhere(digest)
        assert not second.engine.holds_elsewhere(digest)

        tokens, end = await collect(first.engine.submit(add("forwarded", 6, digest=digest, traceparent="00-trace")))
        assert tokens == [5, 6, 7, 5, 6, 7]
        assert (end.reason, end.prompt_tokens, end.completion_tokens) == ("length", 3, 6)
        assert [one.traceparent for one in second.scripted.adds] == ["00-trace"]
        assert not first.scripted.adds
        assert first.metric("loramux_forwarded_sequences_total", outcome="completed") == 1
        assert first.router.in_flight == []

        # The row of a server that stops normally disappears at once.
        await second.presence.close()
        await beat(first)
        assert [view.id for view in first.router.views] == ["rep_a"]
        assert (await collect(first.engine.submit(add("here"))))[0] == [5, 6, 7, 5]
        assert len(first.scripted.adds) == 1


async def test_limits_reach_the_engine_that_runs_the_sequence(replicas: tuple[Replica, Replica]) -> None:
    first, second = replicas
    second.scripted.script = lambda one: Script(token_ids=tuple(range(20)), stall_after=10)
    stream = first.engine.submit(add("long", 5, pause_s=60.0))
    assert await receive(stream, 5) == [0, 1, 2, 3, 4]
    first.engine.extend("long", 15)
    # The engine stalls after ten tokens.
    assert await receive(stream, 5) == [5, 6, 7, 8, 9]
    first.engine.abort("long")
    _, end = await collect(stream)
    assert (end.reason, end.completion_tokens) == ("abort", 10)


async def receive(stream: AsyncIterator[SequenceOutput | Finished], num_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        item = await anext(stream)
        assert isinstance(item, SequenceOutput)
        tokens += item.token_ids
    return tokens


async def test_draining_replica_gets_no_new_requests_and_finishes_the_old(
    replicas: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = replicas
    second.scripted.script = lambda one: Script(token_ids=(1,) * 50, stall_after=1)
    stream = first.engine.submit(add("running", 50))
    await anext(stream)
    assert second.presence.num_relayed == 1
    second.presence.drain()
    # The time since the drain began counts, not only the time after the server's own requests have ended.
    with monkeypatch.context() as patch:
        now_s = second.presence._clock()
        patch.setattr(second.presence, "_clock", lambda: now_s + 30)
        async with asyncio.timeout(10):
            await second.presence.drained(asyncio.Event(), 30)
    assert second.presence.num_relayed == 1
    await beat(second, first)
    assert [view.id for view in first.router.views if view.is_draining] == ["rep_b"]
    assert first.metric("loramux_peers", state="draining") == 1
    await collect(first.engine.submit(add("next")))
    assert [one.sequence_id for one in first.scripted.adds] == ["next"]
    # A draining server still runs requests that it has accepted itself if no other server can.
    first.presence.drain()
    await beat(first)
    assert (await collect(first.engine.submit(add("accepted"))))[1].reason == "length"
    first.engine.abort("running")
    assert isinstance((await collect(stream))[1], Finished)
    await until(lambda: second.presence.num_relayed == 0)


async def test_draining_replica_refuses_sequences_of_servers_that_have_not_heard_of_it(
    replicas: tuple[Replica, Replica],
) -> None:
    first, second = replicas
    second.scripted.script = lambda one: Script(token_ids=(1,) * 50, stall_after=1)
    running = first.engine.submit(add("running", 50))
    await anext(running)
    second.presence.drain()
    assert (await collect(first.engine.submit(add("late"))))[1].reason == "length"
    assert [one.sequence_id for one in first.scripted.adds] == ["late"]
    assert [one.sequence_id for one in second.scripted.adds] == ["running"]
    assert first.metric("loramux_forwarded_sequences_total", outcome="moved") == 1
    first.engine.abort("running")
    assert (await collect(running))[1].reason == "abort"


async def test_without_the_database_known_replicas_stay(
    replicas: tuple[Replica, Replica], short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = replicas
    # Only the first server loses the database.
    monkeypatch.setattr(first.presence._table, "_database", Database(f"sqlite:///{short_path}/nowhere/loramux.db"))
    for _ in range(3):
        await beat(first)
    await collect(first.engine.submit(add("forwarded")))
    assert len(second.scripted.adds) == 1
    # Once the connection between the two servers has failed, too, the first server runs requests itself.
    await second.listener.close()
    await until(lambda: not first.presence._peers["rep_b"].is_ready)
    await beat(first)
    await collect(first.engine.submit(add("alone")))
    assert len(first.scripted.adds) == 1
    await first.presence.close()


async def test_database_that_hangs_holds_one_thread_and_no_request(
    replicas: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = replicas
    monkeypatch.setattr(presence, "EXCHANGE_WAIT_S", 0.01)
    answers, calls = asyncio.Event(), []
    call = first.presence._call

    async def hang(function: Callable[..., Any], *arguments: Any) -> Any:
        calls.append(function)
        await answers.wait()
        return await call(function, *arguments)

    first.presence._call = hang
    for _ in range(3):
        await beat(first)
    assert len(calls) == 1
    await collect(first.engine.submit(add("forwarded")))
    assert len(second.scripted.adds) == 1
    monkeypatch.undo()
    answers.set()
    await beat(first)
    await beat(first)
    assert len(calls) == 2, "the first beat takes the late answer"


async def test_row_of_a_killed_server_is_deleted_by_another(
    accounts: Database, threads: ThreadPoolExecutor, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_book, "FORGOTTEN_S", 8.0)
    now_s = 0.0
    table = ReplicaTable(accounts)
    async with open_replica("rep_a", accounts, threads, short_path, lambda: now_s) as first:
        table.publish(own_row("rep_killed", first.scripted), Summary(version=1, prefixes=b""), has_changed=True)
        for _ in range(6):
            assert len(table.read({}).rows) == 1 + (first.presence._own.row.beat > 0)
            await beat(first)
            now_s += 2.0
        await beat(first)
        assert [values["id"] for values in table.read({}).rows] == ["rep_a"]


async def test_other_servers_see_the_sequence_slots_of_the_engines_that_are_running(
    replicas: tuple[Replica, Replica],
) -> None:
    first, second = replicas
    for num_slots in (16, 8):
        # One of the two engines of the second server dies.
        second.scripted.figures = {"max_sequences": num_slots}
        await beat(second, first)
        [seen] = [view for view in first.router.views if view.id == "rep_b"]
        assert seen.capacity == num_slots
    second.scripted.die()
    await beat(second, first)
    [told] = [one for one in first.presence.reports() if one.id == "rep_b"]
    assert told.figures is not None
    assert told.figures.capacity == 8, "without an answer, the last number stays"


async def test_a_server_whose_engine_answers_late_still_shows_its_adapters(
    replicas: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = replicas
    digest = digest_of("acme/one")
    second.scripted.resident[digest] = 1
    await beat(second, first)

    async def late(message: object, timeout_s: float) -> None:
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(second.scripted, "call", late)
        await beat(second, first)
    assert first.engine.holds_elsewhere(digest)
    second.scripted.die()
    await beat(second)
    own = second.presence.reports()[0]
    assert own.figures is not None
    assert own.figures.num_adapters == 0


async def test_rows_of_crashes_do_not_hide_healthy_servers(
    accounts: Database, threads: ThreadPoolExecutor, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that crashes and starts again has a new name each time."""
    monkeypatch.setattr(replica_table, "MAX_REPLICAS", 4)
    async with (
        two_replicas(accounts, threads, short_path) as (first, second),
        open_replica("rep_z", accounts, threads, short_path) as crashing,
    ):
        address = crashing.presence.reports()[0].address
        for number in range(4):
            row = own_row(f"rep_y{number}", first.scripted, address=address)
            ReplicaTable(accounts).publish(row, Summary(version=1, prefixes=b""), has_changed=True)
        await beat(crashing, second, first)
        await until(lambda: crashing.presence._peers["rep_a"].is_ready and crashing.presence._peers["rep_b"].is_ready)
        await beat(crashing)
        assert sorted(view.id for view in crashing.router.views) == ["rep_a", "rep_b", "rep_z"]
