"""Purges over REST: what goes, what stays, and what waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, insert, select
from structlog.testing import capture_logs

from loramux.adapter_store.blobs.interface import canonical_key
from loramux.admin.rest import purging
from loramux.admin.serving.upkeep import Upkeep
from loramux.engine.protocol.messages import EngineCall, ForgetPrefixes, Load
from loramux.migrations import schema
from loramux.migrations.identifiers import new_id
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.ledger.settlement import Settlement
from tests.admin.admin_side import AdminSide
from tests.admin.metered_requests import begin_request, settle_request
from tests.admin.rest.adapters.pushed_versions import new_adapter, push
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio
V1 = "/admin/v1"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purging, "WAIT_S", 0.2)


async def purge(http: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = await http.post(f"{V1}/{path}/purge", json=body)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


async def usage(http: httpx.AsyncClient, **params: Any) -> list[dict[str, Any]]:
    page = (await http.get(f"{V1}/usage", params=params)).json()
    return [row for bucket in page["data"] for row in bucket["results"]]


def run_on(side: AdminSide, tenant_id: str, key_id: str, version: dict[str, Any], end_user: str | None = None) -> str:
    request_id = new_id("req")
    Admission(side.services.database).reserve(
        ReservationRequest(
            request_id=request_id,
            tenant_id=tenant_id,
            api_key_id=key_id,
            model=f"acme/support@{version['number']}",
            adapter_version_id=version["id"],
            adapter_id=version["adapter_id"],
            endpoint="completions",
            prompt_tokens=10,
            reserved_tokens=20,
            end_user=end_user,
        )
    )
    return request_id


async def test_dry_run_of_a_version_deletes_nothing_and_names_the_obstacle(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)
    version = await push(http, adapter_id, make_adapter())
    path = f"adapters/{adapter_id}/versions/1"
    found = await purge(http, path, dry_run=True)
    assert (found["name"], found["versions"], found["bytes"]) == ("acme/support@1", 1, version["size"])
    assert (found["dry_run"], found["blocked_by"]) == (True, "the alias 'default' names version 1")
    refused = await purge(http, path, 409, confirm="acme/support@1")
    assert refused["error"]["code"] == "version_in_use"
    for confirm in (None, "acme/support", "acme/support@2"):
        assert (await purge(http, path, 400, confirm=confirm))["error"]["code"] == "not_confirmed"
    assert (await http.get(f"{V1}/{path}")).json()["state"] == "ready"
    assert admin_side.blobs.exists(canonical_key(version["digest"]))
    assert (await http.get(f"{V1}/audit_log", params={"action": "version.*"})).json()["data"][0]["action"] != "purge"


async def test_purged_version_is_gone_everywhere_but_in_the_ledger(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    side, adapter_id = admin_side, await new_adapter(http)
    one = await push(http, adapter_id, make_adapter())
    two = await push(http, adapter_id, make_adapter())
    tenant = side.services.accounts.tenants.get("acme")
    assert tenant is not None
    key = side.services.accounts.api_keys.create(tenant.id, "caller").key.id
    request_id = run_on(side, tenant.id, key, two)
    waiting = await purge(http, f"adapters/{adapter_id}/versions/2", 409, confirm="acme/support@2")
    assert waiting["error"]["code"] == "requests_running"
    assert "1 request is still running" in waiting["error"]["message"]
    Admission(side.services.database).settle(
        request_id, Settlement(status="completed", prompt_tokens=10, completion_tokens=5)
    )
    await side.engine.call(Load(digest=two["digest"]), 1.0)
    purged = await purge(http, f"adapters/{adapter_id}/versions/2", confirm="acme/support@2")
    assert (purged["versions"], purged["bytes"], purged["files_pending"]) == (1, two["size"], 0)
    assert side.engine.purged == [two["digest"]]
    assert not side.blobs.exists(canonical_key(two["digest"]))
    assert side.blobs.exists(canonical_key(one["digest"]))
    gone = await http.get(f"{V1}/adapters/{adapter_id}/versions/2")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "version_not_found")
    (row,) = await usage(http, group_by="tenant,model,version")
    assert (row["model"], row["completion_tokens"], row["version"]) == ("acme/support@2", 5, two["id"])
    assert (await push(http, adapter_id, make_adapter()))["number"] == 3
    (entry,) = (await http.get(f"{V1}/audit_log", params={"action": "version.purge"})).json()["data"]
    assert (entry["actor"], entry["target_name"], entry["tenant"]) == ("operator", "acme/support@2", "acme")


async def test_purged_adapter_takes_its_quotas_grants_and_aliases_along(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    adapter_id = await new_adapter(http)
    version = await push(http, adapter_id, make_adapter())
    await http.post(f"{V1}/tenants", json={"slug": "guest"})
    await http.put(f"{V1}/adapters/{adapter_id}/grants/guest")
    await http.post(f"{V1}/quotas", json={"adapter": adapter_id, "metric": "tokens_per_minute", "limit": 5})
    found = await purge(http, f"adapters/{adapter_id}", dry_run=True)
    assert [found[name] for name in ("adapters", "versions", "grants", "quotas")] == [1, 1, 1, 1]
    assert found["aliases"] == ["default"]
    await purge(http, f"adapters/{adapter_id}", confirm="acme/support")
    assert (await http.get(f"{V1}/adapters/{adapter_id}")).status_code == 404
    assert (await http.get(f"{V1}/quotas")).json()["data"] == []
    assert list(admin_side.blobs.list_keys()) == []
    again = await new_adapter(http)
    # The name stands for new weights only under a new number.
    assert (await push(http, again, make_adapter()))["number"] == 2
    assert admin_side.services.adapters.registry.resolve("acme", "support", version=1) is None
    assert version["digest"] in admin_side.engine.purged


async def test_purged_tenant_leaves_only_sums_and_the_audit_log(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    side, adapter_id = admin_side, await new_adapter(http)
    version = await push(http, adapter_id, make_adapter())
    await http.post(f"{V1}/tenants", json={"slug": "other"})
    tenant, other = side.services.accounts.tenants.get("acme"), side.services.accounts.tenants.get("other")
    assert tenant is not None
    assert other is not None
    created = side.services.accounts.api_keys.create(tenant.id, "caller")
    key = created.key.id
    await http.post(f"{V1}/quotas", json={"tenant": "acme", "metric": "tokens_per_day", "limit": 10**9})
    await http.post(f"{V1}/quotas", json={"scope": "platform", "metric": "tokens_per_month", "limit": 10**9})
    for end_user in ("Ann Smith", "Bob Jones"):
        request_id = run_on(side, tenant.id, key, version, end_user)
        Admission(side.services.database).settle(
            request_id, Settlement(status="completed", prompt_tokens=10, completion_tokens=5)
        )
    settle_request(side, other.id, side.services.accounts.api_keys.create(other.id, "k").key.id, "the-base", 3, 4)
    headers = {"authorization": f"Bearer {created.secret}"}
    before = await usage(http, group_by="")
    by_tenant = {row["tenant"]: row["completion_tokens"] for row in await usage(http, group_by="tenant")}
    assert by_tenant == {"acme": 10, "other": 4}
    refused = await purge(http, "tenants/acme", 409, confirm="acme")
    assert refused["error"]["code"] == "tenant_active"
    etag = (await http.get(f"{V1}/tenants/acme")).headers["etag"]
    await http.patch(f"{V1}/tenants/acme", json={"state": "suspended"}, headers={"if-match": etag})
    found = await purge(http, "tenants/acme", dry_run=True)
    assert [found[name] for name in ("adapters", "versions", "keys", "quotas", "usage_events")] == [1, 1, 1, 1, 2]
    assert found["blocked_by"] is None
    isolation_key = side.services.accounts.tenants.share(tenant.id).isolation_key
    purged = await purge(http, "tenants/acme", confirm="acme")
    assert (purged["usage_events"], purged["versions"], purged["files_pending"]) == (2, 1, 0)
    assert side.engine.forgotten_prefixes == [isolation_key]
    assert list(side.blobs.list_keys()) == []
    assert (await http.get(f"{V1}/tenants/acme")).status_code == 404
    assert (await http.get(f"{V1}/tenants", headers=headers)).status_code == 401

    # A new tenant with the slug has nothing of the old one: no usage, no quota, and no version number.
    await http.post(f"{V1}/tenants", json={"slug": "acme"})
    assert (await http.get(f"{V1}/quotas", params={"tenant": "acme"})).json()["data"] == []
    assert await usage(http, tenant="acme", group_by="tenant") == []
    again = await push(http, await new_adapter(http), make_adapter())
    assert again["number"] == 2

    assert await usage(http, group_by="") == before
    by_tenant = {row["tenant"]: row["completion_tokens"] for row in await usage(http, group_by="tenant")}
    assert by_tenant == {tenant.id: 10, "other": 4}
    with side.services.database.read() as connection:
        series = schema.usage_series.c
        users = connection.scalars(select(series.end_user).where(series.tenant_id == tenant.id, series.end_user != ""))
        assert [name[:7] for name in users] == ["purged-"] * 2
        tables = (schema.usage_events, schema.usage_series, schema.api_keys, schema.quota_counters, schema.adapters)
        stored = " ".join(str(row) for table in tables for row in connection.execute(select(table)))
        policies = connection.execute(select(func.count()).select_from(schema.quota_policies)).scalar_one()
    assert "Smith" not in stored
    assert "Jones" not in stored
    assert policies == 1
    (entry,) = (await http.get(f"{V1}/audit_log", params={"action": "tenant.purge"})).json()["data"]
    assert (entry["actor"], entry["target"], entry["changes"]) == ("operator", tenant.id, {"slug": ["acme", None]})


async def test_purge_of_a_tenant_cancels_its_requests_and_waits_for_them(
    http: httpx.AsyncClient, admin_side: AdminSide
) -> None:
    side = admin_side
    tenant = side.services.accounts.tenants.create("busy")
    key = side.services.accounts.api_keys.create(tenant.id, "k").key.id
    request_id = begin_request(side, tenant.id, key, "the-base", 5)
    etag = (await http.get(f"{V1}/tenants/busy")).headers["etag"]
    await http.patch(f"{V1}/tenants/busy", json={"state": "suspended"}, headers={"if-match": etag})
    refused = await purge(http, "tenants/busy", 409, confirm="busy")
    assert refused["error"]["code"] == "requests_running"
    found = side.services.engine.requests.get(request_id)
    assert found is not None
    assert found.cancel_requested_us is not None
    Admission(side.services.database).settle(
        request_id, Settlement(status="aborted", prompt_tokens=5, completion_tokens=1)
    )
    assert (await purge(http, "tenants/busy", confirm="busy"))["usage_events"] == 1


async def test_every_server_deletes_its_copies_of_purged_weights(
    http: httpx.AsyncClient, admin_side: AdminSide, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    adapter_id = await new_adapter(http)
    version = await push(http, adapter_id, make_adapter())
    admin_side.services.adapters.ingest.purge_rows.purge_adapter(adapter_id)
    upkeep = Upkeep(admin_side.services)
    for _ in range(2):
        await upkeep.forget_purged()
    assert admin_side.engine.purged == [version["digest"]], "once is enough"
    # Equal weights that are served again stay.
    again = await new_adapter(http, name="again")
    admin_side.services.adapters.ingest.remove_abandoned()
    with admin_side.services.database.write() as connection:
        connection.execute(
            insert(schema.adapter_versions).values(
                id=new_id("adv"),
                adapter_id=again,
                number=1,
                state="ready",
                digest=version["digest"],
                upload_id=new_id("upl"),
                report={},
                created_us=0,
            )
        )
    await Upkeep(admin_side.services).forget_purged()
    assert admin_side.engine.purged == [version["digest"]]


async def test_every_server_deletes_the_cached_prefixes_of_deleted_tenants(
    http: httpx.AsyncClient, admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants, engine = admin_side.services.accounts.tenants, admin_side.engine
    keys = {slug: tenants.share(tenants.create(slug).id).isolation_key for slug in ("purged", "deleted", "kept")}
    upkeep = Upkeep(admin_side.services)
    await upkeep.forget_purged()
    assert engine.forgotten_prefixes == []
    etag = (await http.get(f"{V1}/tenants/purged")).headers["etag"]
    await http.patch(f"{V1}/tenants/purged", json={"state": "suspended"}, headers={"if-match": etag})
    await purge(http, "tenants/purged", confirm="purged")
    assert engine.forgotten_prefixes == [keys["purged"]], "at once"
    assert (await http.delete(f"{V1}/tenants/deleted")).status_code == 204
    engine.forgotten_prefixes.clear()

    engine.die()
    await upkeep.forget_purged()
    engine.revive()
    for _ in range(2):
        await upkeep.forget_purged()
    both = sorted((keys["purged"], keys["deleted"]))
    assert engine.forgotten_prefixes == both, "once the engine answers"
    monkeypatch.setattr("loramux.admin.serving.upkeep.FORGET_AGAIN_S", 0.0)
    for _ in range(2):
        await upkeep.forget_purged()
    assert engine.forgotten_prefixes == [*both, *both], "a request that was running has ended by now"


class BusyEngine(ScriptedEngine):
    """Answers a ForgetPrefixes in time only as long as `num_answers` is positive."""

    num_answers = 0

    async def call(self, message: EngineCall[Any], timeout_s: float) -> Any:
        if isinstance(message, ForgetPrefixes):
            if not self.num_answers:
                raise TimeoutError
            self.num_answers -= 1
        return await super().call(message, timeout_s)


async def test_prefixes_of_many_tenants_are_deleted_in_parts(
    admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, tenants, engine = admin_side.services, admin_side.services.accounts.tenants, BusyEngine()
    monkeypatch.setattr(purging, "KEYS_PER_CALL", 2)
    created = [tenants.create(f"t{number}").id for number in range(5)]
    keys = sorted(tenants.share(tenant_id).isolation_key for tenant_id in created)
    for tenant_id in created:
        tenants.delete(tenant_id)
    upkeep = Upkeep(replace(services, engine=replace(services.engine, client=engine)))
    with capture_logs() as entries:
        await upkeep.forget_purged()
        engine.num_answers = 1
        await upkeep.forget_purged()
        assert engine.forgotten_prefixes == keys[:2]
        engine.num_answers = 2
        for _ in range(2):
            await upkeep.forget_purged()
    assert engine.forgotten_prefixes == keys, "what has been deleted is not deleted again"
    assert [(one["kind"], one["num_due"]) for one in entries] == [("prefixes", 5)], "a failure is logged once"


@pytest.mark.parametrize("scope", ["tenant:admin", "tenant:develop", "platform:read"])
async def test_only_a_platform_administrator_may_purge(
    http: httpx.AsyncClient, admin_side: AdminSide, scope: str
) -> None:
    adapter_id = await new_adapter(http)
    tenant = admin_side.services.accounts.tenants.get("acme")
    assert tenant is not None
    owner = None if scope.startswith("platform") else tenant.id
    secret = admin_side.services.accounts.api_keys.create(owner, "k", [scope]).secret
    headers = {"authorization": f"Bearer {secret}"}
    for path in (f"adapters/{adapter_id}", f"adapters/{adapter_id}/versions/1", "tenants/acme"):
        answer = await http.post(f"{V1}/{path}/purge", json={"dry_run": True}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")
