from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest

from loramux.admin.serving.app import ADMIN_DOCUMENT, create_admin_app
from tests.admin.rest.tenants_and_keys import bearer, new_key, new_tenant

pytestmark = pytest.mark.anyio

PUBLIC = {"/health", "/health/live", "/health/ready", "/ping", "/metrics", "/metrics/routing"}


def routes(admin_side: Any) -> list[tuple[str, str]]:
    paths = ADMIN_DOCUMENT.of(create_admin_app(admin_side.services))["paths"]
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


async def test_inference_key_cannot_call_the_admin_api(http: httpx.AsyncClient, admin_side: Any) -> None:
    await new_tenant(http, "acme")
    key = await new_key(http, "acme")
    for method, path in routes(admin_side):
        if path not in PUBLIC:
            response = await http.request(method, path, headers=bearer(key["secret"]))
            assert response.status_code == 403, (method, path)
            assert response.json()["error"]["code"] == "insufficient_scope"


async def test_requests_do_not_need_the_shared_thread_pool(http: httpx.AsyncClient) -> None:
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


async def test_viewer_cannot_change_anything(http: httpx.AsyncClient, admin_side: Any) -> None:
    key = await new_key(http, None, "platform:read")
    for method, path in routes(admin_side):
        # A dry run is a POST, but it changes nothing.
        if method in ("POST", "PUT", "DELETE") and path != "/admin/v1/quotas/check":
            response = await http.request(method, path, headers=bearer(key["secret"]), json={})
            assert response.status_code == 403, (method, path)


async def test_tenant_administrator_gets_404_for_foreign_objects(http: httpx.AsyncClient) -> None:
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


async def test_unknown_paths_and_methods_return_the_error_envelope(http: httpx.AsyncClient) -> None:
    missing, wrong = await http.get("/admin/v1/nothing"), await http.patch("/admin/v1/tenants")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_a_path_of_the_openai_api_is_told_its_port(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json={})
    assert answer.status_code == 404
    told = "there is nothing at this path: the OpenAI API is on the server's other port"
    assert answer.json()["error"]["message"].startswith(told)
