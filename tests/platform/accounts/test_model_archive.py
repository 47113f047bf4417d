from __future__ import annotations

from typing import Any

import httpx
import pytest

from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.platform.accounts.audit_log import AuditFilter, AuditLog
from loramux.platform.accounts.principals import Principal

pytestmark = pytest.mark.anyio


async def deleted(gateway: Any, name: str, *scopes: str, tenant: str = "acme") -> httpx.Response:
    headers = {"authorization": f"Bearer {gateway.key_of(tenant, *scopes or ('tenant:admin',))}"}
    response: httpx.Response = await gateway.http.delete(f"/v1/models/{name}", headers=headers)
    return response


async def is_served(gateway: Any, name: str) -> bool:
    response = await gateway.http.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1})
    assert response.status_code in (200, 404), response.text
    return bool(response.status_code == 200)


def states(gateway: Any) -> VersionStates:
    return VersionStates(gateway.database, AdapterRegistry(gateway.database))


@pytest.mark.parametrize("name", ["support", "acme/support"])
async def test_adapter_is_out_of_service_until_it_is_enabled(gateway: Any, name: str) -> None:
    adapter_id = gateway.add_adapter("acme", "support", versions=2)
    answer = await deleted(gateway, name)
    assert (answer.status_code, answer.json()) == (200, {"id": name, "object": "model", "deleted": True})
    assert not await is_served(gateway, "support")
    assert not await is_served(gateway, "support@1")
    assert "support" not in (await gateway.http.get("/v1/models")).text
    again = await deleted(gateway, name)
    assert (again.status_code, again.json()["error"]["code"]) == (404, "model_not_found")
    states(gateway).set_disabled(adapter_id, False)
    assert await is_served(gateway, "support@1")


@pytest.mark.parametrize("by_digest", [False, True], ids=["number", "digest"])
async def test_version_is_out_of_service_until_it_is_restored(gateway: Any, by_digest: bool) -> None:
    adapter_id = gateway.add_adapter("acme", "support", versions=2)
    digest = AdapterRegistry(gateway.database).get_version(adapter_id, 1).version_digest
    name = f"support@sha256:{digest[:12]}" if by_digest else "support@1"
    answer = await deleted(gateway, name)
    assert (answer.status_code, answer.json()["deleted"]) == (200, True), answer.text
    assert (await is_served(gateway, "support@1"), await is_served(gateway, "support")) == (False, True)
    assert (await deleted(gateway, name)).status_code == 404
    states(gateway).restore(adapter_id, 1, ("archived",))
    assert await is_served(gateway, "support@1")


async def test_openai_client_deletes_a_model(gateway: Any) -> None:
    gateway.add_adapter("acme", "support")
    client = gateway.openai.with_options(api_key=gateway.key_of("acme", "tenant:admin", "adapters"))
    answer = await client.models.delete("support")
    assert (answer.id, answer.object, answer.deleted) == ("support", "model", True)


async def test_version_that_an_alias_names_is_kept(gateway: Any) -> None:
    adapter_id = gateway.add_adapter("acme", "support", versions=2)
    AdapterAliases(gateway.database).set(adapter_id, "beta", {1: 100})
    answer = await deleted(gateway, "support@1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "version_in_use")
    assert "beta" in answer.json()["error"]["message"]
    assert await is_served(gateway, "support@1")


@pytest.mark.parametrize("scopes", [("adapters", "base"), ("tenant:develop",), ("tenant:read",)], ids=str)
async def test_other_scopes_are_refused(gateway: Any, scopes: tuple[str, ...]) -> None:
    gateway.add_adapter("acme", "support")
    for name in ("support", "base", "nothing"):
        answer = await deleted(gateway, name, *scopes)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")
    assert await is_served(gateway, "support")


async def test_platform_keys_are_refused(gateway: Any) -> None:
    gateway.add_adapter("acme", "support")
    secret = gateway.services.callers.api_keys.create(None, "operator").secret
    answer = await gateway.http.delete("/v1/models/acme/support", headers={"authorization": f"Bearer {secret}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("base", 403, "insufficient_scope"),
        ("nothing", 404, "model_not_found"),
        ("support@9", 404, "model_not_found"),
        ("support@sha256:000000000000", 404, "model_not_found"),
        ("support@x", 404, "model_not_found"),
        ("support:default", 400, "invalid_value"),
        ("support:default@1", 400, "invalid_model_name"),
        ("bravo/shared", 404, "model_not_found"),
        ("bravo/secret", 404, "model_not_found"),
        ("shared", 404, "model_not_found"),
        ("%2e%2e/support", 404, "model_not_found"),
        ("%00", 404, "model_not_found"),
        ("x" * 5000, 404, "model_not_found"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_only_own_models_can_be_deleted(gateway: Any, name: str, status: int, code: str) -> None:
    gateway.add_adapter("acme", "support")
    registry = AdapterRegistry(gateway.database)
    shared = registry.get_adapter(gateway.add_adapter("bravo", "shared"))
    assert shared is not None
    gateway.add_adapter("bravo", "secret")
    AdapterGrants(gateway.database).add(shared, gateway.tenant.id)
    answer = await deleted(gateway, name)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert await is_served(gateway, "support")
    assert await is_served(gateway, "bravo/shared")


async def test_audit_log_names_the_key_and_the_request(gateway: Any) -> None:
    adapter_id = gateway.add_adapter("acme", "support")
    answer = await deleted(gateway, "support")
    operator = Principal(key_id="operator", tenant_id=None, tenant_slug=None, scopes=frozenset())
    [entry] = AuditLog(gateway.database).list(operator, AuditFilter(action="adapter.disable"), limit=2).data
    assert entry.target == adapter_id
    assert entry.request_id == answer.headers["x-request-id"]
    assert entry.actor.startswith("key_")
