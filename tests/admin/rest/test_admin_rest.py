"""Conventions of `/admin/v1`: who may call, lists, errors, and tenants, keys, quotas and usage themselves."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest

from loramux.admin.app import create_admin_app
from tests.admin.metered_requests import settle_request

pytestmark = pytest.mark.anyio

PUBLIC = {"/health/live", "/health/ready", "/metrics"}


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def new_tenant(http: httpx.AsyncClient, slug: str) -> str:
    response = await http.post("/admin/v1/tenants", json={"slug": slug})
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


async def new_key(http: httpx.AsyncClient, tenant: str | None, *scopes: str) -> dict[str, Any]:
    body: dict[str, Any] = {"tenant": tenant}
    if scopes:
        body["scopes"] = list(scopes)
    response = await http.post("/admin/v1/api_keys", json=body)
    assert response.status_code == 201, response.text
    return dict(response.json())


def routes(admin_side: Any) -> list[tuple[str, str]]:
    paths = create_admin_app(admin_side.services).openapi()["paths"]
    found = [(method.upper(), path.replace("{number}", "1")) for path, methods in paths.items() for method in methods]
    assert len(found) > 15
    return found


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        pytest.param("", "missing_api_key", id="no key"),
        pytest.param("Basic YTpi", "missing_api_key", id="basic"),
        pytest.param("Bearer nonsense", "invalid_api_key", id="nonsense"),
        pytest.param("Bearer sk-lmx-" + "0" * 16 + "-" + "0" * 43, "invalid_api_key", id="well-formed"),
    ],
)
async def test_every_route_needs_a_key(http: httpx.AsyncClient, admin_side: Any, authorization: str, code: str) -> None:
    headers = {"authorization": authorization}
    for method, path in routes(admin_side):
        if path in PUBLIC:
            continue
        response = await http.request(method, path, headers=headers, content=b"{not json")
        assert response.status_code == 401, (method, path)
        assert response.json()["error"]["code"] == code
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"].startswith("req_")


async def test_a_key_that_only_infers_administers_nothing(http: httpx.AsyncClient, admin_side: Any) -> None:
    await new_tenant(http, "acme")
    key = await new_key(http, "acme")
    for method, path in routes(admin_side):
        if path not in PUBLIC:
            response = await http.request(method, path, headers=bearer(key["secret"]))
            assert response.status_code == 403, (method, path)
            assert response.json()["error"]["code"] == "insufficient_scope"


async def test_no_request_needs_a_thread_that_all_share(http: httpx.AsyncClient) -> None:
    limiter = anyio.to_thread.current_default_thread_limiter()
    borrowers = [object() for _ in range(int(limiter.available_tokens))]
    for borrower in borrowers:
        limiter.acquire_on_behalf_of_nowait(borrower)
    try:
        with anyio.fail_after(5):
            assert (await http.get("/admin/v1/tenants")).status_code == 200
    finally:
        for borrower in borrowers:
            limiter.release_on_behalf_of(borrower)


async def test_a_viewer_changes_nothing(http: httpx.AsyncClient, admin_side: Any) -> None:
    key = await new_key(http, None, "platform:read")
    for method, path in routes(admin_side):
        # A dry run is asked for with a body, but it changes nothing.
        if method in ("POST", "PUT", "DELETE") and path != "/admin/v1/quotas/check":
            response = await http.request(method, path, headers=bearer(key["secret"]), json={})
            assert response.status_code == 403, (method, path)


async def test_a_tenants_administrator_sees_its_own_and_404_for_the_rest(http: httpx.AsyncClient) -> None:
    acme, globex = await new_tenant(http, "acme"), await new_tenant(http, "globex")
    theirs = await new_key(http, "globex")
    adapter = (await http.post("/admin/v1/adapters", json={"tenant": "globex", "name": "secret"})).json()
    own = bearer((await new_key(http, "acme", "tenant:admin"))["secret"])

    async def seen(path: str, **params: str) -> httpx.Response:
        return await http.get(f"/admin/v1/{path}", headers=own, params=params)

    assert [tenant["id"] for tenant in (await seen("tenants")).json()["data"]] == [acme]
    assert (await seen("adapters")).json()["data"] == []
    assert {key["tenant_id"] for key in (await seen("api_keys")).json()["data"]} == {acme}
    for path in (f"tenants/{globex}", "tenants/globex", f"api_keys/{theirs['id']}", f"adapters/{adapter['id']}"):
        foreign = await seen(path)
        unknown = await seen(path[:-1] + ("0" if path[-1] != "0" else "1"))
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.json() == unknown.json()
    for path in ("usage", "usage/events", "quotas", "adapters", "api_keys"):
        foreign, unknown = await seen(path, tenant="globex"), await seen(path, tenant="nobody")
        assert foreign.status_code == unknown.status_code == 404, path
        assert foreign.json() == unknown.json()
    declared = [{"name": "adapter_config.json", "size": 1, "sha256": "0" * 64}]
    changes = (
        ("PUT", "aliases/default", {"version": 1}),
        ("POST", "uploads", {"files": declared}),
        ("POST", "versions", {"upload_id": "upl_" + "0" * 32}),
    )
    for method, path, body in changes:
        answers = [
            await http.request(method, f"/admin/v1/adapters/{adapter_id}/{path}", headers=own, json=body)
            for adapter_id in (adapter["id"], "ada_" + "0" * 32)
        ]
        assert [answer.status_code for answer in answers] == [404, 404], path
        assert answers[0].json() == answers[1].json()
        assert answers[0].json()["error"]["code"] == "adapter_not_found"
    refused = await http.post("/admin/v1/adapters", headers=own, json={"tenant": "globex", "name": "mine"})
    assert refused.status_code == 404
    made = await http.post("/admin/v1/adapters", headers=own, json={"tenant": "acme", "name": "mine"})
    assert made.status_code == 201
    assert (await http.post("/admin/v1/tenants", headers=own, json={"slug": "new"})).status_code == 403


async def test_a_list_is_walked_by_its_last_identifier(http: httpx.AsyncClient) -> None:
    slugs = [f"tenant-{number}" for number in range(7)]
    for slug in slugs:
        await new_tenant(http, slug)
    found, after = [], None
    for _ in range(3):
        params = {"limit": 3} | ({"after": after} if after else {})
        page = (await http.get("/admin/v1/tenants", params=params)).json()
        assert page["object"] == "list"
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        found += [tenant["slug"] for tenant in page["data"]]
        after = page["last_id"]
    assert found == slugs[::-1]
    assert not page["has_more"]
    before = (await http.get("/admin/v1/tenants", params={"limit": 2, "before": after})).json()
    assert [tenant["slug"] for tenant in before["data"]] == ["tenant-2", "tenant-1"]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"limit": "0"}, id="limit 0"),
        pytest.param({"limit": "101"}, id="limit 101"),
        pytest.param({"limit": "x"}, id="limit x"),
        pytest.param({"after": "\x00"}, id="nul"),
        pytest.param({"before": "ten_1"}, id="no identifier"),
    ],
)
async def test_a_list_refuses_what_is_no_page(http: httpx.AsyncClient, params: dict[str, str]) -> None:
    response = await http.get("/admin/v1/tenants", params=params)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(params))


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        pytest.param(b"{", "invalid_json", None, id="cut off"),
        pytest.param(b"[]", "invalid_json", None, id="a list"),
        pytest.param(b'{"slug": "a", "slug": "b"}', "invalid_json", None, id="twice"),
        pytest.param(b'{"slug": NaN}', "invalid_json", None, id="nan"),
        pytest.param(b"{}", "missing_required_parameter", "slug", id="missing"),
        pytest.param(b'{"slug": 5}', "invalid_type", "slug", id="number"),
        pytest.param(b'{"slug": "a", "weight": 9}', "unknown_parameter", "weight", id="unknown"),
        pytest.param(b'{"slug": "Acme"}', "invalid_slug", "slug", id="upper case"),
        pytest.param(b'{"slug": "../a"}', "invalid_slug", "slug", id="traversal"),
        pytest.param(b'{"slug": "a\\u0000"}', "invalid_slug", "slug", id="nul"),
        pytest.param(b'{"slug": "a", "display_name": "\\u202e"}', "invalid_value", "display_name", id="bidi"),
        pytest.param(b'{"slug": "a", "display_name": "\\ud800"}', None, None, id="surrogate"),
    ],
)
async def test_bad_bodies_are_400(http: httpx.AsyncClient, body: bytes, code: str | None, param: str | None) -> None:
    response = await http.post("/admin/v1/tenants", content=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if code is not None:
        assert (error["code"], error["param"]) == (code, param)
    assert (await http.get("/admin/v1/tenants")).json()["data"] == []


async def test_a_large_body_is_413(http: httpx.AsyncClient) -> None:
    response = await http.post("/admin/v1/tenants", content=b'{"slug": "' + b"a" * 70_000 + b'"}')
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")


async def test_unknown_paths_and_methods_have_the_envelope(http: httpx.AsyncClient) -> None:
    missing, wrong = await http.get("/admin/v1/nothing"), await http.patch("/admin/v1/tenants")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_a_tenant_is_made_once(http: httpx.AsyncClient) -> None:
    tenant_id = await new_tenant(http, "acme")
    again = await http.post("/admin/v1/tenants", json={"slug": "acme"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "tenant_exists")
    for name in (tenant_id, "acme"):
        assert (await http.get(f"/admin/v1/tenants/{name}")).json()["slug"] == "acme"


async def test_a_keys_secret_is_answered_once_and_revoking_ends_it(http: httpx.AsyncClient) -> None:
    key = await new_key(http, None)
    secret = key.pop("secret")
    assert secret.startswith("sk-lmx-")
    assert (await http.get(f"/admin/v1/api_keys/{key['id']}")).json() == key
    assert (await http.get("/admin/v1/tenants", headers=bearer(secret))).status_code == 200
    revoked = (await http.delete(f"/admin/v1/api_keys/{key['id']}")).json()
    assert revoked["revoked_at"] is not None
    assert (await http.get("/admin/v1/tenants", headers=bearer(secret))).status_code == 401
    assert (await http.delete(f"/admin/v1/api_keys/{key['id']}")).json() == revoked
    assert secret not in (await http.get("/admin/v1/api_keys")).text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"tenant": "acme", "scopes": ["platform:admin"]}, "scopes", id="a tenant's key as administrator"),
        pytest.param({"tenant": None, "scopes": ["base"]}, "scopes", id="a platform key that infers"),
        pytest.param({"tenant": "acme", "scopes": []}, "scopes", id="no scope"),
        pytest.param({"tenant": "acme", "name": "\n"}, "name", id="name"),
        pytest.param({"tenant": "acme", "expires_in_s": 0}, "expires_in_s", id="expired"),
        pytest.param({"tenant": "acme", "expires_in_s": 1e300}, "expires_in_s", id="far"),
        pytest.param({"scopes": ["base"]}, "tenant", id="no owner"),
    ],
)
async def test_bad_keys_are_refused(http: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    await new_tenant(http, "acme")
    response = await http.post("/admin/v1/api_keys", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_quota_is_set_changed_listed_and_lifted(http: httpx.AsyncClient) -> None:
    await new_tenant(http, "acme")
    body = {"tenant": "acme", "metric": "tokens_per_minute", "limit": 1000}
    first = (await http.post("/admin/v1/quotas", json=body)).json()
    assert (first["limit"], first["burst"]) == (1000, 1000)
    changed = (await http.post("/admin/v1/quotas", json={**body, "limit": 50, "burst": 200})).json()
    assert (changed["id"], changed["limit"], changed["burst"]) == (first["id"], 50, 200)
    assert (await http.get("/admin/v1/quotas", params={"tenant": "acme"})).json()["data"] == [changed]
    assert (await http.delete(f"/admin/v1/quotas/{first['id']}")).json()["deleted"] is True
    assert (await http.delete(f"/admin/v1/quotas/{first['id']}")).status_code == 404
    assert (await http.get("/admin/v1/quotas")).json()["data"] == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        pytest.param({"metric": "dollars"}, "metric", id="metric"),
        pytest.param({"limit": -1}, "limit", id="negative"),
        pytest.param({"limit": 2**80}, "limit", id="huge"),
        pytest.param({"limit": 1.5}, "limit", id="fraction"),
        pytest.param({"limit": True}, "limit", id="true"),
        pytest.param({"burst": -5}, "burst", id="burst"),
    ],
)
async def test_bad_quotas_are_refused(http: httpx.AsyncClient, change: dict[str, Any], param: str) -> None:
    await new_tenant(http, "acme")
    body = {"tenant": "acme", "metric": "requests_per_minute", "limit": 5, **change}
    response = await http.post("/admin/v1/quotas", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_usage_is_reported_as_buckets_csv_and_events(http: httpx.AsyncClient, admin_side: Any) -> None:
    acme, globex = await new_tenant(http, "acme"), await new_tenant(http, "globex")
    for tenant_id, slug, tokens in ((acme, "acme", 10), (acme, "acme", 20), (globex, "globex", 5)):
        key = await new_key(http, slug)
        settle_request(admin_side, tenant_id, key["id"], "=base", tokens, 2 * tokens)
    report = (await http.get("/admin/v1/usage")).json()
    assert (report["object"], report["has_more"], report["next_page"]) == ("page", False, None)
    (bucket,) = report["data"]
    sums = {"object": "usage.result", "model": "=base", "cached_tokens": 0, "cost_nanos": 0}
    assert bucket["results"] == [
        {**sums, "tenant": "acme", "requests": 2, "prompt_tokens": 30, "completion_tokens": 60},
        {**sums, "tenant": "globex", "requests": 1, "prompt_tokens": 5, "completion_tokens": 10},
    ]
    one = (await http.get("/admin/v1/usage", params={"tenant": "globex", "group_by": "", "bucket": "1h"})).json()
    assert [result["prompt_tokens"] for result in one["data"][0]["results"]] == [5]
    table = await http.get("/admin/v1/usage", params={"format": "csv", "tenant": "acme"})
    assert table.headers["content-type"].startswith("text/csv")
    header, row = table.text.splitlines()
    amounts = "requests,prompt_tokens,cached_tokens,completion_tokens,cost_nanos"
    assert header == f"start_time,end_time,tenant,model,{amounts}"
    assert row.split(",")[2:] == ["acme", "'=base", "2", "30", "0", "60", "0"]
    events = (await http.get("/admin/v1/usage/events", params={"tenant": "acme", "limit": 1})).json()
    assert events["has_more"]
    assert (events["data"][0]["tenant"], events["data"][0]["prompt_tokens"]) == ("acme", 20)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        pytest.param({"start": "10", "end": "10"}, "end", id="empty range"),
        pytest.param({"start": "-1"}, "start", id="negative"),
        pytest.param({"end": "99999999999999999999"}, "end", id="far future"),
        pytest.param({"bucket": "1s"}, "bucket", id="bucket"),
        pytest.param({"bucket": "1m", "start": "0", "end": "1700000000"}, "bucket", id="too many buckets"),
        pytest.param({"group_by": "tenant,tenant"}, "group_by", id="group twice"),
        pytest.param({"group_by": "secret"}, "group_by", id="unknown group"),
        pytest.param({"format": "xml"}, "format", id="format"),
    ],
)
async def test_a_bad_report_is_refused(http: httpx.AsyncClient, params: dict[str, str], param: str) -> None:
    response = await http.get("/admin/v1/usage", params=params)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
