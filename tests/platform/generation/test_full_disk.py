from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.admission.group_commit import GroupCommit
from loramux.platform.admission.records import Closing, Extension, ReservationRequest
from loramux.platform.generation import generation, maintenance, plan
from loramux.platform.generation.settlement_spool import LEFT, SettlementSpool
from loramux.platform.generation.settler import Settler
from loramux.platform.ledger.events import Ledger
from loramux.platform.requests import planning
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway
from tests.platform.generation.refusing_postgres import refusing
from tests.platform.generation.troubled_gateway import (
    NUM_TOKENS,
    PATIENCE_S,
    assert_all_is_settled,
    hold_streams,
    is_ready,
    is_refused,
    is_whole,
    maintained,
    until_ready,
    until_streaming,
)
from tests.platform.scripted_engine import Script
from tests.platform.small_disk import MountedDisk, SmallDisk, small_disk

pytestmark = pytest.mark.anyio

NUM_STREAMS = 3
CHUNK = 8
"""Tokens granted to a chat at a time."""
EXTEND_AHEAD = 4
"""A chat asks for more when it has this many tokens left."""


@pytest.fixture(autouse=True)
def _tended_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "TEND_INTERVAL_S", 0.02)
    # Checkpoints and folds run only when a test asks for them.
    monkeypatch.setattr(maintenance, "CHECKPOINT_INTERVAL_S", 3600)
    monkeypatch.setattr(planning, "CHUNK_TOKENS", CHUNK)
    monkeypatch.setattr(generation, "CHUNK_TOKENS", CHUNK)
    monkeypatch.setattr(generation, "EXTEND_AHEAD_TOKENS", EXTEND_AHEAD)
    monkeypatch.setattr(plan, "PAUSE_S", 0.1)


@pytest.fixture
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    with small_disk(request.param, monkeypatch) as disk:
        yield disk


