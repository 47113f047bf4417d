"""Batches that wait for a quota give their places to others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from loramux.platform.batches import runner
from loramux.platform.batches.batch_claims import BatchQueue, ClaimedBatch
from loramux.platform.batches.places import Places
from loramux.platform.quotas.policies import QuotaPolicies
from tests.platform.batches.batch_lab import PACE, BatchLab, line
from tests.platform.clocked_databases import FakeClock
from tests.platform.gateways import Gateway
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio


@pytest.fixture
def lab(gateway_on_each: Gateway, monkeypatch: pytest.MonkeyPatch) -> BatchLab:
    """A server with one place for batches."""
    monkeypatch.setattr(runner, "MAX_RUNNING", 1)
    return BatchLab(gateway_on_each, pace=replace(PACE, retry_s=0.2, idle_s=0.1))


@pytest.fixture
def other(lab: BatchLab) -> BatchLab:
    """The same server, for another tenant."""
    client = lab.gateway.openai.with_options(api_key=lab.gateway.key_of("other"))
    return replace(lab, gateway=replace(lab.gateway, openai=client))


def third(lab: BatchLab) -> BatchLab:
    client = lab.gateway.openai.with_options(api_key=lab.gateway.key_of("third"))
    return replace(lab, gateway=replace(lab.gateway, openai=client))


@pytest.mark.parametrize("scope", ["tenant", "adapter"])
async def test_batch_that_waits_for_a_quota_gives_its_place_to_another_tenant(
    lab: BatchLab, other: BatchLab, scope: str
) -> None:
    policies, engine = QuotaPolicies(lab.gateway.database), lab.gateway.engine
    adapter_id = lab.gateway.add_adapter("acme", "support")
    subject_id = adapter_id if scope == "adapter" else lab.gateway.tenant.id
    # The clock of the database stands still, so that no day ends.
    policies.set(subject_id, "batch_tokens_per_day", 40)
    lines = [line(f"{number}", model="acme/support") for number in range(6)]
    async with lab.running():
        older = await lab.create(lines)
        await lab.until(older, lambda now: now.request_counts.completed > 0)
        younger = await lab.create([line("younger", max_tokens=3)])
        ended = await other.finished(await other.create([line("other", max_tokens=2)]))
        assert ended.status == "completed"
        assert (await lab.gateway.openai.batches.retrieve(older.id)).status == "in_progress"
        policies.set(subject_id, "batch_tokens_per_day", 100_000)
        older, younger = await lab.finished(older), await lab.finished(younger)
    assert (older.status, younger.status) == ("completed", "completed")
    # The batches of a tenant run in the order of their creation.
    assert [add.max_tokens for add in engine.adds if add.max_tokens != 2] == [4] * 6 + [3]


async def test_batch_with_failed_lines_of_an_adapter_gives_up_its_place(lab: BatchLab, other: BatchLab) -> None:
    """It waits for the adapter no longer."""
    lab.gateway.add_adapter("acme", "broken")
    lab.gateway.limit("batch_tokens_per_day", 40)
    lab.gateway.engine.script = lambda add: Script(
        token_ids=(5,), error=None if add.digest is None else "adapter_unavailable"
    )
    lab.pace = replace(lab.pace, adapter_s=0.0, retry_s=0.05, idle_s=0.0)
    async with lab.running():
        batch = await lab.create([line("a", model="acme/broken"), *(line(f"{number}") for number in range(6))])
        await lab.until(batch, lambda now: now.request_counts.completed > 0)
        ended = await other.finished(await other.create([line("other")]))
    assert ended.status == "completed"


async def test_cancelled_batch_of_a_resting_tenant_ends(lab: BatchLab, other: BatchLab) -> None:
    lab.gateway.limit("batch_tokens_per_day", 40)
    # The rest outlasts the test.
    lab.pace = replace(lab.pace, retry_s=3600.0)
    async with lab.running():
        batch = await lab.create([line(f"{number}") for number in range(6)])
        await lab.until(batch, lambda now: now.request_counts.completed > 0)
        await other.finished(await other.create([line("other")]))
        await lab.gateway.openai.batches.cancel(batch.id)
        assert (await lab.finished(batch)).status == "cancelled"


async def test_batch_with_a_slow_rate_keeps_its_place(lab: BatchLab, other: BatchLab, clock: FakeClock) -> None:
    """It would otherwise run one line for each turn."""
    lab.gateway.limit("requests_per_minute", 1)
    lab.pace, lab.lease_us = replace(PACE, idle_s=0.0), 3_600_000_000
    async with lab.running(), asyncio.timeout(20):
        slow = await lab.create([line(f"{number}") for number in range(3)])
        await lab.until(slow, lambda now: now.request_counts.completed == 1)
        waiting = await other.create([line("other", max_tokens=2)])
        while (await other.gateway.openai.batches.retrieve(waiting.id)).status != "completed":
            clock.advance(10)
            await asyncio.sleep(0.01)
    assert [add.max_tokens for add in lab.gateway.engine.adds] == [4, 4, 4, 2]


async def test_batch_gives_up_its_place_at_the_end_of_its_turn(
    lab: BatchLab, other: BatchLab, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up, is_given_up = Places.give_up, asyncio.Event()

    def give_up_once(self: Places, *args: Any) -> bool:
        if is_given_up.is_set():
            return False
        is_given_up.set()
        return give_up(self, *args)

    monkeypatch.setattr(Places, "give_up", give_up_once)
    lab.pace, lab.limits = replace(PACE, turn_s=0.0, idle_s=0.2), replace(lab.limits, capacity=lambda: 1)
    resume = lab.hold_after(1)
    async with lab.running(), asyncio.timeout(20):
        older = await lab.create([line(f"{number}") for number in range(5)])
        await lab.until(older, lambda now: now.request_counts.completed == 1)
        clock.advance(-1)
        younger = await other.create([line("other", max_tokens=2)])
        clock.advance(1)
        await is_given_up.wait()
        resume.set()
        await other.finished(younger)
        await lab.finished(older)
    # The line that was running has ended first, and the next one may have entered with its place.
    limits = [add.max_tokens for add in lab.gateway.engine.adds]
    assert limits in ([4, 4, 2, 4, 4, 4], [4, 4, 4, 2, 4, 4])


async def test_batches_take_turns(lab: BatchLab, other: BatchLab, clock: FakeClock) -> None:
    places, tenants = Places(BatchQueue(lab.gateway.database), 1), list[str]()
    for one in (lab, lab, other):
        await one.create([line("a")])
        clock.advance(1)

    def next_turn() -> None:
        claimed = places.claim(())
        assert claimed is not None
        tenants.append(claimed.tenant_id)
        clock.advance(1)
        claimed.claim.give_back(claimed.id)
        assert places.are_wanted()
        assert places.give_up(claimed.tenant_id, 0.0, clock())

    next_turn()
    # The tenant's second batch waits like its first one, and a new batch waits behind it.
    clock.advance(1)
    await third(lab).create([line("a")])
    for _ in range(5):
        next_turn()
    first, second, last = dict.fromkeys(tenants)
    assert tenants == [first, second, first, last, second, first]


async def test_one_waiting_batch_needs_one_place(lab: BatchLab, other: BatchLab) -> None:
    places, running = Places(BatchQueue(lab.gateway.database), 2), list[ClaimedBatch]()
    for one in (lab, other, third(lab)):
        await one.create([line("a")])
    for _ in range(2):
        claimed = places.claim(tuple(one.tenant_id for one in running))
        assert claimed is not None
        running.append(claimed)
    # Both look before one of them gives up its place.
    assert [places.are_wanted() for _ in running] == [True, True]
    assert [places.give_up(one.tenant_id, 0.0, 0) for one in running] == [True, False]
    assert not places.are_wanted()


async def test_ended_batch_leaves_its_place(lab: BatchLab, other: BatchLab) -> None:
    places = Places(BatchQueue(lab.gateway.database), 1)
    for one in (lab, other):
        await one.create([line("a")])
    claimed = places.claim(())
    assert claimed is not None
    assert places.are_wanted()
    places.leave(claimed.tenant_id)
    assert not places.are_wanted()
