"""Servers with wrong clocks share keys, quotas, sessions, requests and reports. Needs Debian's libfaketime."""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.quotas.policies import QuotaPolicies
from tests.conformance.drawn_requests import streamed_completion
from tests.conformance.fleet_lab import FleetLab
from tests.conformance.fleet_streams import is_billed_as_received, numbered_stream, send_stream
from tests.conformance.gateway_lab import LabGateway, make_lab_base, send
from tests.postgres import create_database

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
CLOCKS = ("+0s", "+3600s", "-3600s")

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.fleet,
    pytest.mark.skipif(not LIBRARY.exists(), reason="no libfaketime"),
]


class ClockLab(FleetLab):
    """Servers whose clocks are an hour ahead, right, and an hour behind. Their monotonic clocks are right."""

    def _maker_environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME": "+0s",
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def _settings(self, number: int) -> dict[str, Any]:
        return {**super()._settings(number), "faketime": CLOCKS[number]}


@pytest.fixture(scope="module")
def lab(postgres_server: str, demo_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClockLab]:
    model = make_lab_base(tmp_path_factory.mktemp("base"), demo_base)
    url = create_database(postgres_server, "clocks")
    with (
        tempfile.TemporaryDirectory(prefix="loramux-lab-") as directory,
        # Opening the lab waits until each server is connected to both others, which certificates could prevent.
        closing(ClockLab(Path(directory), url, model, len(CLOCKS))) as lab,
    ):
        yield lab


@pytest.fixture(scope="module")
def admins(lab: ClockLab) -> Iterator[list[httpx.Client]]:
    """A client of each server's admin listener."""
    secret = ApiKeys(lab.database).create(None, "admin", ["platform:admin"]).secret
    clients = [
        httpx.Client(
            base_url=f"http://127.0.0.1:{gateway.settings['admin_port']}",
            headers={"authorization": f"Bearer {secret}"},
            trust_env=False,
            timeout=60,
        )
        for gateway in lab.gateways
    ]
    yield clients
    for client in clients:
        client.close()


def complete(gateway: LabGateway, key: str, max_tokens: int = 2) -> int:
    return asyncio.run(send(gateway.port, key, streamed_completion(max_tokens)))[0]


def test_clocks_differ(lab: ClockLab, admins: list[httpx.Client]) -> None:
    times = [one.get("/admin/v1/server").json()["time_ms"] / 1000 - time.time() for one in admins]
    assert [round(ahead_s / 3600) for ahead_s in times] == [0, 1, -1]


def test_keys_expire_by_one_clock(lab: ClockLab, admins: list[httpx.Client]) -> None:
    lab.account("expiring")
    for admin in admins:
        body = {"tenant": "expiring", "name": "key", "expires_in_s": 600}
        lasting = admin.post("/admin/v1/api_keys", json=body).json()["secret"]
        short = admin.post("/admin/v1/api_keys", json={**body, "expires_in_s": 60}).json()
        assert 0 < short["expires_at"] - time.time() < 90
        assert [complete(gateway, lasting) for gateway in lab.gateways] == [200] * 3
        rotated = admin.post(f"/admin/v1/api_keys/{short['id']}/rotate", json={"grace_s": 300})
        assert rotated.status_code == 200, rotated.text
        both = (short["secret"], rotated.json()["secret"])
        assert [complete(gateway, secret) for gateway in lab.gateways for secret in both] == [200] * 6


def test_quota_is_shared_and_refills_by_one_clock(lab: ClockLab) -> None:
    tenant, key = lab.account("limited")
    QuotaPolicies(lab.database).set(tenant.id, "requests_per_minute", 6)
    began_s = time.monotonic()
    statuses = [complete(lab.gateways[number % 3], key) for number in range(30)]
    passed_s = time.monotonic() - began_s
    assert 6 <= statuses.count(200) <= 6 + passed_s / 10 + 1
    assert set(statuses) == {200, 429}


def test_streams_are_settled_once_and_reported_by_every_server(lab: ClockLab, admins: list[httpx.Client]) -> None:
    tenant, key = lab.account("streams")
    dice = random.Random(1)

    async def run() -> list[Any]:
        requests = [numbered_stream(dice, "base") for _ in range(30)]
        return await asyncio.gather(*(send_stream(lab.gateways[i % 3], key, one) for i, one in enumerate(requests)))

    streams = asyncio.run(run())
    lab.wait_settled()
    lab.check_bills(tenant.id, [(one.status, one.answer) for one in streams])
    events = lab.events_of(tenant.id)
    assert all(one.is_complete and is_billed_as_received(one, events) for one in streams)
    # All times are the database's. The first token's is computed, so it may be milliseconds off.
    for event in events.values():
        assert abs(event.first_token_us - event.started_us) < 60_000_000
        assert 0 <= event.finished_us - event.started_us < 60_000_000
    for admin in admins:
        report = admin.get("/admin/v1/usage", params={"tenant": "streams"}).json()
        assert sum(row["requests"] for bucket in report["data"] for row in bucket["results"]) == 30
        page = admin.get("/console/")
        assert page.status_code in (200, 303)


def test_session_is_valid_on_every_server(lab: ClockLab, admins: list[httpx.Client]) -> None:
    secret = admins[0].headers["authorization"].removeprefix("Bearer ")
    roots = [str(one.base_url).rstrip("/") for one in admins]
    for first in roots:
        with httpx.Client(trust_env=False, timeout=60) as browser:
            page = browser.get(f"{first}/console/login").text
            [token] = re.findall(r'name="csrf" value="([^"]+)"', page)
            form = {"key": secret, "csrf": token}
            signed_in = browser.post(f"{first}/console/login", data=form, headers={"origin": first})
            assert signed_in.status_code == 303, signed_in.text[-500:]
            for root in roots:
                assert browser.get(f"{root}/console/keys").status_code == 200


def test_repeated_call_gets_the_first_answer_from_every_server(admins: list[httpx.Client]) -> None:
    for number, first in enumerate(admins):
        body, header = {"slug": f"once-{number}"}, {"idempotency-key": f"once-{number}"}
        made = first.post("/admin/v1/tenants", json=body, headers=header)
        assert made.status_code == 201
        for other in admins:
            again = other.post("/admin/v1/tenants", json=body, headers=header)
            assert (again.status_code, again.json()) == (201, made.json())
