"""Gateways that race, lose clients, and are stopped or killed: quotas stay exact and each request is settled once."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, select, text, update

from loramux.migrations import schema
from loramux.platform.generation.maintenance import CHECKPOINT_INTERVAL_S
from loramux.platform.quotas.policies import QuotaPolicies
from tests.conformance.gateway_lab import GatewayLab, LabGateway, Truth, ask, gateway_lab
from tests.conformance.paced_engine import STEP_S

NUM_RACERS = int(os.environ.get("LORAMUX_GATEWAY_RACERS", "1000"))
NUM_CUTS = int(os.environ.get("LORAMUX_GATEWAY_CUTS", "10000"))
NUM_KILLS = int(os.environ.get("LORAMUX_GATEWAY_KILLS", "200"))
NUM_STOPS = int(os.environ.get("LORAMUX_GATEWAY_STOPS", "1000"))
MAX_TOKENS = 10

campaign = pytest.mark.campaign

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
}
REFUSED = {"guided_json": {"type": "array", "contains": {"type": "null"}}}


def constraint(dice: random.Random) -> dict[str, Any]:
    """Return a request's constraint fields: none for half of all requests, and a refused constraint for a few."""
    if dice.random() < 0.5:
        return {}
    if dice.random() < 0.1:
        return REFUSED
    return dice.choice(
        [
            {"guided_json": PERSON},
            {"guided_regex": f"x{dice.randrange(50)}[0-9]*"},
            {"guided_choice": ["yes", "no"]},
            {"guided_regex": "[a-z ]{2,300}"},
        ]
    )


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, postgres_server: str, demo_base: Path) -> Iterator[GatewayLab]:
    """A lab with four gateways in the campaign and two otherwise."""
    num_gateways = 4 if "campaign" in (request.config.getoption("-m") or "").replace("not campaign", "") else 2
    admin = create_engine(
        postgres_server.replace("postgresql://", "postgresql+psycopg://", 1), isolation_level="AUTOCOMMIT"
    )
    with admin.connect() as connection:
        connection.execute(text("CREATE DATABASE gateways"))
    admin.dispose()
    url = postgres_server.replace("/postgres?", "/gateways?", 1)
    with (
        tempfile.TemporaryDirectory(prefix="loramux-lab-") as directory,
        gateway_lab(Path(directory), url, demo_base, num_gateways) as lab,
    ):
        yield lab


def events_of(lab: GatewayLab, tenant_id: str) -> list[Any]:
    events = schema.usage_events
    with lab.database.read() as connection:
        return list(connection.execute(select(events).where(events.c.tenant_id == tenant_id)))


@pytest.mark.parametrize("num_racers", [40, pytest.param(NUM_RACERS, marks=campaign)], ids=["few", "many"])
def test_clients_that_race_for_the_last_tokens_overspend_none(lab: GatewayLab, num_racers: int) -> None:
    tenant, key = lab.account(f"race-{num_racers}")
    # The quota covers slightly less than half of the racers, and hardly refills during the race.
    burst = num_racers * (MAX_TOKENS + 1) * 4 // 9
    QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 1, burst)
    QuotaPolicies(lab.database).set(tenant.id, "concurrent_requests", 200)

    async def race() -> list[int]:
        async def one(number: int) -> int:
            while True:
                status, answer = await ask(lab.gateways[number % len(lab.gateways)].port, key, MAX_TOKENS)
                # On a slow machine some clients may be asked to retry; only an answer about tokens is final.
                if status != 503 and b"concurrent_requests" not in answer:
                    return status
                await asyncio.sleep(random.uniform(0.05, 0.5))

        return await asyncio.gather(*(one(number) for number in range(num_racers)))

    started = time.monotonic()
    statuses = asyncio.run(race())
    lab.wait_settled()
    minutes = (time.monotonic() - started) / 60
    used = sum(event.prompt_tokens + event.completion_tokens for event in events_of(lab, tenant.id))
    num_admitted = statuses.count(200)
    print(
        f"\n{num_racers} clients, {len(lab.gateways)} gateways: {num_admitted} admitted, {used} of {burst} tokens used"
    )
    assert statuses.count(429) == num_racers - num_admitted
    assert used == num_admitted * (MAX_TOKENS + 1)
    assert used <= burst + minutes + 1, "overspent"
    assert used > burst - (MAX_TOKENS + 1), "the last tokens were admitted too"
    lab.check_nothing_held()


@pytest.mark.parametrize("num_streams", [60, pytest.param(NUM_CUTS, marks=campaign)], ids=["few", "many"])
def test_streams_cut_at_random_points_are_charged_what_the_engine_committed(lab: GatewayLab, num_streams: int) -> None:
    tenant, key = lab.account(f"cuts-{num_streams}")
    QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 10**9)
    dice = random.Random(num_streams)

    async def cut_all() -> int:
        places = asyncio.Semaphore(64)
        num_cut = 0

        async def one(number: int) -> None:
            nonlocal num_cut
            async with places:
                port = lab.gateways[number % len(lab.gateways)].port
                fields = constraint(dice)
                status, answer = await ask(port, key, 12, dice.randrange(16), fields)
                # 0: the client left before it received a status. 429: too many of the tenant's grammars are waiting to
                # be checked.
                assert status in ((0, 400, 429) if fields is REFUSED else (0, 200, 429)), answer
                num_cut += status in (0, 200) and b"[DONE]" not in answer

        await asyncio.gather(*(one(number) for number in range(num_streams)))
        return num_cut

    num_cut = asyncio.run(cut_all())
    lab.wait_settled(120)
    truths = lab.truths()
    events = events_of(lab, tenant.id)
    wrong = [
        event for event in events if Truth(event.prompt_tokens, event.completion_tokens) != truths[event.request_id]
    ]
    total = sum(event.completion_tokens for event in events)
    print(f"\n{num_streams} streams, {num_cut} cut, {len(events)} in the ledger, {total} tokens, {len(wrong)} wrong")
    assert wrong == []
    assert num_cut > num_streams / 2
    assert total == sum(truths[event.request_id].completion_tokens for event in events)
    lab.check_nothing_held()


