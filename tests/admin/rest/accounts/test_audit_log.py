"""The audit log records every administrative change with its actor, source and content, but never a secret."""

from __future__ import annotations

import json
import secrets
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from loramux.admin.serving.app import ADMIN_DOCUMENT, create_admin_app
from loramux.migrations import schema
from loramux.migrations.audit import Actor
from loramux.platform.accounts.tenants import TenantChanges
from tests.admin.admin_side import ADMIN_KEY
from tests.admin.app_client import client_of
from tests.admin.console.signed_in_browser import sign_in
from tests.admin.rest.adapters.ready_versions import add_ready_versions
from tests.migrations.acting import acting_as

pytestmark = pytest.mark.anyio

_ADAPTER = "/admin/v1/adapters/{adapter_id}"
AUDITED = {
    ("POST", "/admin/v1/tenants"): "tenant.create",
    ("PATCH", "/admin/v1/tenants/{id_or_slug}"): "tenant.change",
    ("DELETE", "/admin/v1/tenants/{id_or_slug}"): "tenant.delete",
    ("POST", "/admin/v1/api_keys"): "api_key.create",
    ("PATCH", "/admin/v1/api_keys/{key_id}"): "api_key.change",
    ("POST", "/admin/v1/api_keys/{key_id}/rotate"): "api_key.rotate",
    ("DELETE", "/admin/v1/api_keys/{key_id}"): "api_key.revoke",
    ("POST", "/admin/v1/adapters"): "adapter.create",
    ("POST", f"{_ADAPTER}/disable"): "adapter.disable",
    ("POST", f"{_ADAPTER}/enable"): "adapter.enable",
    ("DELETE", _ADAPTER): "adapter.delete",
    ("PUT", f"{_ADAPTER}/aliases/{{name}}"): "alias.set",
    ("POST", f"{_ADAPTER}/aliases/{{name}}/rollback"): "alias.rollback",
    ("DELETE", f"{_ADAPTER}/aliases/{{name}}"): "alias.remove",
    ("PUT", f"{_ADAPTER}/grants/{{tenant}}"): "grant.add",
    ("DELETE", f"{_ADAPTER}/grants/{{tenant}}"): "grant.remove",
    ("POST", f"{_ADAPTER}/versions/{{number}}/archive"): "version.archive",
    ("POST", f"{_ADAPTER}/versions/{{number}}/quarantine"): "version.quarantine",
    ("POST", f"{_ADAPTER}/versions/{{number}}/restore"): "version.restore",
    ("POST", f"{_ADAPTER}/versions/{{number}}/evals"): "eval.create",
    ("POST", "/admin/v1/evals/{eval_id}/cancel"): "eval.cancel",
    ("POST", "/admin/v1/quotas"): "quota.set",
    ("PUT", "/admin/v1/quotas/tenants/{tenant}/{metric}"): "quota.set",
    ("PATCH", "/admin/v1/quotas/{quota_id}"): "quota.set",
    ("DELETE", "/admin/v1/quotas/{quota_id}"): "quota.delete",
    ("POST", "/admin/v1/prices"): "price.add",
    ("DELETE", "/admin/v1/prices/{price_id}"): "price.withdraw",
}
"""The action that each route called in this module must log."""

ELSEWHERE = {
    # These routes need an engine, an upload, a batch, another base or a suspended tenant. Other test modules check
    # their audit records.
    ("POST", "/admin/v1/bases/{base_id}/revalidate"): "base.revalidate",
    ("DELETE", "/admin/v1/bases/{base_id}"): "base.forget",
    ("PUT", "/admin/v1/bases/weights"): "base.weight",
    ("POST", f"{_ADAPTER}/purge"): "adapter.purge",
    ("POST", "/admin/v1/tenants/{id_or_slug}/purge"): "tenant.purge",
    ("POST", f"{_ADAPTER}/versions"): "version.create",
    ("PUT", f"{_ADAPTER}/push"): "version.create",
    ("POST", f"{_ADAPTER}/versions/{{number}}/purge"): "version.purge",
    ("POST", f"{_ADAPTER}/versions/{{number}}/pin"): "version.pin",
    ("POST", f"{_ADAPTER}/versions/{{number}}/unpin"): "version.unpin",
    ("POST", "/admin/v1/requests/{request_id}/cancel"): "request.cancel",
    ("POST", "/admin/v1/batches/{batch_id}/cancel"): "batch.cancel",
    ("POST", "/admin/v1/webhooks"): "webhook.create",
    ("DELETE", "/admin/v1/webhooks/{webhook_id}"): "webhook.delete",
}
CHANGES_NOTHING = {
    # Not audited: upload routes (only creating the version is audited), a cache hint, a dry run, and a test.
    ("POST", f"{_ADAPTER}/uploads"),
    ("DELETE", f"{_ADAPTER}/uploads/{{upload_id}}"),
    ("PUT", f"{_ADAPTER}/uploads/{{upload_id}}/files/{{name}}"),
    ("POST", f"{_ADAPTER}/versions/{{number}}/preload"),
    ("POST", "/admin/v1/quotas/check"),
    ("POST", "/admin/v1/webhooks/{webhook_id}/test"),
}


