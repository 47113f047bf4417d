from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from loramux.adapter_store.ingest.tenant_caps import MAX_OPEN_UPLOADS
from loramux.admin.client.client import AdminClient, AdminError
from loramux.admin.client.push import push_adapter
from loramux.admin.serving.app import create_admin_app
from tests.admin.admin_side import ADMIN_KEY, AdminSide
from tests.admin.app_client import client_of
from tests.admin.console.signed_in_browser import Browser
from tests.admin.rest.adapters.pushed_versions import declared, new_adapter, push

METRIC = "cold_loads_per_minute"


@asynccontextmanager
async def tenants_client(side: AdminSide, *scopes: str, tenant: str = "acme") -> AsyncIterator[httpx.AsyncClient]:
    owner = side.services.accounts.tenants.get(tenant) or side.services.accounts.tenants.create(tenant)
    secret = side.services.accounts.api_keys.create(owner.id, "caller", scopes).secret
    transport = httpx.ASGITransport(create_admin_app(side.services))
    headers = {"authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers) as client:
        yield client


@pytest.mark.anyio
async def test_upload_is_listed_and_cancelled_only_by_its_tenant(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    uploads = f"/admin/v1/adapters/{await new_adapter(http)}/uploads"
    files = declared(make_adapter())
    made = [(await http.post(uploads, json={"files": files})).json() for _ in range(2)]
    async with tenants_client(admin_side, "tenant:develop") as developer:
        listed = (await developer.get(uploads)).json()
        assert [upload["id"] for upload in listed["data"]] == [made[1]["id"], made[0]["id"]]
        assert listed["data"][1] == made[0]
        async with tenants_client(admin_side, "tenant:admin", tenant="globex") as stranger:
            for method, path in (("GET", uploads), ("DELETE", f"{uploads}/{made[0]['id']}")):
                assert (await stranger.request(method, path)).status_code == 404
        async with tenants_client(admin_side, "tenant:read") as reader:
            assert (await reader.get(uploads)).status_code == 200
            assert (await reader.delete(f"{uploads}/{made[0]['id']}")).status_code == 403
        assert (await developer.delete(f"{uploads}/{made[0]['id']}")).status_code == 204
        gone = await developer.delete(f"{uploads}/{made[0]['id']}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "upload_not_found")
        assert [upload["id"] for upload in (await developer.get(uploads)).json()["data"]] == [made[1]["id"]]


@pytest.mark.anyio
async def test_used_upload_cannot_be_cancelled(http: httpx.AsyncClient, make_adapter: Callable[..., Path]) -> None:
    adapter_id = await new_adapter(http)
    version = await push(http, adapter_id, make_adapter())
    assert version["state"] == "ready"
    uploads = f"/admin/v1/adapters/{adapter_id}/uploads"
    assert (await http.get(uploads)).json()["data"] == []


@pytest.mark.anyio
async def test_uploads_beyond_the_cap_get_a_retry_after(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    uploads = f"/admin/v1/adapters/{await new_adapter(http)}/uploads"
    body = {"files": declared(make_adapter())}
    answers = [await http.post(uploads, json=body) for _ in range(MAX_OPEN_UPLOADS + 1)]
    assert [answer.status_code for answer in answers] == [201] * MAX_OPEN_UPLOADS + [429]
    error = answers[-1].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_open_uploads")
    assert 0 < int(answers[-1].headers["retry-after"]) <= 60
    assert (await http.delete(f"{uploads}/{answers[0].json()['id']}")).status_code == 204
    assert (await http.post(uploads, json=body)).status_code == 201


@pytest.fixture
def client(admin_url: str) -> Iterator[AdminClient]:
    with AdminClient(admin_url, ADMIN_KEY) as client:
        client.post("tenants", {"slug": "acme"})
        yield client


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), AdminError(400, "other bytes", "checksum_mismatch", None)])
def test_interrupted_push_cancels_its_upload(
    client: AdminClient,
    make_adapter: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
) -> None:
    def break_off(self: AdminClient, url: str, size: int, chunks: Iterable[bytes]) -> None:
        raise failure

    monkeypatch.setattr(AdminClient, "put_bytes", break_off)
    with pytest.raises(type(failure)):
        push_adapter(client, make_adapter(), "acme", "support")
    adapter_id = client.get("adapters", tenant="acme")["data"][0]["id"]
    assert client.get(f"adapters/{adapter_id}/uploads")["data"] == []


class CrowdedServer(AdminClient):
    """Refuses the first upload and the first version of each push, as if the tenant had reached its limits."""

    num_posts = 0

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.num_posts += 1
        for end, code in (("/uploads", "too_many_open_uploads"), ("/versions", "too_many_pending_versions")):
            if path.endswith(end) and code not in self.refused:
                self.refused.append(code)
                raise AdminError(429, "this tenant has too many", code, None, 7)
        return super().post(path, body)

    refused: list[str]


def test_push_waits_while_the_tenant_is_at_its_limits(
    admin_url: str, make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("loramux.admin.client.push.time", clock)
    with CrowdedServer(admin_url, ADMIN_KEY) as client:
        client.refused = []
        client.post("tenants", {"slug": "acme"})
        assert push_adapter(client, make_adapter(), "acme", "support").version == 1
        assert client.refused == ["too_many_open_uploads", "too_many_pending_versions"]
        assert pauses[:2] == [7, 7]
        # The push never waits longer than its own timeout.
        client.refused = []
        with pytest.raises(AdminError, match="this tenant has too many"):
            push_adapter(client, make_adapter(), "acme", "support", timeout_s=6.0)


async def two_versions(http: httpx.AsyncClient, make_adapter: Callable[..., Path]) -> tuple[str, list[str]]:
    """Push two versions of a new adapter. Return the adapter's identifier and the versions' digests."""
    adapter_id = await new_adapter(http)
    versions = [await push(http, adapter_id, make_adapter()) for _ in range(2)]
    return adapter_id, [version["digest"] for version in versions]


@pytest.mark.anyio
async def test_preload_is_charged_to_tenants_but_not_to_operators(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    adapter_id, digests = await two_versions(http, make_adapter)
    path = f"/admin/v1/adapters/{adapter_id}/versions"
    await http.post("/admin/v1/quotas", json={"tenant": "acme", "metric": METRIC, "limit": 1})
    async with tenants_client(admin_side, "tenant:develop") as developer:
        assert (await developer.post(f"{path}/1/preload")).json()["state"] == "resident"
        refused = await developer.post(f"{path}/2/preload")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.json()["error"]["param"] == METRIC
        assert 0 < int(refused.headers["retry-after"]) <= 60
        assert list(admin_side.engine.resident) == digests[:1]
        assert (await developer.post(f"{path}/1/preload")).status_code == 200, "it is already resident"
        assert (await http.post(f"{path}/2/preload")).status_code == 200
        assert (await developer.post(f"{path}/2/preload")).status_code == 200


@pytest.mark.anyio
async def test_alias_stays_if_its_preload_is_refused(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    adapter_id, digests = await two_versions(http, make_adapter)
    path = f"/admin/v1/adapters/{adapter_id}/aliases/canary"
    await http.post("/admin/v1/quotas", json={"tenant": "acme", "metric": METRIC, "limit": 1})
    both = {"targets": [{"version": 1, "weight": 1}, {"version": 2, "weight": 1}]}
    async with tenants_client(admin_side, "tenant:develop") as developer:
        assert (await developer.put(path, json={"version": 1})).status_code == 200
        for body in ({"version": 2}, both):
            refused = await developer.put(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (429, METRIC)
            alias = (await developer.get(path)).json()
            assert (alias["revision"], alias["targets"]) == (1, [{"version": 1, "weight": 100}])
        assert list(admin_side.engine.resident) == digests[:1]
        assert (await developer.put(path, json={"version": 2, "warm": False})).status_code == 200
        assert (await developer.put(path, json={"version": 1})).status_code == 200
        assert (await developer.post(f"{path}/rollback")).status_code == 429
        assert (await developer.get(path)).json()["revision"] == 3


@pytest.mark.anyio
async def test_console_explains_a_refused_load(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    adapter_id, _ = await two_versions(http, make_adapter)
    await http.post("/admin/v1/quotas", json={"tenant": "acme", "metric": METRIC, "limit": 1})
    tenant = admin_side.services.accounts.tenants.get("acme")
    assert tenant is not None
    secret = admin_side.services.accounts.api_keys.create(tenant.id, "admin", ["tenant:admin"]).secret
    async with client_of(create_admin_app(admin_side.services)) as other:
        browser = Browser(other)
        await browser.sign_in(secret)
        here = f"/adapters/{adapter_id}"
        assert "is in the page pool" in await browser.post(f"{here}/versions/1/preload", referer=f"{here}/versions/1")
        told = await browser.post(f"{here}/versions/2/preload", referer=f"{here}/versions/2")
        assert f"limit of 1 for {METRIC} is reached" in told
        assert "try again in" in told


def test_command_line_says_when_to_retry_a_load(
    loramux: Callable[..., Any], admin_side: AdminSide, make_adapter: Callable[..., Path], monkeypatch: Any
) -> None:
    loramux("tenants", "create", "acme")
    for _ in range(2):
        pushed = loramux("adapters", "push", make_adapter(), "--tenant", "acme", "--name", "support")
        assert pushed.exit_code == 0, pushed.output
    loramux("quotas", "set", "--tenant", "acme", "--metric", METRIC, "--limit", "1")
    tenant = admin_side.services.accounts.tenants.get("acme")
    assert tenant is not None
    secret = admin_side.services.accounts.api_keys.create(tenant.id, "admin", ["tenant:admin"]).secret
    monkeypatch.setenv("LORAMUX_ADMIN_KEY", secret)
    assert loramux("adapters", "preload", "acme/support@1").exit_code == 0
    refused = loramux("adapters", "preload", "acme/support@2")
    assert refused.exit_code == 1
    assert f"the tenant's limit of 1 for {METRIC} is reached: try again in" in refused.stderr
