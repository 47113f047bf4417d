"""Pages with more objects than one list shows."""

from __future__ import annotations

import html
import re

import pytest
from sqlalchemy import insert, select

from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import evals
from tests.admin.admin_side import AdminSide
from tests.admin.console.signed_in_browser import Browser, first_match
from tests.admin.finished_evals import add_finished_eval
from tests.admin.metered_requests import begin_request
from tests.admin.rest.adapters.ready_versions import add_ready_versions

pytestmark = pytest.mark.anyio


async def test_oldest_live_request_is_on_the_last_page(operator: Browser, console_side: AdminSide) -> None:
    services = console_side.services
    tenant = services.accounts.tenants.create("stuck")
    key = services.accounts.api_keys.create(tenant.id, "caller").key
    first, *_ = (begin_request(console_side, tenant.id, key.id, "the-base", 5) for _ in range(51))
    page = (await operator.get("/requests?tenant=stuck")).text
    assert first not in page
    older = html.unescape(first_match(r'href="/console([^"]+)">Older', page))
    page = (await operator.get(older)).text
    assert re.findall(r"/console/requests/(req_[0-9a-f]{32})/cancel", page) == [first]
    stream = html.unescape(first_match(r'sse-connect="/console([^"]+)"', page))
    assert first_match(r"(after=req_[0-9a-f]{32})", older) in stream


async def test_old_versions_keep_their_place_and_their_scores(operator: Browser, console_side: AdminSide) -> None:
    services = console_side.services
    adapter = services.adapters.registry.create_adapter(services.accounts.tenants.create("training").id, "daily")
    add_ready_versions(services.database, adapter.id, 102)
    here = f"/adapters/{adapter.id}"
    form = (await operator.get(f"{here}/evals?version=1")).text
    assert re.search(r'name="version"[^>]* value="1"', form)
    page = (await operator.get(f"{here}/move?alias=default")).text
    assert re.search(r'name="weight_1" value="100"', page)
    assert page.count('type="number" min="0"') == 101


async def test_score_is_shown_however_many_evals_follow(operator: Browser, console_side: AdminSide) -> None:
    services = console_side.services
    adapter = services.adapters.registry.create_adapter(services.accounts.tenants.create("grading").id, "daily")
    add_ready_versions(services.database, adapter.id, 3)
    database = services.database
    for passed in (2, 3):
        first = add_finished_eval(database, adapter.id, 1, passed=passed)
    newer = add_finished_eval(database, adapter.id, 2, passed=4)
    # A hundred copies of an eval that does not count are newer than the score of the first version.
    with database.write() as connection:
        row = dict(connection.execute(select(evals).where(evals.c.id == newer)).mappings().one())
        copies = [{**row, "id": new_id("evl"), "state": "failed", "score_ppm": None} for _ in range(100)]
        connection.execute(insert(evals), copies)
    page = (await operator.get(f"/adapters/{adapter.id}")).text
    assert f'/evals/{first}" title="tests.jsonl">0.750</a>' in page
    assert f'/evals/{newer}" title="tests.jsonl">1.000</a>' in page


async def test_page_says_that_there_are_more_prices(operator: Browser, console_side: AdminSide) -> None:
    prices, now_us = console_side.services.usage.prices, console_side.services.database.now_us()
    for number in range(1, 22):
        if number == 21:
            assert "prices list" not in (await operator.get("/usage")).text
        amounts = {"prompt_nanos": number, "cached_nanos": None, "completion_nanos": 1}
        prices.add(tenant_id=None, scope="all", **amounts, effective_us=now_us + number * 3_600_000_000)
    assert "The newest 20 are shown; <code>loramux prices list</code>" in (await operator.get("/usage")).text


async def test_name_without_a_tenant_asks_for_the_tenant(operator: Browser) -> None:
    page = (await operator.get("/adapters?name=support")).text
    assert "Enter the tenant, too" in page
    assert 'name="name" value="support"' in page
