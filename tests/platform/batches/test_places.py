"""Batches that wait for a quota give their places to others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loramux.platform.batches import runner
from loramux.platform.quotas.policies import QuotaPolicies
from tests.platform.batches.batch_lab import PACE, BatchLab, line
from tests.platform.gateways import Gateway

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
