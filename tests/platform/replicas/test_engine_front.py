from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from msgspec import structs

from loramux.engine.protocol.messages import (
    Credit,
    EngineReady,
    Finished,
    FromEngine,
    Heartbeat,
    Load,
    Rejected,
    SamplingParams,
    SequenceOutput,
    StatsRequest,
    StepOutput,
    ToEngine,
)
from loramux.engine.server import gateway_link
from loramux.platform.engine_link.engine_connection import EngineConnection
from loramux.platform.engine_link.engine_socket import EngineSocketDirectory
from loramux.platform.replicas.data_parallel import DataParallelEngines
from loramux.platform.replicas.engine_front import EngineFront
from tests.platform.ready_adapters import digest_of
from tests.platform.replicas.lab import PATIENCE_S, ChosenRouter, add, collect, until
from tests.platform.replicas.test_routed_engine import LosableEngine
from tests.platform.scripted_engine import Script, ScriptedEngine

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def fronted(
    directory: Path, first: ScriptedEngine, second: ScriptedEngine
) -> AsyncIterator[tuple[EngineFront, EngineConnection]]:
    """A front of two engines, of which the router prefers the first, and a connection of another server to it."""
    several = DataParallelEngines({"engine-0": first, "engine-1": second}, lambda: ChosenRouter(["engine-0"]))
    await several.beat()
    front = EngineFront(several.engine, EngineSocketDirectory(directory / "run"))
    front.open()
    connection = await EngineConnection.open(front.socket_path, lambda add, end: None)
    try:
        yield front, connection
    finally:
        connection.close(frozenset())
        await front.close()
        await front.close()
        await several.close()
    assert not front.socket_path.exists()


async def test_another_server_uses_the_engines_as_one(tmp_path: Path) -> None:
    first, second = ScriptedEngine(), ScriptedEngine()
    second.resident[digest_of("a")] = 1
    async with fronted(tmp_path, first, second) as (front, connection):
        assert front.is_ready
        assert front.socket_path.stat().st_mode & 0o077 == 0
        tokens, end = await collect(connection.submit(add("one", 5)))
        assert (tokens, end.sequence_id, end.reason) == ([5, 6, 7, 5, 6], "one", "length")
        stats = await connection.call(StatsRequest(), 5.0)
        assert (stats.num_pages, stats.num_adapter_pages) == (128, 1)
        assert (await connection.call(Load(digest=digest_of("a")), 5.0)).state == "resident"
        assert not first.resident, "the engine that holds the adapter was asked"


async def test_sequences_end_extend_and_move_as_without_a_front(tmp_path: Path) -> None:
    first, second = LosableEngine(), ScriptedEngine(lambda add: Script(token_ids=(1,) * 9, stall_after=3))
    async with fronted(tmp_path, first, second) as (_, connection):
        started, waiting = connection.submit(add("started")), connection.submit(add("waiting", 9))
        await until(lambda: len(first.streams) == 2)
        first.streams[0].put(SequenceOutput(sequence_id=first.adds[0].sequence_id, token_ids=(7,)))
        assert isinstance(await anext(started), SequenceOutput)
        first.lose()
        assert (await collect(started))[1].code == "engine_unavailable"
        # The other sequence runs on the other engine, which stalls.
        received = 0
        while received < 3:
            item = await anext(waiting)
            assert isinstance(item, SequenceOutput)
            received += len(item.token_ids)
        connection.extend("waiting", 20)
        await until(lambda: [one.max_tokens for one in second.extensions] == [20])
        connection.abort("waiting")
        assert (await collect(waiting))[1].reason == "abort"
        second.die()
        assert (await collect(connection.submit(add("late"))))[1].prompt_tokens == 0


