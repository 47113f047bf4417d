"""Gateways that race, lose clients, and are stopped or killed: quotas stay exact and each request is settled once."""

from __future__ import annotations

import asyncio
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from sqlalchemy import update

from loramux.migrations import schema
from loramux.platform.generation.maintenance import CHECKPOINT_INTERVAL_S
from loramux.platform.generation.plan import CHUNK_TOKENS
from loramux.platform.quotas.policies import QuotaPolicies
from tests.conformance.cluster_lab import ClusterLab
from tests.conformance.drawn_batches import DrawnBatches, as_line
from tests.conformance.drawn_requests import (
    COMPLETIONS,
    EMBEDDINGS,
    DrawnRequest,
    RequestDraw,
    long_predicted,
    streamed_completion,
)
from tests.conformance.engines_lab import EnginesLab
from tests.conformance.fleet_lab import FleetLab
from tests.conformance.gateway_lab import (
    MAX_MODEL_LEN,
    GatewayLab,
    LabGateway,
    gateway_lab,
    make_lab_base,
    predictions_of,
    send,
    usage_of,
)
from tests.conformance.noted_ends import DraftCounts
from tests.conformance.paced_engine import STEP_S
from tests.postgres import create_database
from tests.reliability.record import recorded

NUM_RACERS = int(os.environ.get("LORAMUX_GATEWAY_RACERS", "1000"))
NUM_CUTS = int(os.environ.get("LORAMUX_GATEWAY_CUTS", "10000"))
NUM_KILLS = int(os.environ.get("LORAMUX_GATEWAY_KILLS", "200"))
NUM_STOPS = int(os.environ.get("LORAMUX_GATEWAY_STOPS", "1000"))
MAX_TOKENS = 10
BUSY = (429, 503, 529)
"""Statuses of a request that can be repeated. Too many of the tenant's grammars or templates are waiting, or a busy
machine does not finish them in time. Messages use 529 for 503.
"""

campaign = pytest.mark.campaign


@pytest.fixture(
    scope="module",
    params=[
        "gateways",
        pytest.param("engines", marks=[campaign, pytest.mark.data_parallel]),
        pytest.param("fleet", marks=[campaign, pytest.mark.fleet]),
        pytest.param("cluster", marks=[campaign, pytest.mark.cluster]),
    ],
)
def lab(
    request: pytest.FixtureRequest, postgres_server: str, demo_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayLab]:
    """Gateways of one engine, four in the campaign and two otherwise, three servers with one engine or two each that
    share requests, or four servers in front of a Ray cluster.
    """
    is_campaign = "campaign" in (request.config.getoption("-m") or "").replace("not campaign", "")
    model = make_lab_base(tmp_path_factory.mktemp("base"), demo_base)
    url = create_database(postgres_server, request.param)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loramux-lab-")))
        if request.param == "engines":
            yield stack.enter_context(closing(EnginesLab(directory, url, model, 3)))
        elif request.param == "fleet":
            yield stack.enter_context(closing(FleetLab(directory, url, model, 3)))
        elif request.param == "cluster":
            yield stack.enter_context(closing(ClusterLab(directory, url, model, 4)))
        else:
            yield stack.enter_context(gateway_lab(directory, url, model, 4 if is_campaign else 2))