@dataclass(slots=True)
class Lab:
    gateway: Gateway
    disk: SmallDisk
    streams: list[asyncio.Task[Any]] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    async def ask(self, **body: Any) -> Any:
        body = body or {"prompt": "a", "max_tokens": NUM_TOKENS}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        body |= {"model": "base", "stream": True, "stream_options": {"include_usage": True}}
        answer = await self.gateway.http.post(path, json=body, timeout=PATIENCE_S)
        self.answers.append(answer)
        return answer

    def stream(self, **body: Any) -> None:
        self.streams += [asyncio.create_task(self.ask(**body)) for _ in range(NUM_STREAMS)]

    def fill_before(self, operation: type, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
        """Fill the disk when the first operation of this type is submitted to the database."""
        commit, is_full = self.gateway.services.run.commit, asyncio.Event()
        submit = commit.submit

        def filling(submitted: Any) -> Any:
            if isinstance(submitted, operation) and not is_full.is_set():
                self.disk.fill()
                is_full.set()
            return submit(submitted)

        monkeypatch.setattr(commit, "submit", filling)
        return is_full

    def check_ledger(self) -> None:
        """Check that each complete answer is in the ledger once, with its reported usage, and refusals cost nothing."""
        gateway = self.gateway
        ran = {event.request_id: event for event in gateway.usage() if event.status == "completed"}
        told = {answer.headers["x-request-id"]: usage_of(answer) for answer in self.answers if is_whole(answer)}
        assert {key: (event.prompt_tokens, event.completion_tokens) for key, event in ran.items()} == told
        assert sum(event.prompt_tokens + event.completion_tokens for event in gateway.usage()) == sum(
            map(sum, told.values())
        )
        assert_all_is_settled(gateway)
        gateway.services.run.maintenance._admission.roll_up()
        [sums] = Ledger(gateway.database).report(None, 0, 2**61)
        assert (sums.prompt_tokens, sums.completion_tokens) == tuple(map(sum, zip(*told.values(), strict=True)))
        metrics = gateway.services.metrics.render().decode()
        assert f'loramux_settled_requests_total{{status="completed"}} {len(told):.1f}' in metrics
        assert f'loramux_tokens_total{{kind="completion"}} {float(sums.completion_tokens)}' in metrics
        assert "loramux_settle_failures_total 0.0" in metrics
        assert "loramux_held_settlements 0.0" in metrics


def usage_of(answer: Any) -> tuple[int, int]:
    *_, last, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    usage = json.loads(last.removeprefix("data: "))["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


# Each of these functions fills the disk at a different step of a request's life. Streams go on when all of them have
# reached that step, because a busy machine may reserve one after another.


async def before_the_reservation(lab: Lab, _: pytest.MonkeyPatch) -> None:
    lab.disk.fill()
    lab.stream()


async def at_the_reservation(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.fill_before(ReservationRequest, monkeypatch)
    lab.stream()


async def after_the_reservation(lab: Lab, _: pytest.MonkeyPatch) -> None:
    resume, num_before = hold_streams(lab.gateway, after=0), len(lab.gateway.engine.adds)
    lab.stream()
    async with asyncio.timeout(PATIENCE_S):
        while len(lab.gateway.engine.adds) < num_before + NUM_STREAMS:  # noqa: ASYNC110
            await asyncio.sleep(0)
    lab.disk.fill()
    resume.set()


async def while_streaming(lab: Lab, _: pytest.MonkeyPatch) -> None:
    resume = hold_streams(lab.gateway)
    lab.stream()
    await until_streaming(lab.gateway, NUM_STREAMS)
    lab.disk.fill()
    resume.set()


async def at_a_checkpoint(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    await while_streaming(lab, monkeypatch)
    with pytest.raises(OperationalError):
        await lab.gateway.services.run.maintenance.checkpoint()


async def at_an_extension(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    is_full, resume = lab.fill_before(Extension, monkeypatch), hold_streams(lab.gateway, after=EXTEND_AHEAD // 2)
    lab.stream(messages=[{"role": "user", "content": "Hello"}])
    await until_streaming(lab.gateway, NUM_STREAMS)
    resume.set()
    async with asyncio.timeout(PATIENCE_S):
        await is_full.wait()


async def at_its_settlement(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.fill_before(Closing, monkeypatch)
    resume = hold_streams(lab.gateway)
    lab.stream()
    await until_streaming(lab.gateway, NUM_STREAMS)
    resume.set()


async def at_its_replay(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    await while_streaming(lab, monkeypatch)
    await asyncio.gather(*lab.streams)
    is_full = lab.fill_before(Closing, monkeypatch)
    lab.disk.free()
    async with asyncio.timeout(PATIENCE_S):
        await is_full.wait()


async def at_a_fold(lab: Lab, _: pytest.MonkeyPatch) -> None:
    lab.stream()
    await asyncio.gather(*lab.streams)
    lab.disk.fill()
    with pytest.raises(OperationalError):
        await lab.gateway.services.call(lab.gateway.services.run.maintenance._admission.roll_up)


STEPS = [
    before_the_reservation,
    at_the_reservation,
    after_the_reservation,
    while_streaming,
    at_a_checkpoint,
    at_an_extension,
    at_its_settlement,
    at_its_replay,
    at_a_fold,
]
EACH = [("mounted", "memory"), ("imitated", "memory")]
"""Kinds of disk on which the spool cannot reserve space, so that settlements wait in memory."""
SETTLES_BEFORE = (before_the_reservation, at_the_reservation, at_a_fold)


@pytest.fixture
async def lab(
    disk: SmallDisk, tokenizer: ModelTokenizer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Lab]:
    """With the parameter `memory`, the spool cannot reserve space on the disk."""
    if request.param == "memory":

        def unsupported(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr(os, "posix_fallocate", unsupported)
    async with maintained(disk.database, tokenizer, disk.directory / "spool") as gateway:
        gateway.limit("tokens_per_minute", 1_000_000)
        gateway.engine.script = lambda add: Script(token_ids=(300,) * NUM_TOKENS, delay_s=0.01)
        yield Lab(gateway, disk)


async def until_all_is_settled(gateway: Gateway) -> None:
    await until_ready(gateway, True)
    async with asyncio.timeout(PATIENCE_S):
        while gateway.services.run.settler.has_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("disk", "lab"),
    [
        ("mounted", "spool"),
        pytest.param("mounted", "memory", marks=pytest.mark.campaign),
        ("imitated", "memory"),
    ],
    indirect=True,
)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__.replace("_", " "))
async def test_disk_that_fills_up(
    lab: Lab, step: Callable[..., Awaitable[None]], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, settler = lab.gateway, lab.gateway.services.run.settler
    assert is_whole(await lab.ask())
    with monkeypatch.context() as patched:
        await step(lab, patched)
        served = await asyncio.gather(*lab.streams)
    assert all(is_refused(one) if step in SETTLES_BEFORE[:2] else is_whole(one) for one in served)
    if step not in SETTLES_BEFORE:
        assert settler.has_waiting
    if step not in (*SETTLES_BEFORE, at_its_replay):
        assert settler.num_held == (NUM_STREAMS if "memory" in request.node.callspec.id else 0)
    assert is_refused(await lab.ask())
    assert not await is_ready(gateway)
    if isinstance(lab.disk, MountedDisk):
        # Operators eventually see the error's name. Until then, a small write can still succeed.
        async with asyncio.timeout(PATIENCE_S):
            while "SQLITE_" not in str(gateway.services.trouble()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    lab.disk.free()
    await until_all_is_settled(gateway)
    assert is_whole(await lab.ask())
    lab.check_ledger()


@pytest.mark.parametrize(("disk", "lab"), EACH, indirect=True)
async def test_freed_disk_takes_settlements_before_the_database_recovers(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise OperationalError("BEGIN", {}, Exception("connection refused"))

    assert is_whole(await lab.ask())
    await while_streaming(lab, monkeypatch)
    await asyncio.gather(*lab.streams)
    settler = lab.gateway.services.run.settler
    assert settler.num_held == NUM_STREAMS
    admission = lab.gateway.services.run.maintenance._admission
    with monkeypatch.context() as patched:
        for name in ("probe", "commit"):
            patched.setattr(admission, name, away)
        lab.disk.free()
        async with asyncio.timeout(PATIENCE_S):
            await settler.none_held()
        assert settler.has_waiting
        assert is_refused(await lab.ask())
    await until_all_is_settled(lab.gateway)
    lab.check_ledger()


@pytest.mark.parametrize(("disk", "lab"), EACH, indirect=True)
async def test_drain_waits_for_the_disk(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    await while_streaming(lab, monkeypatch)
    await asyncio.gather(*lab.streams)
    running_ = lab.gateway.services.run.requests
    assert not await running_.drain(0.05)
    draining = asyncio.create_task(running_.drain(PATIENCE_S))
    await asyncio.sleep(0)
    lab.disk.free()
    assert await draining
    await until_all_is_settled(lab.gateway)
    lab.check_ledger()


@pytest.mark.parametrize(("disk", "lab"), EACH, indirect=True)
async def test_unsettled_requests_are_logged_and_replayed_from_the_log(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def left_alone() -> None:
        return

    gateway = lab.gateway
    settler = gateway.services.run.settler
    # If either is in progress, it settles or releases the requests that this test takes out of memory.
    monkeypatch.setattr(settler, "replay", left_alone)
    monkeypatch.setattr(settler, "spool_held", left_alone)
    await while_streaming(lab, monkeypatch)
    await asyncio.gather(*lab.streams)
    # At shutdown, the settlements held in memory are logged.
    last_life = Settler(
        gateway.services.run.commit, gateway.services.metrics.generation, gateway.services.run.database_health
    )
    last_life._held = dict(settler._held)
    with capture_logs() as logged:
        last_life.close()
    records = [entry["record"] for entry in logged]
    assert len(records) == NUM_STREAMS
    assert f"loramux_settle_failures_total {NUM_STREAMS}.0" in gateway.services.metrics.render().decode()
    for closing in tuple(settler._held.values()):
        settler._release(closing, is_settled=False)
    lab.disk.free()
    await until_ready(gateway, True)
    assert gateway.usage() == []
    # Start the next process after putting the records where the log says.
    directory = lab.disk.directory / "next"
    directory.mkdir()
    (directory / LEFT).write_text("\n".join(records))
    commit = GroupCommit(gateway.services.run.maintenance._admission)
    next_life = Settler(
        commit,
        gateway.services.metrics.generation,
        gateway.services.run.database_health,
        SettlementSpool(directory, 1 << 20),
    )
    assert next_life.has_waiting
    await next_life.replay()
    assert not next_life.has_waiting
    commit.close()
    next_life.close()
    assert sorted(event.completion_tokens for event in gateway.usage()) == [NUM_TOKENS] * NUM_STREAMS
    assert_all_is_settled(gateway)


async def test_postgres_and_spool_both_out_of_space(
    migrated_postgres_url: str, tokenizer: ModelTokenizer, tmp_path: Path, anyio_backend: str
) -> None:
    database = Database(migrated_postgres_url)
    async with maintained(database, tokenizer, tmp_path / "spool", spool_bytes=1) as gateway:
        gateway.limit("tokens_per_minute", 1_000_000)
        gateway.engine.script = lambda add: Script(token_ids=(300,) * NUM_TOKENS, delay_s=0.01)
        lab = Lab(gateway, None)  # type: ignore[arg-type]
        resume = hold_streams(gateway)
        lab.stream()
        await until_streaming(gateway, NUM_STREAMS)
        with refusing(migrated_postgres_url, ("usage_events",), "53100"):
            resume.set()
            assert all(map(is_whole, await asyncio.gather(*lab.streams)))
            assert gateway.services.run.settler.num_held == NUM_STREAMS
            # The database would accept a reservation, but the gateway refuses to make one.
            assert is_refused(await lab.ask())
            assert not await is_ready(gateway)
            # Leases are extended, so no other gateway recovers these requests.
            with database.write() as connection:
                connection.execute(schema.reservations.update().values(lease_expires_us=0))
            await gateway.services.run.maintenance.checkpoint()
            assert gateway.services.run.maintenance._admission.recover_expired() == 0
        await until_all_is_settled(gateway)
        with database.read() as connection:
            assert connection.execute(select(func.count()).select_from(schema.usage_adjustments)).scalar_one() == 0
        lab.check_ledger()
    database.close()
