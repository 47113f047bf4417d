from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from sqlalchemy import insert

from loramux.adapter_store.registry.base_servers import OwnServer
from loramux.adapter_store.registry.bases import Bases
from loramux.adapter_store.registry.pins import AdapterPins
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.admin.rest.services import AccountServices, AdminServices
from loramux.admin.serving.app import create_admin_app
from loramux.migrations.database import Database
from loramux.migrations.schema import version_bases
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.audit_log import AuditLog
from loramux.platform.accounts.tenants import Tenants
from tests.admin.admin_side import ADMIN_KEY, AdminSide
from tests.platform.ready_adapters import add_ready_adapter

pytestmark = pytest.mark.anyio

OLD, NEW = "a" * 64, "b" * 64


@pytest.fixture
def services(admin_side: AdminSide, database: Database) -> AdminServices:
    """Services over each kind of database."""
    registry = AdapterRegistry(database)
    return replace(
        admin_side.services,
        database=database,
        accounts=AccountServices(
            tenants=Tenants(database), api_keys=ApiKeys(database, ADMIN_KEY), audit_log=AuditLog(database)
        ),
        adapters=replace(
            admin_side.services.adapters,
            registry=registry,
            bases=Bases(database),
            pins=AdapterPins(database, registry),
        ),
    )


@pytest.fixture
async def operator(services: AdminServices) -> AsyncIterator[httpx.AsyncClient]:
    """An operator's client of a server of the new base. Of the old base's three versions, one was rejected."""
    tenant = services.accounts.tenants.create("acme")
    adapter_id = add_ready_adapter(services.database, tenant.id, "support", ["1" * 64, "2" * 64, "3" * 64])
    for base_id in (OLD, NEW):
        services.adapters.bases.register(base_id, "llama")
    services.adapters.registry.base_id = NEW
    versions = {version.number: version.id for version in services.adapters.registry.list_versions(adapter_id, 3).data}
    reason = {"code": "base_mismatch", "message": "too wide"}
    verdict = {"base_id": NEW, "state": "rejected", "checked_us": 5_000_000, **reason}
    with services.database.write() as connection:
        connection.execute(insert(version_bases).values(version_id=versions[2], **verdict))
        connection.execute(insert(version_bases).values(version_id=versions[1], base_id=NEW, state="ready"))
    transport = httpx.ASGITransport(create_admin_app(services))
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://admin/admin/v1", headers=headers) as client:
        yield client


async def test_bases_are_listed_with_their_versions(operator: httpx.AsyncClient) -> None:
    listed = (await operator.get("/bases")).json()["data"]
    counts = [
        (one["id"], one["is_own"], one["num_validated"], one["num_rejected"], one["num_pending"]) for one in listed
    ]
    assert counts == [(OLD, False, 3, 0, 0), (NEW, True, 1, 1, 1)]
    assert (await operator.get(f"/bases/{NEW}")).json() == listed[1]


async def test_rejected_versions_are_listed_with_the_reason(operator: httpx.AsyncClient) -> None:
    (found,) = (await operator.get(f"/bases/{NEW}/rejected")).json()["data"]
    facts = {name: found[name] for name in ("tenant", "adapter", "version", "code", "message", "checked_at")}
    assert facts == {
        "tenant": "acme",
        "adapter": "support",
        "version": 2,
        "code": "base_mismatch",
        "message": "too wide",
        "checked_at": 5,
    }
    assert (await operator.get(f"/bases/{OLD}/rejected")).json()["data"] == []


