"""Batches of a server whose engine does not run."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import select, update

from loramux.migrations.database import Database
from loramux.migrations.schema import batch_lines, batches
from loramux.platform.batches import batch_run
from loramux.platform.batches.batch_claims import BatchClaim, ClaimedBatch
from loramux.platform.batches.batch_rows import WINDOW_US
from loramux.platform.batches.line_run import LineRuns, PlannedLine, ReadLine, Refusal
from loramux.platform.batches.room import Entry
from loramux.platform.errors import ApiError
from loramux.platform.replicas.routed_engine import RoutedEngine
from loramux.platform.requests.claim_loop import ClaimLoop
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.batches.batch_lab import LIMITS, PACE, BatchLab, line
from tests.platform.clocked_databases import FakeClock
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.replicas.lab import ChosenRouter
from tests.platform.routing.replica_views import view
from tests.platform.scripted_engine import Script, ScriptedEngine

pytestmark = pytest.mark.anyio


async def test_another_server_finishes_the_batch_of_a_server_whose_engine_is_gone(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor
) -> None:
    async with (
        open_gateway(accounts, tokenizer, threads) as first,
        open_gateway(accounts, tokenizer, threads) as second,
    ):
        pace = replace(PACE, engine_s=0.1)
        first_lab = BatchLab(first, pace=pace)
        second_lab = BatchLab(replace(second, kept=first.kept), pace=pace)
        adds = first.engine.adds
        first.engine.script = lambda add: Script(token_ids=(5, 6), stall_after=0 if len(adds) > 4 else None)
        batch = await first_lab.create([line(f"{number}") for number in range(20)])
        async with first_lab.running():
            await first_lab.until(batch, lambda now: now.request_counts.completed == 4)
            first.engine.die()
            async with second_lab.running():
                answers, errors = await first_lab.outputs(await first_lab.finished(batch))
    assert (len(answers), errors) == (20, [])
    assert second.engine.adds


@pytest.mark.parametrize("ends_by", ["cancelling", "expiry", "its last answer"])
async def test_a_batch_that_needs_no_engine_ends_while_the_engine_is_gone(
    clocked: Database, clock: FakeClock, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, ends_by: str
) -> None:
    async with open_gateway(clocked, tokenizer, threads) as gateway:
        lab, engine = BatchLab(gateway, pace=replace(PACE, engine_s=0.1)), gateway.engine
        engine.script = lambda add: Script(token_ids=(5, 6), stall_after=0 if len(engine.adds) > 1 else None)
        batch = await lab.create([line("a"), line("b")])
        async with lab.running():
            await lab.until(batch, lambda now: now.request_counts.completed == 1 and engine.num_running == 1)
            engine.die()
            async with asyncio.timeout(20):
                while claimant_of(clocked) is not None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            if ends_by == "cancelling":
                await gateway.openai.batches.cancel(batch.id)
            elif ends_by == "expiry":
                clock.advance(WINDOW_US / 1e6 + 1)
            else:
                answer_all(clocked)
            ended = await lab.finished(batch)
    assert ended.status == {"cancelling": "cancelled", "expiry": "expired"}.get(ends_by, "completed")


def claimant_of(database: Database) -> str | None:
    with database.read() as connection:
        claimant: str | None = connection.scalar(select(batches.c.claimed_by))
    return claimant


def answer_all(database: Database) -> None:
    """Store what a server leaves that dies after it has stored the last answer."""
    with database.write() as connection:
        unanswered = batch_lines.c.status.is_(None)
        connection.execute(update(batch_lines).where(unanswered).values(status=200, answer=b"{}\n"))
        connection.execute(update(batches).values(num_completed=2))


async def test_the_server_whose_engine_is_gone_ends_a_batch_without_waiting_lines(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last answer is stored after the batch was to leave the server."""
    given_back: list[str] = []
    monkeypatch.setattr(BatchClaim, "give_back", lambda self, batch_id: given_back.append(batch_id))
    async with open_gateway(accounts, tokenizer, threads) as gateway:
        lab, engine = BatchLab(gateway, pace=replace(PACE, engine_s=0.0)), gateway.engine
        batch = await lab.create([line("a")])
        resume = lab.hold_after(0)
        async with lab.running():
            await lab.until(batch, lambda now: engine.num_running == 1)
            monkeypatch.setattr(ScriptedEngine, "is_own_ready", False)
            # Until then, the runner has looked several times.
            await asyncio.sleep(0.3)
            resume.set()
            ended = await lab.finished(batch)
    assert (ended.status, given_back) == ("completed", [])


