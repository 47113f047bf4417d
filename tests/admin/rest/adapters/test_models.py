from __future__ import annotations

import httpx
import pytest

from tests.admin.admin_side import AdminSide
from tests.admin.rest.adapters.ready_versions import add_ready_versions

pytestmark = pytest.mark.anyio


async def models(http: httpx.AsyncClient, tenant: str) -> list[str]:
    answer = await http.get("/admin/v1/models", params={"tenant": tenant})
    assert answer.status_code == 200, answer.text
    return [model["id"] for model in answer.json()["data"]]


async def test_every_callable_version_is_listed_and_no_other(http: httpx.AsyncClient, admin_side: AdminSide) -> None:
    services = admin_side.services
    acme, other = services.accounts.tenants.create("acme"), services.accounts.tenants.create("other")
    support = services.adapters.registry.create_adapter(acme.id, "support")
    shared = services.adapters.registry.create_adapter(other.id, "shared")
    secret = services.adapters.registry.create_adapter(other.id, "secret")
    services.adapters.registry.create_adapter(acme.id, "empty")
    for adapter, count in ((support, 3), (shared, 1), (secret, 1)):
        add_ready_versions(services.database, adapter.id, count)
    services.adapters.version_states.archive(support.id, 2)
    services.adapters.grants.add(shared, acme.id)
    own = ["the-base", "acme/support", "acme/support@3", "acme/support@1"]
    assert await models(http, "acme") == [*own, "other/shared", "other/shared@1"]
    services.adapters.version_states.set_disabled(support.id, True)
    assert await models(http, "acme") == ["the-base", "other/shared", "other/shared@1"]
    # An adapter whose alias points at no version in service has no bare name.
    services.adapters.version_states.set_disabled(support.id, False)
    services.adapters.version_states.quarantine(support.id, 1)
    assert (await models(http, "acme"))[1:2] == ["acme/support@3"]


async def test_list_of_models_needs_a_tenant_that_the_caller_may_see(
    http: httpx.AsyncClient, admin_side: AdminSide
) -> None:
    services = admin_side.services
    acme = services.accounts.tenants.create("acme")
    services.accounts.tenants.create("other")
    assert (await http.get("/admin/v1/models")).json()["error"]["param"] == "tenant"
    headers = {"authorization": f"Bearer {services.accounts.api_keys.create(acme.id, 'k', ['tenant:read']).secret}"}
    assert (await http.get("/admin/v1/models", headers=headers)).json()["data"][0]["id"] == "the-base"
    hidden = await http.get("/admin/v1/models", params={"tenant": "other"}, headers=headers)
    assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "tenant_not_found")
