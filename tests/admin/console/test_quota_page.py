from __future__ import annotations

import html
from typing import Any

import pytest

from loramux.admin.console.rest_calls import RestCalls, RestError
from tests.admin.admin_side import AdminSide
from tests.admin.console.signed_in_browser import Browser, first_match
from tests.admin.metered_requests import begin_request

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("limit", "burst", "shown"),
    [
        pytest.param(6000, 600, ["0 of 600", "100 of 600"], id="small burst"),
        pytest.param(100, 1000, ["0 of 1,000", "100 of 1,000"], id="large burst"),
    ],
)
async def test_rate_is_shown_as_a_part_of_its_burst(
    operator: Browser, console_side: AdminSide, limit: int, burst: int, shown: list[str]
) -> None:
    services = console_side.services
    tenant = services.accounts.tenants.create(f"bursting-{burst}")
    key = services.accounts.api_keys.create(tenant.id, "caller").key
    policy = services.usage.quotas.set(tenant.id, "tokens_per_minute", limit, burst)
    seen = []
    for _ in range(2):
        page = (await operator.get(f"/quotas?tenant={tenant.slug}")).text
        removal = (await operator.get(f"/quotas/{policy.id}/delete")).text
        seen.append(first_match(r"</progress><span>([^<]+)</span>", page))
        assert f"<dt>In use now</dt><dd>{seen[-1]}</dd>" in removal
        begin_request(console_side, tenant.id, key.id, "the-base", 84)
    assert seen == shown


async def test_limit_of_nothing_is_full(operator: Browser, console_side: AdminSide) -> None:
    services = console_side.services
    services.usage.quotas.set(services.accounts.tenants.create("closed").id, "concurrent_requests", 0)
    assert 'value="100.0"' in (await operator.get("/quotas?tenant=closed")).text


async def test_empty_burst_is_the_limit(operator: Browser, console_side: AdminSide) -> None:
    services = console_side.services
    tenant = services.accounts.tenants.create("calmed")
    policy = services.usage.quotas.set(tenant.id, "tokens_per_minute", 1000, 100_000)
    page = (await operator.get("/quotas?tenant=calmed")).text
    fields = {name: first_match(f'name="{name}" value="([^"]*)"', page) for name in ("quota_id", "seen")}
    await operator.post("/quotas", tenant="calmed", metric="tokens_per_minute", limit="1000", burst="", **fields)
    changed = services.usage.quotas.get(policy.id)
    assert changed is not None
    assert changed.burst == 1000


@pytest.mark.parametrize("scope", ["key", "adapter"])
async def test_limit_of_a_key_or_adapter_is_named_removed_and_restored(
    operator: Browser, console_side: AdminSide, scope: str
) -> None:
    services = console_side.services
    tenant = services.accounts.tenants.create(f"owner-of-{scope}")
    key = services.accounts.api_keys.create(tenant.id, "nightly").key
    adapter = services.adapters.registry.create_adapter(tenant.id, "voice")
    subject = key.id if scope == "key" else adapter.id
    quotas = services.usage.quotas
    quotas.set(tenant.id, "tokens_per_minute", 9000)
    policy = quotas.set(subject, "tokens_per_minute", 1000, 2000)
    name = f"the adapter {tenant.slug}/voice"
    if scope == "key":
        name = f"the key nightly (key_…{key.id[-6:]}) of {tenant.slug}"
    page = html.unescape((await operator.get(f"/quotas?tenant={tenant.slug}")).text)
    assert f"tokens per minute of {name}</h2>" in page
    page = html.unescape((await operator.get(f"/quotas/{policy.id}/delete")).text)
    assert f"<h1>Remove tokens per minute of {name}</h1>" in page
    assert "the limits of the tenant stay" in page
    assert "In use now</dt><dd>0 of 2,000<" in page
    said = await operator.confirm(f"/quotas/{policy.id}/delete")
    assert quotas.get(policy.id) is None
    again = html.unescape(first_match(r'<a href="/console([^"]+)">Undo', said))
    assert f"of the {scope} {subject}" in (await operator.get(again)).text
    assert f"tokens_per_minute of {name} is now 1,000" in html.unescape(await operator.confirm(again))
    found = {one.subject_id: (one.limit, one.burst) for one in quotas.list(tenant.id, 10).data}
    assert found == {tenant.id: (9000, 9000), subject: (1000, 2000)}


@pytest.mark.parametrize(
    ("tenant", "limit", "said"),
    [
        pytest.param("", "1000", "Enter a tenant to try the limit.", id="no tenant"),
        pytest.param("nobody", "1000", "There is no tenant &#39;nobody&#39;.", id="unknown tenant"),
        pytest.param("nobody", "many", "A limit must be a whole number.", id="no number"),
    ],
)
async def test_error_of_a_dry_run_is_shown_in_its_dialog(operator: Browser, tenant: str, limit: str, said: str) -> None:
    response = await operator.client.post(
        "/console/quotas/preview",
        data={"tenant": tenant, "metric": "tokens_per_minute", "limit": limit, "csrf": operator.csrf},
        headers={"hx-request": "true"},
    )
    assert response.status_code in (400, 404)
    assert "hx-retarget" not in response.headers
    assert said in response.text


async def test_dry_run_that_meets_a_rate_limit_says_how_long_to_wait(
    operator: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*call: Any) -> Any:
        raise RestError(429, {"message": "too many calls"}, 7)

    monkeypatch.setattr(RestCalls, "post", refuse)
    response = await operator.client.post(
        "/console/quotas/preview",
        data={"tenant": "acme", "metric": "tokens_per_minute", "limit": "1000", "csrf": operator.csrf},
        headers={"hx-request": "true"},
    )
    assert (response.status_code, "try again in 7 s" in response.text) == (429, True)
