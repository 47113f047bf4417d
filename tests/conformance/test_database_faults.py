"""Gateways whose PostgreSQL breaks connections and queries bill each request once, and recover without a restart."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from loramux.migrations import schema
from tests.conformance.drawn_requests import MESSAGES, DrawnRequest, RequestDraw, streamed_completion
from tests.conformance.gateway_lab import GatewayLab, Truth, make_lab_base, send, usage_of
from tests.platform.postgres_proxy import PostgresProxy, SeededPlan, no_faults
from tests.postgres import create_database
from tests.reliability.record import recorded

NUM_FAULTS = int(os.environ.get("LORAMUX_DATABASE_FAULTS", "240"))
NUM_GATEWAYS = 2
FAULTS_PER_ROUND = 60
"""Number of faults between two times without faults, in which the gateways recover."""

FAULT_RATE = 0.05
NUM_CLIENTS = 12
REFUSAL_PAUSE_S = 0.05
RECOVERY_S = 60.0
"""Longest time, in seconds, until the gateways answer again after the last fault."""


class ProxiedLab(GatewayLab):
    """Gateways that reach the database through a proxy. The lab itself reaches it directly."""

    def __init__(self, directory: Path, url: str, model: Path, proxy: PostgresProxy) -> None:
        self._proxy = proxy
        super().__init__(directory, url, model, NUM_GATEWAYS)

    def _settings(self, number: int) -> dict[str, Any]:
        return {**super()._settings(number), "database_url": self._proxy.url}

    def billed(self, tenant_id: str) -> Mapping[str, Any]:
        """The tokens in the ledger by request, with corrections."""
        adjustments = schema.usage_adjustments
        with self.database.read() as connection:
            rows = connection.execute(select(adjustments).filter_by(tenant_id=tenant_id)).all()
        corrections = {row.request_id: row for row in rows}
        billed = {}
        for request_id, event in self.events_of(tenant_id).items():
            added = corrections.get(request_id)
            billed[request_id] = SimpleNamespace(
                prompt_tokens=event.prompt_tokens + (0 if added is None else added.prompt_tokens),
                completion_tokens=event.completion_tokens + (0 if added is None else added.completion_tokens),
                end_user=event.end_user,
            )
        return billed


@dataclass
class Seen:
    answers: list[tuple[DrawnRequest, int, bytes]] = field(default_factory=list)
    undocumented: list[bytes] = field(default_factory=list)
    """Answers that a client must not get while the database fails."""
    slowest_recovery_s: float = 0.0


@pytest.fixture
def proxied(postgres_server: str, demo_base: Path, tmp_path: Path) -> Iterator[tuple[ProxiedLab, PostgresProxy]]:
    model = make_lab_base(tmp_path, demo_base)
    url = create_database(postgres_server, "database_faults")
    with (
        tempfile.TemporaryDirectory(prefix="loramux-lab-") as directory,
        closing(PostgresProxy(url)) as proxy,
        closing(ProxiedLab(Path(directory), url, model, proxy)) as lab,
    ):
        yield lab, proxy


@pytest.mark.campaign
@pytest.mark.timeout(600 + 4 * NUM_FAULTS)
def test_requests_are_billed_once_whatever_the_database_breaks(proxied: tuple[ProxiedLab, PostgresProxy]) -> None:
    lab, proxy = proxied
    lab.see_reservations()
    tenant, key = lab.account("faults")
    pids = [gateway.pid for gateway in lab.gateways]
    dice = random.Random(NUM_FAULTS)
    seen = Seen()
    plan = SeededPlan(NUM_FAULTS, FAULT_RATE)
    while (num_faults := proxy.num_injected.total()) < NUM_FAULTS:
        until = num_faults + min(FAULTS_PER_ROUND, NUM_FAULTS - num_faults)
        asyncio.run(suffer(lab, key, proxy, plan, RequestDraw(dice, with_refusals=False), until, seen))
    lab.wait_settled(120)
    assert [gateway.pid for gateway in lab.gateways] == pids, "no gateway was started again"
    billed, truths = lab.billed(tenant.id), lab.truths()
    told = [usage for _, status, answer in seen.answers if status == 200 and (usage := usage_of(answer)) is not None]
    lost = [request_id for request_id, _ in told if request_id not in billed]
    lost += set(lab.reserved_tokens(tenant.id)) - set(billed)
    wrong = [request_id for request_id, one in billed.items() if not truths[request_id].fits(one)]
    wrong += [
        request_id
        for request_id, usage in told
        if request_id in billed
        and usage != Truth(billed[request_id].prompt_tokens, billed[request_id].completion_tokens)
    ]
    cut = [
        answer
        for request, status, answer in seen.answers
        if status == 200 and request.is_charged and usage_of(answer) is None
    ]
    print(
        f"\n{ {fault.name: number for fault, number in proxy.num_injected.items()} }, answers by status "
        f"{dict(Counter(status for _, status, _ in seen.answers))}, {len(billed)} in the ledger, {len(lost)} lost, "
        f"{len(wrong)} wrong, {len(cut)} cut, recovered after {seen.slowest_recovery_s:.1f} s at most"
    )
    with recorded(
        "database-faults",
        faults=proxy.num_injected.total(),
        kinds=len(proxy.num_injected),
        answers=len(told),
        wrong_bills=len(wrong),
        lost=len(lost),
        cut=len(cut),
        recovery_s=round(seen.slowest_recovery_s, 1),
    ):
        assert seen.undocumented == []
        assert (lost, wrong, cut) == ([], [], [])
        # The counters of the quota agree with the ledger.
        lab.check_bills(tenant.id, [])
        assert len(told) > NUM_FAULTS / 10


async def suffer(
    lab: ProxiedLab, key: str, proxy: PostgresProxy, plan: SeededPlan, draw: RequestDraw, until: int, seen: Seen
) -> None:
    """Send requests while queries fail, until the proxy has injected `until` faults and the gateways have recovered."""
    is_over = asyncio.Event()

    async def client(number: int) -> None:
        while not is_over.is_set():
            request = _draw(draw)
            status, answer = await send(lab.gateways[number % NUM_GATEWAYS].port, key, request)
            seen.answers.append((request, status, answer))
            if status != 200:
                if not _is_documented(request, status, answer):
                    seen.undocumented.append(answer)
                await asyncio.sleep(REFUSAL_PAUSE_S)

    clients = [asyncio.create_task(client(number)) for number in range(NUM_CLIENTS)]
    proxy.plan = plan
    while proxy.num_injected.total() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    proxy.plan = no_faults
    began_s = time.monotonic()
    for gateway in lab.gateways:
        while not await _answers(gateway.port, key):
            assert time.monotonic() - began_s < RECOVERY_S, "a gateway did not recover"
            await asyncio.sleep(REFUSAL_PAUSE_S)
    seen.slowest_recovery_s = max(seen.slowest_recovery_s, time.monotonic() - began_s)
    is_over.set()
    await asyncio.gather(*clients)


def _draw(draw: RequestDraw) -> DrawnRequest:
    """A request whose answer is not stored. What is stored needs the database before an answer has begun, too."""
    while True:
        drawn = draw.draw(12)
        if not drawn.body.get("store") and not drawn.body.get("background"):
            return drawn


def _is_documented(request: DrawnRequest, status: int, answer: bytes) -> bool:
    """True for a refusal for now. Messages have Anthropic's status and type of error."""
    head = answer.partition(b"\r\n\r\n")[0].lower()
    return status in ((529, 429) if request.path == MESSAGES else (503, 429)) and b"\r\nretry-after: " in head


async def _answers(port: int, key: str) -> bool:
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=30) as http:
        ready = await http.get(f"http://127.0.0.1:{port}/health/ready")
    status, _ = await send(port, key, streamed_completion(2))
    return ready.status_code == 200 and status == 200
