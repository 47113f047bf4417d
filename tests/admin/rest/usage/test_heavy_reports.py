from __future__ import annotations

import time
from contextlib import AsyncExitStack

import anyio
import httpx
import pytest

from loramux.admin.console import live
from loramux.admin.console.rest_calls import RestCalls
from loramux.admin.rest.services import MAX_CALLS_EACH, MAX_EXPORTS_EACH, MAX_REPORTS_EACH, NUM_REPORT_THREADS
from loramux.admin.rest.usage.usage_query import SENT_AT_ONCE_BYTES
from loramux.admin.server import transfer_slots
from tests.admin.admin_side import AdminSide
from tests.admin.app_client import client_of
from tests.adversary.many_end_users import add_end_users

pytestmark = pytest.mark.anyio
REPORTS = ("/usage", "/usage?group_by=end_user&top=5", "/usage/events", "/usage/events/export", "/costs")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_slots, "WAIT_S", 0.05)


class Tenant:
    def __init__(self, admin_side: AdminSide, http: httpx.AsyncClient, slug: str) -> None:
        services = admin_side.services
        self.id = services.accounts.tenants.create(slug).id
        self._secret = services.accounts.api_keys.create(self.id, "reader", ["tenant:read"]).secret
        self._http = http

    async def get(self, path: str) -> httpx.Response:
        return await self._http.get(f"/admin/v1{path}", headers={"authorization": f"Bearer {self._secret}"})


def refusal(answer: httpx.Response) -> tuple[int, str]:
    assert int(answer.headers["retry-after"]) > 0
    return answer.status_code, answer.json()["error"]["code"]


async def test_reports_delay_only_the_same_tenants_reports(http: httpx.AsyncClient, admin_side: AdminSide) -> None:
    acme, initech = (Tenant(admin_side, http, slug) for slug in ("acme", "initech"))
    report_slots = admin_side.services.slots.reports
    releases = [await report_slots.acquire_slot(acme.id) for _ in range(MAX_REPORTS_EACH)]
    for path in REPORTS:
        assert refusal(await acme.get(path)) == (429, "too_many_reports"), path
        assert (await initech.get(path)).status_code == 200, path
        assert (await http.get(f"/admin/v1{path}", params={"tenant": acme.id})).status_code == 200, path
    assert (await acme.get("/adapters")).status_code == 200, "other calls are still served"
    for release_slot in releases:
        release_slot()
    for path in REPORTS:
        assert (await acme.get(path)).status_code == 200, path
    assert report_slots.num_taken == 0


async def test_metrics_health_and_lists_need_no_report_slot(http: httpx.AsyncClient, admin_side: AdminSide) -> None:
    acme = Tenant(admin_side, http, "acme")
    async with AsyncExitStack() as stack:
        for number in range(NUM_REPORT_THREADS):
            await stack.enter_async_context(admin_side.services.slots.reports.held_slot(f"tenant-{number}"))
        assert refusal(await acme.get("/usage")) == (503, "too_many_reports")
        local = {"host": "localhost"}
        assert (await http.get("/metrics", headers=local)).status_code == 200
        for path in ("/health/ready", "/health/live", "/admin/v1/tenants"):
            assert (await http.get(path)).status_code == 200, path


async def test_calls_are_limited_per_tenant(http: httpx.AsyncClient, admin_side: AdminSide) -> None:
    acme, initech = (Tenant(admin_side, http, slug) for slug in ("acme", "initech"))
    async with AsyncExitStack() as stack:
        for _ in range(MAX_CALLS_EACH):
            await stack.enter_async_context(admin_side.services.slots.calls.held_slot(acme.id))
        for path in ("/adapters", "/api_keys", "/jobs", "/requests", "/residency", "/quotas/effective", "/prices"):
            assert refusal(await acme.get(path)) == (429, "too_many_calls"), path
            assert (await initech.get(path)).status_code == 200, path
            assert (await http.get(f"/admin/v1{path}")).status_code in (200, 400), path
    assert (await acme.get("/adapters")).status_code == 200