@pytest.mark.parametrize("num_stops", [2, pytest.param(NUM_STOPS, marks=campaign)], ids=["few", "many"])
def test_gateways_stopped_under_load_finish_their_streams(lab: GatewayLab, num_stops: int) -> None:
    tenant, key = lab.account(f"stops-{num_stops}")
    QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 10**9)
    dice = random.Random(num_stops)

    async def stream_until_refused(gateway: LabGateway, answers: list[tuple[int, bytes]]) -> None:
        status = 200
        while status == 200:
            try:
                fields = {} if dice.random() < 0.7 else {"guided_json": PERSON}
                status, answer = await ask(gateway.port, key, dice.randrange(1, 120), fields=fields)
            except ConnectionError:
                return
            answers.append((status, answer))

    async def load_and_stop(together: list[LabGateway]) -> list[tuple[int, bytes]]:
        answers: list[tuple[int, bytes]] = []
        streams = [
            asyncio.create_task(stream_until_refused(gateway, answers)) for gateway in together for _ in range(6)
        ]

        async def stop(gateway: LabGateway) -> None:
            await asyncio.sleep(dice.uniform(0.0, 1.5))
            await asyncio.to_thread(lab.stop, gateway)

        await asyncio.gather(*map(stop, together))
        await asyncio.gather(*streams)
        return answers

    answers: list[tuple[int, bytes]] = []
    num_done = 0
    while num_done < num_stops:
        together = lab.gateways[: num_stops - num_done]
        answers += asyncio.run(load_and_stop(together))
        for gateway in together:
            lab.start(gateway)
        for gateway in together:
            lab.wait_ready(gateway)
        num_done += len(together)
    lab.wait_settled()
    statuses = Counter(status for status, _ in answers)
    cut = [answer[-200:] for status, answer in answers if status == 200 and b"[DONE]" not in answer]
    truths = lab.truths()
    wrong = [
        event
        for event in events_of(lab, tenant.id)
        if Truth(event.prompt_tokens, event.completion_tokens) != truths[event.request_id]
    ]
    print(f"\n{num_done} stops, answers by status {dict(statuses)}, {len(cut)} streams cut, {len(wrong)} bills wrong")
    assert cut == []
    assert wrong == []
    # 0: the listener was closed before the request was read. 503: a draining gateway refuses new requests.
    assert set(statuses) <= {200, 0, 503}
    lab.check_nothing_held()


@pytest.mark.parametrize("num_kills", [2, pytest.param(NUM_KILLS, marks=campaign)], ids=["few", "many"])
def test_gateways_killed_at_random_moments_settle_each_request_once(lab: GatewayLab, num_kills: int) -> None:
    lab.see_reservations()
    tenant, key = lab.account(f"kills-{num_kills}")
    QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 10**9)
    dice = random.Random(num_kills)
    # The first gateway survives and recovers the other gateways' requests.
    victims = lab.gateways[1:]

    async def stream_and_kill(together: list[LabGateway]) -> None:
        streams = [
            asyncio.create_task(ask(gateway.port, key, dice.choice((20, 400)), fields=constraint(dice)))
            for gateway in together
            for _ in range(6)
        ]

        async def kill(gateway: LabGateway) -> None:
            await asyncio.sleep(dice.uniform(0.0, 1.5) if dice.random() < 0.9 else 6.0)
            await asyncio.to_thread(lab.kill, gateway)

        await asyncio.gather(*map(kill, together))
        await asyncio.gather(*streams)

    num_done = 0
    while num_done < num_kills:
        together = victims[: num_kills - num_done]
        asyncio.run(stream_and_kill(together))
        for gateway in together:
            lab.start(gateway)
        for gateway in together:
            lab.wait_ready(gateway)
        num_done += len(together)
    if num_kills < 20:
        # Expire the leases of the dead gateways.
        with lab.database.write() as connection:
            connection.execute(update(schema.reservations).values(lease_expires_us=0))
    lab.wait_settled(120)
    truths = lab.truths()
    events = {event.request_id: event for event in events_of(lab, tenant.id)}
    reserved = lab.reserved_tokens(tenant.id)
    assert set(reserved) == set(events), "each request is settled once"
    most_under, num_recovered = 0, 0
    for request_id, event in events.items():
        committed = truths[request_id].completion_tokens
        assert event.prompt_tokens + event.completion_tokens <= reserved[request_id]
        assert event.completion_tokens <= committed
        most_under = max(most_under, committed - event.completion_tokens)
        num_recovered += event.status == "recovered"
    print(f"\n{num_done} kills, {len(events)} requests, {num_recovered} recovered, at most {most_under} under")
    # The engine commits at most one token per step. It notices a dead gateway within a second, and writing a checkpoint
    # takes time.
    assert most_under <= (CHECKPOINT_INTERVAL_S + 2.0) / STEP_S
    lab.check_nothing_held()
