from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from loramux.migrations.database import Database
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.generation import maintenance
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.clocked_databases import FakeClock
from tests.platform.gateways import open_gateway

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("is_alone", [False, True])
async def test_a_new_server_lets_others_renew_their_leases_before_it_recovers_requests(
    clocked: Database,
    clock: FakeClock,
    tokenizer: ModelTokenizer,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    is_alone: bool,
) -> None:
    """The database may have been away until now. Then the leases of running requests have expired. On an embedded
    database, there are no other servers, and a new one recovers at once.
    """
    monkeypatch.setattr(maintenance, "CHECKPOINT_INTERVAL_S", 0.01)
    loop, rounds = asyncio.get_running_loop(), asyncio.Semaphore(0)
    roll_up = Admission.roll_up

    def noted(self: Admission) -> int:
        loop.call_soon_threadsafe(rounds.release)
        return roll_up(self)

    monkeypatch.setattr(Admission, "roll_up", noted)

    def monotonic() -> float:
        return clock.now_us / 1e6

    async with open_gateway(clocked, tokenizer, threads, clock=monotonic, is_alone=is_alone) as gateway:
        request = ReservationRequest(
            request_id="req_of_another_server",
            tenant_id=gateway.tenant.id,
            api_key_id=gateway.services.callers.api_keys.create(gateway.tenant.id, "other").key.id,
            model="base",
            adapter_version_id=None,
            endpoint="chat.completions",
            prompt_tokens=70,
            reserved_tokens=120,
        )
        Admission(clocked).reserve(request)
        clock.advance(31)
        maintaining = asyncio.create_task(gateway.services.run.maintenance.run())
        async with asyncio.timeout(20):
            for _ in range(3):
                await rounds.acquire()
            assert [event.status for event in gateway.usage()] == (["recovered"] if is_alone else [])
            clock.advance(31)
            # The first round may have begun before.
            for _ in range(2):
                await rounds.acquire()
        maintaining.cancel()
        await asyncio.wait({maintaining})
        assert [event.status for event in gateway.usage()] == ["recovered"]