async def test_waiting_reports_hold_no_call_slot(
    http: httpx.AsyncClient, admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_slots, "WAIT_S", 10.0)
    acme = Tenant(admin_side, http, "acme")
    report_slots, statuses = admin_side.services.slots.reports, []

    async def report() -> None:
        statuses.append((await acme.get("/usage")).status_code)

    async with anyio.create_task_group() as group, report_slots.held_slot(acme.id):
        for _ in range(2 * MAX_CALLS_EACH):
            group.start_soon(report)
        with anyio.fail_after(10):
            while report_slots.num_waiting < 2 * MAX_CALLS_EACH:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            assert (await acme.get("/adapters")).status_code == 200
        assert not statuses
    assert statuses == [200] * 2 * MAX_CALLS_EACH


async def test_a_refused_call_releases_its_slot(http: httpx.AsyncClient, admin_side: AdminSide) -> None:
    acme = Tenant(admin_side, http, "acme")
    for path, status in (
        ("/adapters/ada_nothing", 404),
        ("/adapters?limit=0", 400),
        ("/audit_log", 403),
        ("/usage?group_by=nothing", 400),
    ):
        for _ in range(MAX_CALLS_EACH + 1):
            assert (await acme.get(path)).status_code == status
    assert admin_side.services.slots.calls.num_taken == 0


async def test_concurrent_exports_are_limited_per_tenant(http: httpx.AsyncClient, admin_side: AdminSide) -> None:
    acme, initech = (Tenant(admin_side, http, slug) for slug in ("acme", "initech"))
    add_end_users(admin_side.services.database, acme.id, 600)
    long = "/usage?group_by=end_user"
    async with AsyncExitStack() as stack:
        for _ in range(MAX_EXPORTS_EACH):
            await stack.enter_async_context(admin_side.services.slots.exports.held_slot(acme.id))
        for path in ("/usage/events/export", long):
            assert refusal(await acme.get(path)) == (429, "too_many_exports"), path
        assert (await acme.get("/usage")).status_code == 200, "a short report is sent immediately"
        assert (await initech.get("/usage/events/export")).status_code == 200
    answer = await acme.get(long)
    assert len(answer.content) > SENT_AT_ONCE_BYTES
    assert len(answer.json()["data"][0]["results"]) == 600
    assert len((await acme.get("/usage/events/export")).text.splitlines()) == 600
    assert admin_side.services.slots.exports.num_taken == 0


async def test_console_gets_a_long_report_in_one_piece(http: httpx.AsyncClient, admin_side: AdminSide) -> None:
    services = admin_side.services
    acme = services.accounts.tenants.create("acme")
    add_end_users(services.database, acme.id, 600)
    secret = services.accounts.api_keys.create(acme.id, "reader", ["tenant:read"]).secret
    principal = services.accounts.api_keys.authenticate(secret)
    assert principal is not None
    app = http._transport.app  # type: ignore[attr-defined]
    page = await RestCalls(app, principal, {}, time.time).get("/usage", group_by="end_user")
    assert len(page["data"][0]["results"]) == 600
    assert services.slots.exports.num_taken == 0


async def test_live_and_concurrent_pages_are_limited_per_tenant(
    http: httpx.AsyncClient, admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS_EACH", 0)
    app = http._transport.app  # type: ignore[attr-defined]
    acme = admin_side.services.accounts.tenants.create("acme")
    secret = admin_side.services.accounts.api_keys.create(acme.id, "reader", ["tenant:read"]).secret
    async with client_of(app) as browser:
        page = await browser.get("/console/login")
        token = page.text.split('name="csrf" value="', 1)[1].split('"', 1)[0]
        assert (await browser.post("/console/login", data={"csrf": token, "key": secret})).status_code == 303
        assert (await browser.get("/console/requests")).status_code == 200
        refused = await browser.get("/console/live/requests")
        assert refused.status_code == 429
        assert "oo many live pages are open" in refused.text
        page_slots = admin_side.services.slots.pages
        async with AsyncExitStack() as stack:
            for _ in range(MAX_CALLS_EACH):
                await stack.enter_async_context(page_slots.held_slot(acme.id))
            assert (await browser.get("/console/requests")).status_code == 429
        assert (await browser.get("/console/requests")).status_code == 200
