"""Batches of a server whose engine does not run."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from loramux.migrations.database import Database
from loramux.platform.batches import runner
from loramux.platform.batches.batch_claims import ClaimedBatch
from loramux.platform.batches.line_run import LineRuns, PlannedLine, ReadLine, Refusal
from loramux.platform.batches.room import Entry
from loramux.platform.errors import ApiError
from loramux.platform.replicas.routed_engine import RoutedEngine
from loramux.platform.requests.claim_loop import ClaimLoop
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.batches.batch_lab import LIMITS, PACE, BatchLab, line
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


async def test_lines_that_are_refused_while_the_engine_is_gone_are_not_failed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that have waited for long enter although the engine does not answer."""
    monkeypatch.setattr(runner, "MAX_TRIES", 2)
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


class RestartingEngine(ScriptedEngine):
    """Runs again after its owner has looked at it a few times."""

    num_looks = 0

    @property
    def trouble(self) -> str | None:
        self.num_looks += 1
        if self.num_looks == 3:
            self.revive()
        return super().trouble


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
