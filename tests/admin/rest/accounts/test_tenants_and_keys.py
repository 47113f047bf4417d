from __future__ import annotations

from typing import Any

import httpx
import pytest

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