def test_every_mutating_route_is_listed_in_this_module(admin_side: Any) -> None:
    paths = ADMIN_DOCUMENT.of(create_admin_app(admin_side.services))["paths"]
    mutating = {
        (method.upper(), path)
        for path, methods in paths.items()
        for method in methods
        if path.startswith("/admin/v1") and method in ("post", "put", "patch", "delete")
    }
    assert mutating == {*AUDITED, *ELSEWHERE, *CHANGES_NOTHING}, (
        "call audit() in the transaction of the change, and list the route here"
    )


@pytest.fixture
def secret() -> str:
    """A string that looks like someone's API key, sent in every text field."""
    return f"sk-lmx-{'A' * 16}-{'b' * 43}"


async def test_changes_are_logged_without_secrets(http: httpx.AsyncClient, admin_side: Any, secret: str) -> None:
    shown: list[str] = [secret, ADMIN_KEY]
    done: set[tuple[str, str]] = set()
    any_state = {"if-match": "*"}

    async def call(method: str, route: str, status: int, body: Any = None, **names: str) -> Any:
        path = route.format(**names)
        response = await http.request(method, path, json=body, headers=any_state)
        assert response.status_code == status, (method, path, response.text)
        done.add((method, route))
        document = response.json() if response.content else {}
        if "secret" in document:
            shown.append(document["secret"])
        entries = (await http.get("/admin/v1/audit_log", params={"limit": 1})).json()["data"]
        assert (entries[0]["action"], entries[0]["actor"]) == (AUDITED[method, route], "operator"), path
        assert entries[0]["request_id"] == response.headers["x-request-id"]
        assert entries[0]["address"]
        return document

    v1 = "/admin/v1"
    tenant = await call("POST", f"{v1}/tenants", 201, {"slug": "acme", "display_name": secret})
    other = await call("POST", f"{v1}/tenants", 201, {"slug": "globex"})
    await call("PATCH", f"{v1}/tenants/{{id_or_slug}}", 200, {"weight": 3}, id_or_slug="acme")
    key = await call("POST", f"{v1}/api_keys", 201, {"tenant": "acme", "name": secret})
    await call("PATCH", f"{v1}/api_keys/{{key_id}}", 200, {"name": f"again {secret}"}, key_id=key["id"])
    await call("POST", f"{v1}/api_keys/{{key_id}}/rotate", 200, {}, key_id=key["id"])
    await call("DELETE", f"{v1}/api_keys/{{key_id}}", 200, key_id=key["id"])
    quota = await call("POST", f"{v1}/quotas", 200, {"tenant": "acme", "metric": "tokens_per_minute", "limit": 5})
    by_name = {"tenant": "acme", "metric": "tokens_per_minute"}
    await call("PUT", f"{v1}/quotas/tenants/{{tenant}}/{{metric}}", 200, {"limit": 6}, **by_name)
    await call("PATCH", f"{v1}/quotas/{{quota_id}}", 200, {"limit": 7}, quota_id=quota["id"])
    await call("DELETE", f"{v1}/quotas/{{quota_id}}", 200, quota_id=quota["id"])
    later = admin_side.services.database.now_us() // 1_000_000 + 1000
    price = await call("POST", f"{v1}/prices", 201, {"prompt": 1, "completion": 2, "effective_at": later})
    await call("DELETE", f"{v1}/prices/{{price_id}}", 200, price_id=price["id"])
    adapter = await call("POST", f"{v1}/adapters", 201, {"tenant": "acme", "name": "support"})
    add_ready_versions(admin_side.services.database, adapter["id"], 3)
    names = {"adapter_id": adapter["id"], "name": "stable", "tenant": "globex"}
    for version in (1, 2):
        body = {"version": version, "warm": False}
        await call("PUT", f"{_ADAPTER}/aliases/{{name}}", 200, body, **names)
    await call("POST", f"{_ADAPTER}/aliases/{{name}}/rollback", 200, {"warm": False}, **names)
    await call("DELETE", f"{_ADAPTER}/aliases/{{name}}", 204, **names)
    await call("PUT", f"{_ADAPTER}/grants/{{tenant}}", 200, **names)
    await call("DELETE", f"{_ADAPTER}/grants/{{tenant}}", 204, **names)
    body = {"name": secret, "file": json.dumps({"prompt": secret, "equal": secret})}
    made = await call("POST", f"{_ADAPTER}/versions/{{number}}/evals", 201, body, number="1", **names)
    await call("POST", f"{v1}/evals/{{eval_id}}/cancel", 200, eval_id=made["id"])
    for action in ("archive", "restore", "quarantine"):
        await call("POST", f"{_ADAPTER}/versions/{{number}}/{action}", 200, number="3", **names)
    await call("POST", f"{_ADAPTER}/disable", 200, **names)
    await call("POST", f"{_ADAPTER}/enable", 200, **names)
    await _deletes(http, call)
    assert done == set(AUDITED)
    with admin_side.services.database.read() as connection:
        written = [tuple(row) for row in connection.execute(select(schema.audit_log))]
    text = json.dumps(written)
    for one in shown:
        assert one not in text
        assert one.rsplit("-", 1)[-1] not in text
    assert "secret" not in text.replace("sk-lmx", "")
    moved = (await http.get("/admin/v1/audit_log", params={"action": "alias.*", "limit": 2})).json()
    assert moved["has_more"]
    assert moved["data"][1]["changes"]["targets"] == [{"2": 100}, {"1": 100}]
    assert {entry["tenant_id"] for entry in moved["data"]} == {tenant["id"]}
    assert other["id"] != tenant["id"]


