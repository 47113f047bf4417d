"""A tenant's slot stays blocked after a call for as long as the call took."""

from __future__ import annotations

import anyio
import pytest

from loramux.admin.server import transfer_slots
from loramux.admin.server.transfer_slots import TransferSlots
from loramux.platform.errors import RateLimited

pytestmark = pytest.mark.anyio


async def test_tenant_slot_rests_for_the_duration_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_slots, "MAX_REST_S", 3600.0)
    monkeypatch.setattr(transfer_slots, "UNRESTED_S", 600.0)
    monkeypatch.setattr(transfer_slots, "WAIT_S", 0.1)
    resting = TransferSlots("reports", 2, 1, rest=1e9)
    async with resting.held_slot("acme"):
        await anyio.sleep(0.001)
    with pytest.raises(RateLimited, match="this tenant has reached its limit of concurrent reports"):
        await resting.acquire_slot("acme")
    async with resting.held_slot("initech"):
        assert resting.num_taken == 1, "other tenants may use every slot"

    unrested = TransferSlots("reports", 2, 1, rest=1.0)
    for _ in range(3):
        async with unrested.held_slot("acme"):
            await anyio.sleep(0.001)


async def test_slot_is_free_again_after_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_slots, "MAX_REST_S", 0.02)
    monkeypatch.setattr(transfer_slots, "UNRESTED_S", 0.0)
    resting = TransferSlots("reports", 2, 1, rest=1e9)
    for _ in range(3):
        async with resting.held_slot("acme", is_patient=True):
            await anyio.sleep(0.001)
    with anyio.fail_after(10):
        # Inactive tenants must take no memory: a tenant's entry is deleted after its last rest period.
        while resting._of_tenant:  # noqa: ASYNC110
            await anyio.sleep(0.01)