async def test_sequences_of_a_lost_server_end_and_those_of_others_stay(tmp_path: Path) -> None:
    first, second = ScriptedEngine(lambda add: Script(token_ids=(1,) * 9, stall_after=1)), ScriptedEngine()
    async with fronted(tmp_path, first, second) as (front, connection):
        other = await EngineConnection.open(front.socket_path, lambda add, end: None)
        # Both servers use the same name. Neither can abort the sequence of the other.
        kept = connection.submit(add("same"))
        # Messages of two connections may arrive in any order.
        await until(lambda: len(first.adds) == 1)
        other.submit(add("same"))
        await until(lambda: len(first.adds) == 2)
        assert len({one.sequence_id for one in first.adds}) == 2
        lost = first.adds[1].sequence_id
        other.close(frozenset())
        await until(lambda: [one.sequence_id for one in first.aborts] == [lost])
        assert first.num_running >= 1
        connection.abort("same")
        assert (await collect(kept))[1].reason == "abort"


async def test_without_credit_tokens_are_held_and_merged(tmp_path: Path) -> None:
    first = ScriptedEngine(
        lambda add: Script(token_ids=(1,) * 50, stall_after=0 if add.sequence_id.endswith("stalled") else None)
    )
    async with fronted(tmp_path, first, ScriptedEngine()) as (front, _):
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(f"ipc://{front.socket_path}")

            async def send(message: ToEngine) -> None:
                await socket.send(msgspec.msgpack.encode(message))

            async def received() -> FromEngine:
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        message = msgspec.msgpack.decode(await socket.recv(), type=FromEngine)
                        if not isinstance(message, Heartbeat):
                            return message

            await send(Credit(count=1))
            assert isinstance(await received(), EngineReady)
            await socket.send(b"no message")
            assert isinstance(await received(), Rejected)
            await send(add("stalled"))
            await send(add("stalled"))
            assert isinstance(await received(), Rejected)
            await send(add("one", 50))
            assert isinstance(await received(), StepOutput)
            await until(lambda: first.num_running == 1)
            await send(Credit(count=1))
            rest = await received()
            assert isinstance(rest, StepOutput)
            assert [len(output.token_ids) for output in rest.outputs] == [49]
            assert isinstance(await received(), Finished)


async def test_an_output_of_many_steps_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other servers refuse long messages."""
    max_bytes = 1000
    monkeypatch.setattr(gateway_link, "MAX_OUTPUT_BYTES", max_bytes)
    sent: list[int] = []
    send = EngineFront.send

    def noted(self: EngineFront, owner: bytes, message: FromEngine) -> None:
        sent.append(len(msgspec.msgpack.encode(message)))
        send(self, owner, message)

    async with fronted(tmp_path, ScriptedEngine(), ScriptedEngine()) as (_, connection):
        monkeypatch.setattr(EngineFront, "send", noted)
        scored = structs.replace(
            add("scored"), prompt=tuple(range(200)), sampling=SamplingParams(num_prompt_logprobs=0)
        )
        num_scores = 0
        async with asyncio.timeout(PATIENCE_S):
            async for item in connection.submit(scored):
                if isinstance(item, SequenceOutput):
                    num_scores += len(item.prompt_logprobs)
    assert num_scores == 199
    assert max(sent) <= max_bytes


async def test_messages_that_arrive_while_output_is_sent_are_received(tmp_path: Path) -> None:
    """Sending must not consume the event that tells the front of a message."""
    first = ScriptedEngine(lambda add: Script(token_ids=(1,) * add.max_tokens, delay_s=0.001))
    async with fronted(tmp_path, first, ScriptedEngine()) as (front, connection):
        other = await EngineConnection.open(front.socket_path, lambda add, end: None)

        async def ask(server: EngineConnection, number: int) -> int:
            num_tokens = 0
            for turn in range(5):
                tokens, _ = await collect(server.submit(add(f"{number}-{turn}", 20 + number)))
                num_tokens += len(tokens)
                await server.call(StatsRequest(), PATIENCE_S)
            return num_tokens

        async with asyncio.timeout(PATIENCE_S):
            asked = [ask(server, number) for server in (connection, other) for number in range(12)]
            assert sum(await asyncio.gather(*asked)) == 2 * 5 * sum(20 + number for number in range(12))
        other.close(frozenset())
