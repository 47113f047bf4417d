"""Quotas over REST: permissions, inheritance, and dry runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from loramux.migrations.identifiers import new_id
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.ledger.settlement import Settlement
from tests.admin.rest.tenants_and_keys import new_tenant

pytestmark = pytest.mark.anyio
PATH = "/admin/v1/quotas"
BAD_QUOTAS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown metric": ({"metric": "dollars"}, "metric"),
    "negative": ({"limit": -1}, "limit"),
    "overflow": ({"limit": 2**80}, "limit"),
    "budget overflow": ({"limit": 10**18 + 1, "metric": "cost_per_day"}, "limit"),
    "burst of a budget": ({"burst": 5, "metric": "tokens_per_month"}, "burst"),
    "burst of a stock": ({"burst": 5, "metric": "adapters"}, "burst"),
    "unknown mode": ({"mode": "strict"}, "mode"),
    "unknown scope": ({"scope": "galaxy"}, "scope"),
    "a tenant of the platform": ({"scope": "platform"}, "tenant"),
    "a key's without a key": ({"scope": "key"}, "key"),
    "another tenant's key": ({"key": "OTHER"}, "tenant"),
    "an adapter's adapters": ({"adapter": "support", "metric": "adapters"}, "metric"),
    "a key and an adapter": ({"adapter": "support", "key": "OWN"}, "adapter"),
    "day above month": ({"metric": "tokens_per_day", "limit": 1001}, "limit"),
    "usage": ({"used": 0}, "used"),
    "priority": ({"priority": 9}, "priority"),
}
BAD_CALLS: list[tuple[str, str, Any, int, str | None]] = [
    ("PUT", "/tenants/acme/tokens_per_day", {"limit": 1, "tenant": "globex"}, 400, "tenant"),
    ("PUT", "/tenants/acme/tokens_per_day", {"limit": 1, "metric": "adapters"}, 400, "metric"),
    ("PUT", "/tenants/acme/tokens_per_day", {"mode": "soft"}, 400, "limit"),
    ("PUT", "/tenants/acme/dollars", {"limit": 1}, 400, "metric"),
    ("PUT", "/tenants/nobody/tokens_per_day", {"limit": 1}, 404, "tenant"),
    ("PATCH", "/ID", {"tenant": "globex"}, 400, "tenant"),
    ("PATCH", "/ID", {"metric": "adapters"}, 400, "metric"),
    ("PATCH", "/ID", {"scope": "key"}, 400, "scope"),
    ("PATCH", "/ID", {"limit": -1}, 400, "limit"),
    ("PATCH", "/qta_0", {"limit": 1}, 404, None),
    ("GET", "/effective?tenant=nobody", None, 404, "tenant"),
    ("GET", "/effective?key=%00", None, 404, "key"),
    ("GET", "/effective", None, 400, "tenant"),
    ("GET", "/effective?tenant=globex&adapter=support", None, 404, "adapter"),
    ("POST", "/check", {"tenant": "acme", "prompt_tokens": -1, "max_tokens": 1}, 400, "prompt_tokens"),
    ("POST", "/check", {"tenant": "acme", "prompt_tokens": 1, "max_tokens": 10**30}, 400, "max_tokens"),
    ("POST", "/check", {"scope": "platform", "prompt_tokens": 1, "max_tokens": 1}, 400, "scope"),
]


@dataclass(frozen=True)
class Acme:
    id: str
    key_id: str
    adapter_id: str
    secret: str
    other_key_id: str


@pytest.fixture
async def acme(http: httpx.AsyncClient) -> Acme:
    made = {}
    for slug in ("acme", "globex"):
        tenant = (await http.post("/admin/v1/tenants", json={"slug": slug, "timezone": "Europe/Berlin"})).json()
        assert tenant["timezone"] == "Europe/Berlin"
        key = (await http.post("/admin/v1/api_keys", json={"tenant": slug, "scopes": ["tenant:admin"]})).json()
        made[slug] = (tenant["id"], key["id"], key["secret"])
    adapter = (await http.post("/admin/v1/adapters", json={"tenant": "acme", "name": "support"})).json()
    return Acme(made["acme"][0], made["acme"][1], adapter["id"], made["acme"][2], made["globex"][1])


def use(admin_side: Any, acme: Acme, prompt: int, completion: int, is_settled: bool = True) -> None:
    admission = Admission(admin_side.services.database)
    request = ReservationRequest(
        request_id=new_id("req"),
        tenant_id=acme.id,
        api_key_id=acme.key_id,
        model="base",
        adapter_version_id=None,
        endpoint="completions",
        prompt_tokens=prompt,
        reserved_tokens=prompt + completion,
    )
    admission.reserve(request)
    if is_settled:
        done = Settlement(status="completed", prompt_tokens=prompt, completion_tokens=completion)
        admission.settle(request.request_id, done)


async def made(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_quotas_exist_for_every_scope(http: httpx.AsyncClient, acme: Acme) -> None:
    platform = await made(http, scope="platform", metric="requests_per_minute", limit=7)
    tenant = await made(http, tenant="acme", metric="tokens_per_month", limit=10, mode="soft")
    key = await made(http, key=acme.key_id, metric="tokens_per_day", limit=5, mode="shadow")
    adapter = await made(http, tenant="acme", adapter="support", metric="concurrent_requests", limit=2)
    assert [(one["scope"], one["subject_id"], one["tenant_id"]) for one in (platform, tenant, key, adapter)] == [
        ("platform", "platform", None),
        ("tenant", acme.id, acme.id),
        ("key", acme.key_id, acme.id),
        ("adapter", acme.adapter_id, acme.id),
    ]
    assert [tenant["mode"], key["mode"], adapter["mode"]] == ["soft", "shadow", "hard"]
    assert (await http.get(f"{PATH}/{key['id']}")).json() == key
    everything = (await http.get(PATH)).json()["data"]
    assert [one["id"] for one in everything] == [adapter["id"], key["id"], tenant["id"], platform["id"]]
    own = (await http.get(PATH, headers={"authorization": f"Bearer {acme.secret}"})).json()["data"]
    assert [one["id"] for one in own] == [adapter["id"], key["id"], tenant["id"]]


async def test_quota_is_put_by_path_and_patched(http: httpx.AsyncClient, acme: Acme) -> None:
    path = f"{PATH}/tenants/acme/tokens_per_minute"
    first = (await http.put(path, json={"limit": 100, "tenant": "acme"})).json()
    again = (await http.put(path, json={"limit": 100, "burst": 300})).json()
    assert (again["id"], again["burst"]) == (first["id"], 300)
    seen = await http.get(f"{PATH}/{first['id']}")
    sent, headers = {"limit": 50, "metric": "tokens_per_minute"}, {"if-match": seen.headers["etag"]}
    changed = (await http.patch(f"{PATH}/{first['id']}", json=sent, headers=headers)).json()
    assert (await http.patch(f"{PATH}/{first['id']}", json=sent, headers=headers)).status_code == 412
    assert (await http.patch(f"{PATH}/{first['id']}", json=sent)).status_code == 428
    assert (changed["limit"], changed["burst"], changed["mode"]) == (50, 300, "hard")
    softer = (await http.patch(f"{PATH}/{first['id']}", json={"mode": "soft"}, headers={"if-match": "*"})).json()
    assert (softer["limit"], softer["burst"], softer["mode"]) == (50, 300, "soft")


async def test_invalid_quota_is_refused_with_the_fields_name(http: httpx.AsyncClient, acme: Acme) -> None:
    month = await made(http, tenant="acme", metric="tokens_per_month", limit=1000)
    keys = {"OTHER": acme.other_key_id, "OWN": acme.key_id}
    for case, (changes, param) in BAD_QUOTAS.items():
        body = {name: keys.get(value, value) if name == "key" else value for name, value in changes.items()}
        quota = {"tenant": "acme", "metric": "tokens_per_minute", "limit": 5, **body}
        response = await http.post(PATH, json=quota)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), case
        question = {"tenant": "acme", "prompt_tokens": 1, "max_tokens": 1, "quota": quota}
        response = await http.post(f"{PATH}/check", json=question)
        assert response.status_code == 400, case
        assert response.json()["error"]["param"].rpartition(".")[2] == param, case
    assert (await http.get(PATH)).json()["data"] == [month]


async def test_contradictory_or_meaningless_fields_are_refused(http: httpx.AsyncClient, acme: Acme) -> None:
    quota = await made(http, tenant="acme", metric="tokens_per_minute", limit=5)
    for case in BAD_CALLS:
        method, path, body, status, param = case
        response = await http.request(
            method, PATH + path.replace("ID", quota["id"]), json=body, headers={"if-match": "*"}
        )
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), case
    assert (await http.get(PATH)).json()["data"] == [quota]


async def test_an_unknown_timezone_is_refused(http: httpx.AsyncClient, acme: Acme) -> None:
    for timezone in ("Mars/Olympus", "../../etc/passwd", "", "UTC\x00", "x" * 200, 5):
        for method, path, body in (("POST", "tenants", {"slug": "new"}), ("PATCH", "tenants/acme", {})):
            response = await http.request(
                method, f"/admin/v1/{path}", json={**body, "timezone": timezone}, headers={"if-match": "*"}
            )
            assert (response.status_code, response.json()["error"]["param"]) == (400, "timezone")
    changed = (
        await http.patch("/admin/v1/tenants/acme", json={"timezone": "America/St_Johns"}, headers={"if-match": "*"})
    ).json()
    assert changed["timezone"] == "America/St_Johns"


async def test_effective_limits_include_inherited_ones(http: httpx.AsyncClient, acme: Acme, admin_side: Any) -> None:
    await made(http, scope="platform", metric="tokens_per_day", limit=1000)
    await made(http, scope="platform", metric="concurrent_requests", limit=9)
    await made(http, tenant="acme", metric="tokens_per_day", limit=500, mode="soft")
    await made(http, tenant="acme", metric="adapters", limit=3)
    await made(http, key=acme.key_id, metric="requests_per_minute", limit=60)
    use(admin_side, acme, 100, 50)
    use(admin_side, acme, 20, 10, is_settled=False)
    params = {"tenant": "acme", "key": acme.key_id}
    limits = (await http.get(f"{PATH}/effective", params=params)).json()["data"]
    shown = ("metric", "scope", "is_inherited", "limit", "used", "reserved", "remaining")
    assert [tuple(limit[name] for name in shown) for limit in limits] == [
        ("adapters", "tenant", False, 3, 1, 0, 2),
        ("concurrent_requests", "platform", True, 9, 0, 1, 8),
        ("requests_per_minute", "key", False, 60, limits[2]["used"], 0, limits[2]["remaining"]),
        ("tokens_per_day", "tenant", False, 500, 150, 30, 320),
    ]
    day = limits[3]
    assert day["window_start"] < day["reset_at"] == day["window_end"] <= day["window_start"] + 25 * 3600
    own = {"authorization": f"Bearer {acme.secret}"}
    assert len((await http.get(f"{PATH}/effective", headers=own)).json()["data"]) == 3
    # Requests for another tenant's quotas get a 404, as if those quotas did not exist.
    for asked in ({"tenant": "globex"}, {"key": acme.other_key_id}):
        assert (await http.get(f"{PATH}/effective", headers=own, params=asked)).status_code == 404


async def test_dry_run_names_the_binding_policy_and_changes_nothing(
    http: httpx.AsyncClient, acme: Acme, admin_side: Any
) -> None:
    month = await made(http, tenant="acme", metric="tokens_per_month", limit=200)
    use(admin_side, acme, 100, 50)
    question = {"tenant": "acme", "key": acme.key_id, "prompt_tokens": 30, "max_tokens": 10, "n": 2}
    fits = (await http.post(f"{PATH}/check", json=question)).json()
    assert (fits["is_admitted"], fits["status"], fits["error"], fits["policy_id"]) == (True, 200, None, None)
    assert [(one["cost"], one["remaining"], one["admits"]) for one in fits["verdicts"]] == [(50, 50, True)]
    spent = (await http.post(f"{PATH}/check", json={**question, "n": 3})).json()
    assert (spent["is_admitted"], spent["status"], spent["policy_id"]) == (False, 429, month["id"])
    assert (spent["error"]["code"], spent["error"]["param"]) == ("insufficient_quota", "tokens_per_month")
    assert 0 < int(spent["retry_after"]) <= 31 * 86_400 + 3600
    large = (await http.post(f"{PATH}/check", json={**question, "max_tokens": 100})).json()
    assert (large["status"], large["error"]["code"]) == (400, "request_too_large")
    # Try a lower monthly limit, the same limit in shadow mode, a limit for the key, and one for the platform.
    for trial, is_admitted in (
        ({"tenant": "acme", "metric": "tokens_per_month", "limit": 199}, False),
        ({"tenant": "acme", "metric": "tokens_per_month", "limit": 199, "mode": "shadow"}, True),
        ({"key": acme.key_id, "metric": "requests_per_minute", "limit": 0}, False),
        ({"scope": "platform", "metric": "concurrent_requests", "limit": 0}, False),
    ):
        what_if = (await http.post(f"{PATH}/check", json={**question, "quota": trial})).json()
        assert what_if["is_admitted"] is is_admitted, trial
    assert (await http.get(PATH)).json()["data"] == [month]
    (limit,) = (await http.get(f"{PATH}/effective", params={"tenant": "acme"})).json()["data"]
    assert (limit["used"], limit["reserved"]) == (150, 0)


async def test_adapter_count_and_bytes_are_limited(http: httpx.AsyncClient, acme: Acme) -> None:
    async def add(name: str) -> httpx.Response:
        return await http.post("/admin/v1/adapters", json={"tenant": "acme", "name": name})

    await made(http, tenant="acme", metric="adapters", limit=1)
    refused = await add("second")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert refused.json()["error"]["param"] == "adapters"
    await made(http, tenant="acme", metric="adapters", limit=1, mode="soft")
    assert (await add("second")).status_code == 201
    (limit,) = (await http.get(f"{PATH}/effective", params={"tenant": "acme"})).json()["data"]
    assert (limit["used"], limit["is_exceeded"], limit["num_exceeded"]) == (2, True, 1)
    await made(http, scope="platform", metric="adapter_bytes", limit=99)
    contents = {"adapter_config.json": b"{" + b" " * 48 + b"}", "adapter_model.safetensors": b"x" * 50}
    files = [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    ]
    path = f"/admin/v1/adapters/{acme.adapter_id}"
    refused = await http.post(f"{path}/uploads", json={"files": files})
    assert (refused.status_code, refused.json()["error"]["param"]) == (429, "adapter_bytes")
    await made(http, tenant="acme", metric="adapter_bytes", limit=100)
    upload = (await http.post(f"{path}/uploads", json={"files": files})).json()
    limits = (await http.get(f"{PATH}/effective", params={"tenant": "acme"})).json()["data"]
    held = next(limit for limit in limits if limit["metric"] == "adapter_bytes")
    assert (held["used"], held["reserved"], held["remaining"]) == (0, 100, 0)
    for name, content in contents.items():
        url = next(file["url"] for file in upload["files"] if file["name"] == name)
        assert (await http.put(url, content=content)).status_code < 300
    assert (await http.post(f"{path}/versions", json={"upload_id": upload["id"]})).status_code == 202


async def test_quota_is_set_changed_listed_and_removed(http: httpx.AsyncClient) -> None:
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
async def test_invalid_quotas_are_refused(http: httpx.AsyncClient, change: dict[str, Any], param: str) -> None:
    await new_tenant(http, "acme")
    body = {"tenant": "acme", "metric": "requests_per_minute", "limit": 5, **change}
    response = await http.post("/admin/v1/quotas", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_deleting_an_adapter_deletes_the_quotas_on_it(http: httpx.AsyncClient) -> None:
    await http.post("/admin/v1/tenants", json={"slug": "acme"})
    adapter = (await http.post("/admin/v1/adapters", json={"tenant": "acme", "name": "unused"})).json()["id"]
    limit = {"adapter": adapter, "metric": "tokens_per_minute", "limit": 5}
    assert (await http.post("/admin/v1/quotas", json=limit)).json()["subject"] == "acme/unused"
    assert (await http.delete(f"/admin/v1/adapters/{adapter}")).status_code == 204
    assert (await http.get("/admin/v1/quotas")).json()["data"] == []