async def _deletes(http: httpx.AsyncClient, call: Any) -> None:
    await call("POST", "/admin/v1/tenants", 201, {"slug": "short-lived"})
    empty = await call("POST", "/admin/v1/adapters", 201, {"tenant": "short-lived", "name": "empty"})
    await call("DELETE", _ADAPTER, 204, adapter_id=empty["id"])
    await call("DELETE", "/admin/v1/tenants/{id_or_slug}", 204, id_or_slug="short-lived")


async def test_tenant_administrator_sees_changes_to_its_own_objects(http: httpx.AsyncClient) -> None:
    for slug in ("acme", "globex"):
        await http.post("/admin/v1/tenants", json={"slug": slug})
    made = (await http.post("/admin/v1/api_keys", json={"tenant": "acme", "scopes": ["tenant:admin"]})).json()
    own = {"authorization": f"Bearer {made['secret']}"}
    seen = (await http.get("/admin/v1/audit_log", headers=own)).json()["data"]
    assert [entry["action"] for entry in seen] == ["api_key.create", "tenant.create"]
    assert {entry["tenant_id"] for entry in seen} == {made["tenant_id"]}
    refused = await http.get("/admin/v1/audit_log", headers=own, params={"tenant": "globex"})
    assert refused.status_code == 404


async def test_operators_address_and_key_are_hidden_from_tenants(http: httpx.AsyncClient, admin_side: Any) -> None:
    await http.post("/admin/v1/tenants", json={"slug": "acme"})
    platform = (await http.post("/admin/v1/api_keys", json={"tenant": None})).json()
    made = (await http.post("/admin/v1/api_keys", json={"tenant": "acme", "scopes": ["tenant:admin"]})).json()
    own = {"authorization": f"Bearer {made['secret']}"}
    operators = {"authorization": f"Bearer {platform['secret']}"}
    for headers, name in ((own, "one"), (operators, "two")):
        created = await http.post("/admin/v1/adapters", json={"tenant": "acme", "name": name}, headers=headers)
        assert created.status_code == 201
    someone = Actor("oidc_" + "0" * 24, "198.51.100.7")
    with acting_as(someone):
        admin_side.services.accounts.tenants.update(made["tenant_id"], TenantChanges(weight=3), lambda _: None)

    async def seen(headers: dict[str, str], **wanted: str) -> list[tuple[str, str, bool]]:
        document = (await http.get("/admin/v1/audit_log", headers=headers, params={"tenant": "acme", **wanted})).json()
        return [(entry["action"], entry["actor"], entry["address"] is not None) for entry in document["data"]]

    assert await seen({}) == [
        ("tenant.change", someone.key_id, True),
        ("adapter.create", platform["id"], True),
        ("adapter.create", made["id"], True),
        ("api_key.create", "operator", True),
        ("tenant.create", "operator", True),
    ]
    assert await seen(own) == [
        # A signed-in person may work for the operator, so the tenant does not see the address.
        ("tenant.change", someone.key_id, False),
        ("adapter.create", "platform", False),
        ("adapter.create", made["id"], True),
        ("api_key.create", "platform", False),
        ("tenant.create", "platform", False),
    ]
    # Filtering by actor does not reveal hidden actors either.
    assert await seen(own, actor="operator") == []
    assert await seen(own, actor=platform["id"]) == []
    assert len(await seen(own, actor="platform")) == 3
    async with client_of(create_admin_app(admin_side.services)) as browser:
        await sign_in(browser, made["secret"])
        page = (await browser.get("/console/audit")).text
    assert "adapter.create" in page
    assert page.count("127.0.0.1") == 1
    assert platform["id"] not in page
    assert ">operator<" not in page


async def test_failed_calls_are_not_logged(http: httpx.AsyncClient, admin_side: Any) -> None:
    def count() -> int:
        with admin_side.services.database.read() as connection:
            return int(connection.execute(select(func.count()).select_from(schema.audit_log)).scalar_one())

    await http.post("/admin/v1/tenants", json={"slug": "acme"})
    assert count() == 1
    for path, body in (
        ("tenants", {"slug": "acme"}),
        ("quotas", {"tenant": "acme", "metric": "nonsense", "limit": 1}),
        ("prices", {"prompt": -1, "completion": 0}),
        ("adapters", {"tenant": secrets.token_hex(4), "name": "x"}),
    ):
        assert (await http.post(f"/admin/v1/{path}", json=body)).status_code >= 400
    assert count() == 1
    quota = {"tenant": "acme", "metric": "tokens_per_minute", "limit": 1}
    for _ in range(2):
        await http.post("/admin/v1/quotas", json=quota)
    assert count() == 2