async def test_lines_that_are_refused_while_the_engine_is_gone_are_not_failed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that have waited for long enter although the engine does not answer."""
    monkeypatch.setattr(batch_run, "MAX_TRIES", 2)
    lab, refused, num_refused, run = BatchLab(gateway, replace(LIMITS, queue_s=0.0)), asyncio.Event(), 0, LineRuns.run

    async def noted(self: LineRuns, line: ReadLine, found: PlannedLine | ApiError, entry: Entry) -> Refusal | None:
        nonlocal num_refused
        refusal = await run(self, line, found, entry)
        if refusal is not None and not refusal.has_reserved:
            num_refused += 1
            if num_refused == 3:
                refused.set()
        return refusal

    monkeypatch.setattr(LineRuns, "run", noted)
    engine = gateway.engine
    engine.script = lambda add: Script(token_ids=(5, 6), stall_after=0 if len(engine.adds) == 1 else None)
    batch = await lab.create([line("a")])
    async with lab.running():
        await lab.until(batch, lambda now: engine.num_running == 1)
        engine.die()
        async with asyncio.timeout(20):
            await refused.wait()
        engine.revive()
        answers, errors = await lab.outputs(await lab.finished(batch))
    assert (len(answers), errors) == (1, [])


@pytest.mark.parametrize("has_run", [False, True])
async def test_only_a_line_that_was_running_when_its_engine_died_has_used_up_a_try(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    monkeypatch.setattr(batch_run, "MAX_TRIES", 1)
    lab, engine = BatchLab(gateway), gateway.engine
    engine.script = lambda add: Script(token_ids=(5, 6), stall_after=0 if len(engine.adds) == 1 else None)
    batch = await lab.create([line("a")])
    async with lab.running():
        await lab.until(batch, lambda now: engine.num_running == 1)
        engine.die(has_run)
        engine.revive()
        answers, errors = await lab.outputs(await lab.finished(batch))
    assert (len(answers), len(errors)) == ((0, 1) if has_run else (1, 0))


class RestartingEngine(ScriptedEngine):
    """Runs again after its owner has looked at it a few times."""

    num_looks = 0

    trouble = None
    """A hung engine is not ready either until its process is gone, and why is not known yet."""

    @property
    def is_own_ready(self) -> bool:
        self.num_looks += 1
        if self.num_looks == 3:
            self.revive()
        return super().is_own_ready


async def test_a_server_whose_engine_is_gone_claims_nothing_that_its_peers_can_claim(gateway: Gateway) -> None:
    local, peer = RestartingEngine(), ScriptedEngine()
    local.die()
    engine = RoutedEngine(local, "local", ChosenRouter, lambda outcome: None, lambda: None)
    engine.update([view("peer")], {"peer": peer})
    assert engine.is_ready
    claimed_with: list[bool] = []
    draining, loop = asyncio.Event(), asyncio.get_running_loop()

    def claim(but_tenants: tuple[str, ...]) -> ClaimedBatch | None:
        claimed_with.append(local.is_ready)
        loop.call_soon_threadsafe(draining.set)
        return None

    async def run_one(claimed: ClaimedBatch) -> None:
        pytest.fail("nothing was claimed")

    claims = ClaimLoop(
        services=replace(gateway.services, engine=engine),
        claim=claim,
        run_one=run_one,
        what="batches",
        max_running=1,
        poll_s=0.001,
    )
    async with asyncio.timeout(20):
        await claims.run(draining)
    assert claimed_with[0]