@pytest.mark.parametrize("num_racers", [40, pytest.param(NUM_RACERS, marks=campaign)], ids=["few", "many"])
def test_clients_that_race_for_the_last_tokens_overspend_none(lab: GatewayLab, num_racers: int) -> None:
    tenant, key = lab.account(f"race-{num_racers}")
    draw = RequestDraw(random.Random(num_racers), with_refusals=False)
    requests = [draw.draw(MAX_TOKENS) for _ in range(num_racers)]
    costs = asyncio.run(costs_of(lab, key, requests))
    # The quota covers slightly less than half of the racers, and hardly refills during the race.
    burst = sum(costs) * 4 // 9
    QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 1, burst)
    QuotaPolicies(lab.database).set(tenant.id, "concurrent_requests", 200)
    # A batch races too. Its lines wait for quota instead of failing.
    batches = DrawnBatches(lab, tenant.id, key)
    batches.start([as_line(streamed_completion(MAX_TOKENS))] * (num_racers // 4))

    async def race() -> list[tuple[int, bytes]]:
        async def one(number: int) -> tuple[int, bytes]:
            while True:
                status, answer = await send(lab.gateways[number % len(lab.gateways)].port, key, requests[number])
                # Retry after refusals for other reasons: only one about tokens is final.
                if status == 200 or (status == 429 and b"tokens_per_minute" in answer):
                    return status, answer
                assert status in BUSY, answer
                await asyncio.sleep(random.uniform(0.05, 0.5))

        return await asyncio.gather(*(one(number) for number in range(num_racers)))

    started = time.monotonic()
    answers = asyncio.run(race())
    batches.cancel()
    batches.finish(("completed", "cancelled"))
    lab.wait_settled()
    batches.check()
    minutes = (time.monotonic() - started) / 60
    used = lab.check_bills(tenant.id, answers)
    lab.check_predictions(tenant.id, predictions_of(answers))
    admitted = [i for i, (status, _) in enumerate(answers) if status == 200 and requests[i].is_charged]
    refused = [i for i, (status, _) in enumerate(answers) if status == 429]
    print(
        f"\n{num_racers} clients, {len(lab.gateways)} gateways, {kinds(requests)}: "
        f"{len(admitted)} admitted, {len(refused)} refused, {used} of {burst} tokens used, {batches}, "
        f"{lab.drafts_of(tenant.id)}"
    )
    told = [usage_of(answers[i][1]) for i in admitted]
    told_tokens = sum(usage[1].prompt_tokens + usage[1].completion_tokens for usage in told if usage is not None)
    assert used == told_tokens + batches.num_tokens
    assert None not in told
    assert used <= burst + minutes + 1, "overspent"
    # A grammar may end an answer before it uses all reserved tokens.
    num_admitted = sum(costs[i] for i in admitted) + batches.num_tokens
    assert num_admitted > burst - min(costs[i] for i in refused), "the last tokens were admitted too"


async def costs_of(lab: GatewayLab, key: str, requests: list[DrawnRequest]) -> list[int]:
    """The tokens that each request reserves: `MAX_TOKENS` per choice, and its prompt, which `/tokenize` counts."""
    places = asyncio.Semaphore(32)

    async def cost(number: int, request: DrawnRequest) -> int:
        if not request.is_charged:
            return 0
        if request.path == EMBEDDINGS:
            return len(request.body["input"])
        if request.path == COMPLETIONS:
            return 1 + MAX_TOKENS * request.num_choices
        async with places:
            status = 503
            while status in BUSY:
                status, answer = await send(lab.gateways[number % len(lab.gateways)].port, key, request.as_tokenize())
        assert status == 200, answer
        [num_prompt] = re.findall(rb'"count":(\d+)', answer)
        return int(num_prompt) + MAX_TOKENS * request.num_choices

    return await asyncio.gather(*(cost(number, request) for number, request in enumerate(requests)))


def kinds(requests: Iterable[DrawnRequest]) -> dict[str, int]:
    return dict(sorted(Counter(request.kind for request in requests).items()))


@campaign
def test_answers_with_drafts_end_where_the_quota_does(lab: GatewayLab) -> None:
    """Without `max_tokens`, answers reserve more tokens in their middle, while most steps commit several."""
    num_rounds, num_chats, burst = max(1, NUM_RACERS // 500), 8, 20_000
    dice = random.Random(NUM_RACERS)
    counts: list[DraftCounts] = []
    num_cut = 0

    async def chat_all(key: str) -> list[tuple[int, bytes]]:
        ports = [lab.gateways[number % len(lab.gateways)].port for number in range(num_chats)]
        return await asyncio.gather(*(send(port, key, long_predicted(dice)) for port in ports))

    for number in range(num_rounds):
        tenant, key = lab.account(f"grants-{number}")
        QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 1, burst)
        started = time.monotonic()
        answers = asyncio.run(chat_all(key))
        lab.wait_settled()
        minutes = (time.monotonic() - started) / 60
        used = lab.check_bills(tenant.id, answers)
        assert lab.check_predictions(tenant.id, predictions_of(answers)) > 0
        assert burst - CHUNK_TOKENS < used <= burst + minutes + 1, number
        assert {status for status, _ in answers} <= {200, 429}, answers
        told = [usage[1] for status, answer in answers if status == 200 and (usage := usage_of(answer)) is not None]
        assert len(told) == sum(status == 200 for status, _ in answers), "an answer was cut"
        # Only the end of the quota or of the context ends an answer.
        ends = [one.completion_tokens for one in told if one.prompt_tokens + one.completion_tokens < MAX_MODEL_LEN]
        assert all(end % CHUNK_TOKENS == 0 for end in ends), ends
        num_cut += len(ends)
        counts.append(lab.drafts_of(tenant.id))
        assert not [one for one in lab.events_of(tenant.id).values() if not lab.truths()[one.request_id].fits(one)]
    print(f"\n{num_rounds * num_chats} chats, {num_cut} ended by the quota, {DraftCounts.total(counts)}")
    assert num_cut > num_rounds
    check_drafted(DraftCounts.total(counts), 100 * num_rounds)


def check_drafted(counts: DraftCounts, least: int, sources: Iterable[str] = ("text", "prediction")) -> None:
    """Check that the campaign had this many accepted and rejected drafts."""
    for source in sources:
        assert counts.accepted[source] >= least, counts
        assert counts.rejected(source) >= least, counts


@pytest.mark.parametrize("num_streams", [60, pytest.param(NUM_CUTS, marks=campaign)], ids=["few", "many"])
def test_streams_cut_at_random_points_are_charged_what_the_engine_committed(lab: GatewayLab, num_streams: int) -> None:
    tenant, key = lab.account(f"cuts-{num_streams}")
    QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 10**9)
    dice = random.Random(num_streams)

    draw = RequestDraw(dice)
    crowd = [draw.draw(12) for _ in range(num_streams * 4 // 5)]
    # Steps that read a prompt have no drafts, so most drafts need longer answers beside few others.
    rest = [draw.draw(60) for _ in range(num_streams - len(crowd))]

    async def cut_all(requests: list[DrawnRequest], num_at_once: int) -> list[tuple[int, bytes]]:
        places = asyncio.Semaphore(num_at_once)

        async def one(number: int, request: DrawnRequest) -> tuple[int, bytes]:
            async with places:
                port = lab.gateways[number % len(lab.gateways)].port
                status, answer = await send(port, key, request, dice.randrange(16))
            # 0: the client left before it received a status.
            assert status in (0, 400 if request.is_refused else 200, *BUSY), (request, answer)
            return status, answer

        return await asyncio.gather(*(one(number, request) for number, request in enumerate(requests)))

    batches = DrawnBatches(lab, tenant.id, key)
    batches.start_drawn(draw, 12, num_streams // 10)
    requests = crowd + rest
    answers = asyncio.run(cut_all(crowd, 64)) + asyncio.run(cut_all(rest, 4))
    batches.cancel()
    batches.finish(("completed", "cancelled"))
    lab.wait_settled(120)
    batches.check()
    total = lab.check_bills(tenant.id, answers)
    lab.check_predictions(tenant.id, predictions_of(answers))
    num_cut = sum(
        request.is_charged and status in (0, 200) and usage_of(answer) is None
        for request, (status, answer) in zip(requests, answers, strict=True)
    )
    truths = lab.truths()
    # A line of a cancelled batch that was not stored is charged nothing. `batches.check` has compared the others.
    events = {one: event for one, event in lab.events_of(tenant.id).items() if event.endpoint != "batches"}
    wrong = [event for request_id, event in events.items() if not truths[request_id].fits(event)]
    drafts = lab.drafts_of(tenant.id)
    print(
        f"\n{num_streams} requests, {kinds(requests)}, statuses {dict(Counter(status for status, _ in answers))}: "
        f"{num_cut} cut, {len(events)} in the ledger, {total} tokens, {len(wrong)} wrong, {batches}, {drafts}"
    )
    assert num_cut > num_streams / 5
    if num_streams >= 1000:
        check_drafted(drafts, num_streams // 50)
    with recorded("disconnects", disconnects=num_cut, wrong_bills=len(wrong)):
        assert wrong == []


@campaign
def test_gateways_stopped_under_load_finish_their_streams(lab: GatewayLab) -> None:
    tenant, key = lab.account("stops")
    QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 10**9)
    dice = random.Random(NUM_STOPS)

    draw = RequestDraw(dice, with_refusals=False)
    answers: list[tuple[DrawnRequest, int, bytes]] = []

    async def send_until_refused(gateway: LabGateway) -> None:
        status = 200
        while status == 200:
            try:
                request = draw.draw(dice.randrange(1, 120))
                status, answer = await send(gateway.port, key, request)
            except ConnectionError:
                return
            answers.append((request, status, answer))

    async def load_and_stop(together: list[LabGateway]) -> None:
        streams = [asyncio.create_task(send_until_refused(gateway)) for gateway in together for _ in range(6)]

        async def stop(gateway: LabGateway) -> None:
            await asyncio.sleep(dice.uniform(0.0, 1.5))
            await asyncio.to_thread(lab.stop, gateway)

        await asyncio.gather(*map(stop, together))
        await asyncio.gather(*streams)

    batches = DrawnBatches(lab, tenant.id, key)
    batches.start_drawn(draw, 100, 5 * NUM_STOPS)
    num_done = 0
    while num_done < NUM_STOPS:
        together = lab.gateways[: NUM_STOPS - num_done]
        asyncio.run(load_and_stop(together))
        for gateway in together:
            lab.start(gateway)
        for gateway in together:
            lab.wait_ready(gateway)
        num_done += len(together)
    batches.finish()
    lab.wait_settled()
    batches.check()
    statuses = Counter(status for _, status, _ in answers)
    cut = [
        (request.kind, answer[-200:])
        for request, status, answer in answers
        if status == 200 and request.is_charged and usage_of(answer) is None
    ]
    received = [(status, answer) for _, status, answer in answers]
    total = lab.check_bills(tenant.id, received)
    lab.check_predictions(tenant.id, predictions_of(received))
    truths = lab.truths()
    # A line that a stopped gateway gave back was charged nothing.
    events = (event for event in lab.events_of(tenant.id).values() if event.endpoint != "batches")
    wrong = [event for event in events if not truths[event.request_id].fits(event)]
    drafts = lab.drafts_of(tenant.id)
    print(
        f"\n{num_done} stops, {kinds(request for request, _, _ in answers)}, answers by status {dict(statuses)}, "
        f"{total} tokens, {len(cut)} streams cut, {len(wrong)} bills wrong, {batches}, "
        f"{drafts}"
    )
    check_drafted(drafts, 3 * NUM_STOPS)
    with recorded("stops", stops=num_done, cut=len(cut), wrong_bills=len(wrong)):
        assert cut == []
        assert wrong == []
    # 0: the listener was closed before the request was read. A draining gateway refuses new requests.
    assert set(statuses) <= {200, 0, 503, 529}


@pytest.mark.parametrize("num_kills", [1, pytest.param(NUM_KILLS, marks=campaign)], ids=["one", "many"])
def test_gateways_killed_at_random_moments_settle_each_request_once(lab: GatewayLab, num_kills: int) -> None:
    lab.see_reservations()
    tenant, key = lab.account(f"kills-{num_kills}")
    QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 10**9)
    dice = random.Random(num_kills)
    # The first gateway survives and recovers the other gateways' requests.
    victims = lab.gateways[1:]
    draw = RequestDraw(dice)
    drawn: list[DrawnRequest] = []
    answers: list[tuple[int, bytes]] = []

    async def stream_and_kill(together: list[LabGateway]) -> None:
        requests = [(gateway, draw.draw(dice.choice((20, 2000)))) for gateway in together for _ in range(6)]
        streams = [asyncio.create_task(send(gateway.port, key, request)) for gateway, request in requests]

        async def kill(gateway: LabGateway) -> None:
            # Once in a while, answers have run for so long that a checkpoint knows most of their tokens.
            await asyncio.sleep(14.0 if num_done % 12 == 6 else dice.uniform(0.0, 1.5))
            await asyncio.to_thread(lab.kill, gateway)

        await asyncio.gather(*map(kill, together))
        answers.extend(await asyncio.gather(*streams))
        drawn.extend(request for _, request in requests)

    batches = DrawnBatches(lab, tenant.id, key)
    batches.start_drawn(draw, 100, 5 * num_kills)
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
        batches.expire_claims()
    batches.finish()
    if num_kills < 20:
        # Expire the leases of the dead gateways.
        with lab.database.write() as connection:
            connection.execute(update(schema.reservations).values(lease_expires_us=0))
    lab.wait_settled(120)
    batches.check()
    truths = lab.truths()
    events = lab.events_of(tenant.id)
    reserved = lab.reserved_tokens(tenant.id)
    unsettled = set(reserved) ^ set(events)
    # The engine notices a dead gateway within a second, and writing a checkpoint takes time.
    num_unknown_steps = int((CHECKPOINT_INTERVAL_S + 2.0) / STEP_S)
    most_under, num_recovered, num_long, is_under = 0, 0, 0, False
    for request_id, event in events.items():
        truth = truths[request_id]
        committed = truth.completion_tokens
        assert event.prompt_tokens + event.completion_tokens <= reserved.get(request_id, 0)
        assert event.completion_tokens <= committed
        if event.endpoint != "batches":
            # A line that was lost is charged nothing.
            under = committed - event.completion_tokens
            most_under = max(most_under, under)
            most_unknown = truth.committed_in_last(num_unknown_steps)
            is_under |= under > most_unknown
            num_long += committed > most_unknown
        num_recovered += event.status == "recovered"
    total = lab.check_bills(tenant.id, answers)
    lab.check_predictions(tenant.id, predictions_of(answers))
    drafts = lab.drafts_of(tenant.id)
    print(
        f"\n{num_done} kills, {kinds(drawn)}, {len(events)} in the ledger, {total} tokens, {num_recovered} recovered, "
        f"{num_long} with tokens that a checkpoint must know, at most {most_under} tokens under, {batches}, {drafts}"
    )
    if num_kills > 1:
        # A killed engine does not note its drafts.
        check_drafted(drafts, num_kills, sources=("text",))
    with recorded("kills", kills=num_done, unsettled=len(unsettled), undercounted=is_under):
        assert not unsettled, "each request is settled once"
        assert not is_under
