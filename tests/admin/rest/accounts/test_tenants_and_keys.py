from __future__ import annotations

from typing import Any

import httpx
import pytest

from loramux.migrations.identifiers import new_id
from tests.admin.rest.tenants_and_keys import bearer, new_key, new_tenant

pytestmark = pytest.mark.anyio


async def test_tenant_slug_is_unique(http: httpx.AsyncClient) -> None:
    tenant_id = await new_tenant(http, "acme")
    again = await http.post("/admin/v1/tenants", json={"slug": "acme"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "tenant_exists")
    for name in (tenant_id, "acme"):
        assert (await http.get(f"/admin/v1/tenants/{name}")).json()["slug"] == "acme"


async def test_key_secret_is_returned_once_and_revocable(http: httpx.AsyncClient) -> None:
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


@pytest.mark.parametrize("key_id", [new_id("key"), "nothing like an identifier"], ids=["unused", "malformed"])
async def test_missing_key_is_named_in_words(http: httpx.AsyncClient, key_id: str) -> None:
    response = await http.get(f"/admin/v1/api_keys/{key_id}")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "api_key_not_found")
    assert error["message"] == "there is no such API key"


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


async def test_operator_decides_how_long_responses_are_stored(http: httpx.AsyncClient) -> None:
    tenant_id = await new_tenant(http, "acme")
    path = f"/admin/v1/tenants/{tenant_id}"
    got = await http.get(path)
    assert got.json()["response_days"] == 0
    headers = {"if-match": got.headers["etag"]}
    for days in (-1, 366, 1.5):
        refused = await http.patch(path, json={"response_days": days}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_days")
    changed = await http.patch(path, json={"response_days": 30}, headers=headers)
    assert changed.json()["response_days"] == 30


async def test_operator_decides_which_service_tiers_a_tenant_has(http: httpx.AsyncClient) -> None:
    path = f"/admin/v1/tenants/{await new_tenant(http, 'acme')}"
    got = await http.get(path)
    assert (got.json()["max_service_tier"], got.json()["default_service_tier"]) == ("default", "default")
    headers = {"if-match": got.headers["etag"]}
    for tier in ("gold", "", "inherit", "auto", 1, ["flex"]):
        refused = await http.patch(path, json={"max_service_tier": tier}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_service_tier")
    changes = {"max_service_tier": "priority", "default_service_tier": "flex"}
    changed = (await http.patch(path, json=changes, headers=headers)).json()
    assert {name: changed[name] for name in changes} == changes


async def test_tenant_cannot_give_itself_a_better_tier(http: httpx.AsyncClient) -> None:
    tenant_id = await new_tenant(http, "acme")
    admin = await new_key(http, "acme", "tenant:admin")
    path = f"/admin/v1/tenants/{tenant_id}"
    etag = (await http.get(path)).headers["etag"]
    headers = {**bearer(admin["secret"]), "if-match": etag}
    refused = await http.patch(path, json={"max_service_tier": "priority"}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")


async def test_key_has_the_tiers_of_its_tenant_until_it_gets_its_own(http: httpx.AsyncClient) -> None:
    await new_tenant(http, "acme")
    made = (await http.post("/admin/v1/api_keys", json={"tenant": "acme", "default_service_tier": "flex"})).json()
    assert (made["max_service_tier"], made["default_service_tier"]) == (None, "flex")
    path = f"/admin/v1/api_keys/{made['id']}"

    async def change(**changes: Any) -> httpx.Response:
        headers = {"if-match": (await http.get(path)).headers["etag"]}
        return await http.patch(path, json=changes, headers=headers)

    changed = (await change(max_service_tier="default", default_service_tier="inherit")).json()
    assert (changed["max_service_tier"], changed["default_service_tier"]) == ("default", None)
    refused = await change(max_service_tier="gold")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_service_tier")
    [newest, *_] = (await http.get("/admin/v1/audit_log")).json()["data"]
    assert newest["changes"]["max_service_tier"] == [None, "default"]


@pytest.mark.parametrize("percent", [-1, 1001])
async def test_price_has_a_percentage_for_each_tier(http: httpx.AsyncClient, percent: int) -> None:
    price = {"prompt": 1, "completion": 2, "flex_percent": 50, "priority_percent": 200}
    added = (await http.post("/admin/v1/prices", json=price)).json()
    assert {name: added[name] for name in price} == price
    refused = await http.post("/admin/v1/prices", json={**price, "scope": "base", "flex_percent": percent})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "flex_percent")