@pytest.mark.parametrize(
    ("base_id", "status", "code"),
    [("c" * 64, 404, "base_not_found"), ("short", 400, "invalid_value")],
    ids=["unknown", "malformed"],
)
async def test_missing_bases_are_errors(operator: httpx.AsyncClient, base_id: str, status: int, code: str) -> None:
    for method, path in (("GET", ""), ("GET", "/rejected"), ("POST", "/revalidate"), ("DELETE", "")):
        response = await operator.request(method, f"/bases/{base_id}{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (status, code), (method, path)


async def test_rejected_versions_are_validated_again(operator: httpx.AsyncClient) -> None:
    answer = (await operator.post(f"/bases/{NEW}/revalidate")).json()
    counts = [answer[name] for name in ("num_revalidated", "num_validated", "num_rejected", "num_pending")]
    assert counts == [1, 1, 0, 2]
    assert (await operator.get(f"/bases/{NEW}/rejected")).json()["data"] == []
    assert (await operator.post(f"/bases/{NEW}/revalidate")).json()["num_revalidated"] == 0
    # A call that changes nothing is not in the audit log.
    (entry,) = (await operator.get("/audit_log?action=base.revalidate")).json()["data"]
    assert (entry["actor"], entry["target"], entry["changes"]) == ("operator", NEW, {"num_versions": [None, 1]})


async def test_only_a_base_without_servers_is_forgotten(operator: httpx.AsyncClient, services: AdminServices) -> None:
    server = OwnServer(services.database, OLD, "llama", "old-host:8000")
    server.report(is_draining=True)
    (shown,) = (await operator.get("/bases")).json()["data"][0]["servers"]
    assert (shown["address"], shown["state"]) == ("old-host:8000", "draining")
    refused = await operator.delete(f"/bases/{OLD}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "base_in_use")
    assert "old-host:8000 serves the base" in refused.json()["error"]["message"]
    server.leave()
    assert (await operator.delete(f"/bases/{OLD}")).status_code == 204
    assert [one["id"] for one in (await operator.get("/bases")).json()["data"]] == [NEW]
    assert (await operator.delete(f"/bases/{OLD}")).json()["error"]["code"] == "base_not_found"
    (entry,) = (await operator.get("/audit_log?action=base.forget")).json()["data"]
    assert (entry["target"], entry["changes"]) == (OLD, {"served_name": ["llama", None]})


async def test_weights_divide_requests_between_bases(operator: httpx.AsyncClient, services: AdminServices) -> None:
    for base_id in (OLD, NEW):
        services.adapters.bases.register(base_id, "llama", "f" * 64)
    weights = [{"base": OLD, "weight": 90}, {"base": NEW, "weight": 10}]
    answer = (await operator.put("/bases/weights", json={"weights": weights})).json()
    assert [(one["weight"], one["is_shared"]) for one in answer["data"]] == [(90, False), (10, False)]
    assert (await operator.get(f"/bases/{NEW}")).json()["weight"] == 10
    (entry,) = (await operator.get("/audit_log?action=base.weight")).json()["data"]
    assert (entry["actor"], entry["target"], entry["changes"]) == (
        "operator",
        "bases",
        {OLD: [None, 90], NEW: [None, 10]},
    )
    answer = (await operator.put("/bases/weights", json={"weights": []})).json()
    assert [one["weight"] for one in answer["data"]] == [None, None]


@pytest.mark.parametrize(
    ("weights", "status", "code"),
    [
        ([(OLD, 1)], 400, "invalid_weights"),
        ([(OLD, 1), (OLD, 2)], 400, "invalid_weights"),
        ([(OLD, 0), (NEW, 0)], 400, "invalid_weights"),
        ([(OLD, -1), (NEW, 1)], 400, "invalid_weight"),
        ([(OLD, 1), (NEW, 10**18)], 400, "invalid_weight"),
        ([(OLD, 1), (NEW, 0.5)], 400, "invalid_type"),
        ([(OLD, 1), (NEW, True)], 400, "invalid_type"),
        ([(OLD, 1), ("llama\0", 1)], 400, "invalid_value"),
        ([(OLD, 1), ("c" * 64, 1)], 404, "base_not_found"),
        ([(OLD, 1), (NEW, 1)], 409, "bases_differ"),
    ],
    ids=["one", "twice", "zeros", "negative", "huge", "fraction", "boolean", "no identifier", "unknown", "tokenizers"],
)
async def test_bad_weights_are_refused(
    admin_side: AdminSide, weights: list[tuple[str, object]], status: int, code: str
) -> None:
    services = admin_side.services
    for base_id, prompts in ((OLD, "e" * 64), (NEW, "f" * 64)):
        services.adapters.bases.register(base_id, "llama", prompts)
    transport = httpx.ASGITransport(create_admin_app(services))
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    body = {"weights": [{"base": base, "weight": weight} for base, weight in weights]}
    async with httpx.AsyncClient(transport=transport, base_url="http://admin/admin/v1", headers=headers) as client:
        refused = await client.put("/bases/weights", json=body)
        listed = (await client.get("/bases")).json()["data"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    assert {one["weight"] for one in listed} == {None}


async def test_viewers_cannot_change_bases(operator: httpx.AsyncClient, services: AdminServices) -> None:
    viewer = services.accounts.api_keys.create(None, "viewer", scopes=("platform:read",))
    headers = {"authorization": f"Bearer {viewer.secret}"}
    assert (await operator.get("/bases", headers=headers)).status_code == 200
    for method, path in (("POST", f"/bases/{NEW}/revalidate"), ("DELETE", f"/bases/{OLD}"), ("PUT", "/bases/weights")):
        assert (await operator.request(method, path, headers=headers)).status_code == 403


@pytest.mark.parametrize("action", ["preload", "pin"])
async def test_unvalidated_versions_are_not_loaded(
    operator: httpx.AsyncClient, services: AdminServices, admin_side: AdminSide, action: str
) -> None:
    adapter = services.adapters.registry.list_adapters(None, 1).data[0]
    for number, says in ((2, "is not valid"), (3, "not been validated yet")):
        response = await operator.post(f"/adapters/{adapter.id}/versions/{number}/{action}")
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (409, "adapter_not_validated")
        assert says in error["message"]
    assert admin_side.engine.resident == {}
