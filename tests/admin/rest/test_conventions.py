from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import insert

from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.admin.server.idempotency_keys import (
    LIFETIME_US,
    RUNNING_US,
    Claim,
    IdempotencyKeys,
    StoredAnswer,
)
from loramux.admin.serving.app import ADMIN_DOCUMENT, create_admin_app
from loramux.admin.serving.expired_rows import ExpiredRows
from loramux.admin.serving.upkeep import Upkeep
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import adapter_versions
from loramux.platform.accounts.model_names import ModelNotFound, ModelResolver
from loramux.platform.accounts.principals import Principal
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import RequestCheckpoint, ReservationRequest
from loramux.platform.bodies import request_body
from loramux.platform.errors import Conflict, UnprocessableRequest
from loramux.platform.requests.openapi import operations
from tests.admin.admin_side import ADMIN_KEY, TARGET, AdminSide, open_admin_side
from tests.admin.rest.adapters.pushed_versions import FILES, declared, push

pytestmark = pytest.mark.anyio
BASE = "/admin/v1"


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminSide]:
    with open_admin_side(tmp_path_factory.mktemp("conventions"), TARGET) as side:
        yield side


@pytest.fixture
def http(side: AdminSide) -> httpx.AsyncClient:
    return client(side, ADMIN_KEY)


def client(side: AdminSide, key: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_admin_app(side.services))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(transport=transport, base_url=f"http://admin{BASE}", headers=headers)


def key_of(side: AdminSide, slug: str, *scopes: str, adapters: list[str] | None = None) -> str:
    tenants = side.services.accounts.tenants
    tenant = tenants.get(slug) or tenants.create(slug)
    return side.services.accounts.api_keys.create(tenant.id, "test", scopes, adapters=adapters).secret


async def test_repeated_call_with_one_key_runs_once(http: httpx.AsyncClient) -> None:
    headers = {"idempotency-key": "first"}
    answers = [await http.post("/tenants", json={"slug": "once"}, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].content == answers[1].content
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, "true"]
    assert answers[0].headers["etag"] == answers[1].headers["etag"]
    assert (await http.post("/tenants", json={"slug": "once"})).status_code == 409


async def test_idempotency_key_is_bound_to_one_call_and_caller(http: httpx.AsyncClient, side: AdminSide) -> None:
    headers = {"idempotency-key": "one-call"}
    assert (await http.post("/tenants", json={"slug": "one-call"}, headers=headers)).status_code == 201
    for path, body in (("/tenants", {"slug": "another"}), ("/adapters", {"slug": "one-call"})):
        other = await http.post(path, json=body, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    second = client(side, side.services.accounts.api_keys.create(None, "second").secret)
    assert (await second.post("/tenants", json={"slug": "another"}, headers=headers)).status_code == 201


async def test_repeated_call_does_not_return_the_secret_again(http: httpx.AsyncClient, side: AdminSide) -> None:
    side.services.accounts.tenants.create("secretive")
    headers = {"idempotency-key": "a-key"}
    first, second = [
        (await http.post("/api_keys", json={"tenant": "secretive"}, headers=headers)).json() for _ in range(2)
    ]
    assert first["secret"].startswith("sk-lmx-")
    assert second == {**first, "secret": None}
    with side.services.database.read() as connection:
        stored = connection.exec_driver_sql("SELECT body FROM idempotency_keys").scalars().all()
    assert not any(first["secret"].encode() in body for body in stored)


async def test_refused_call_does_not_store_its_idempotency_key(http: httpx.AsyncClient) -> None:
    headers = {"idempotency-key": "refused"}
    assert (await http.post("/tenants", json={"slug": "UPPER"}, headers=headers)).status_code == 400
    assert (await http.post("/tenants", json={"slug": "lower"}, headers=headers)).status_code == 201


@pytest.mark.parametrize("key", ["", "a b", "é", "x" * 256], ids=["empty", "blank", "letter", "long"])
async def test_invalid_idempotency_key_is_refused(http: httpx.AsyncClient, key: str) -> None:
    response = await http.post("/tenants", json={"slug": "bad"}, headers={"idempotency-key": key.encode()})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_idempotency_key")


async def test_concurrent_calls_with_one_key_run_once(http: httpx.AsyncClient) -> None:
    headers = {"idempotency-key": "at-once"}
    calls = (http.post("/tenants", json={"slug": "at-once"}, headers=headers) for _ in range(6))
    answers = await asyncio.gather(*calls)
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert 201 in {answer.status_code for answer in answers}
    for answer in answers:
        if answer.status_code == 409:
            assert answer.json()["error"]["code"] == "idempotency_key_in_use"
            assert answer.headers["retry-after"] == "1"
    again = await http.post("/tenants", json={"slug": "at-once"}, headers=headers)
    assert (again.status_code, again.headers["idempotent-replayed"]) == (201, "true")


class Time:
    now_us = 1_800_000_000_000_000

    def __call__(self) -> int:
        return self.now_us


def test_call_with_unknown_outcome_is_not_repeated(migrated_url: str) -> None:
    time = Time()
    database = Database(migrated_url, time)
    keys = IdempotencyKeys(database)
    claim = keys.claim("key_1", "k", b"a" * 32)
    assert isinstance(claim, Claim)
    with pytest.raises(Conflict) as caught:
        keys.claim("key_1", "k", b"a" * 32)
    assert caught.value.code == "idempotency_key_in_use"
    with pytest.raises(UnprocessableRequest) as refused:
        keys.claim("key_1", "k", b"b" * 32)
    assert refused.value.code == "idempotency_key_reused"
    assert isinstance(keys.claim("key_2", "k", b"b" * 32), Claim)
    time.now_us += RUNNING_US
    with pytest.raises(Conflict) as caught:
        keys.claim("key_1", "k", b"a" * 32)
    assert (caught.value.code, caught.value.param) == ("idempotency_outcome_unknown", "Idempotency-Key")
    keys.complete(claim, StoredAnswer(201, {"etag": '"1"'}, b"{}"))
    assert keys.claim("key_1", "k", b"a" * 32) == StoredAnswer(201, {"etag": '"1"'}, b"{}")
    time.now_us += LIFETIME_US
    assert ExpiredRows(database).sweep()["idempotency_keys"] == 2
    assert isinstance(keys.claim("key_1", "k", b"b" * 32), Claim)
    database.close()


def test_clock_set_back_does_not_leave_a_call_running_forever(migrated_url: str) -> None:
    time = Time()
    database = Database(migrated_url, time)
    keys = IdempotencyKeys(database)
    time.now_us += 7 * LIFETIME_US
    assert isinstance(keys.claim("key_1", "k", b"a" * 32), Claim)
    time.now_us -= RUNNING_US - 1
    with pytest.raises(Conflict) as caught:
        keys.claim("key_1", "k", b"a" * 32)
    assert caught.value.code == "idempotency_key_in_use"
    time.now_us -= 7 * LIFETIME_US
    with pytest.raises(Conflict) as caught:
        keys.claim("key_1", "k", b"a" * 32)
    assert (caught.value.code, caught.value.param) == ("idempotency_outcome_unknown", "Idempotency-Key")
    database.close()


async def test_change_requires_a_current_if_match(http: httpx.AsyncClient) -> None:
    etag = (await http.post("/tenants", json={"slug": "etags"})).headers["etag"]
    assert (await http.get("/tenants/etags")).headers["etag"] == etag

    async def change(if_match: str | None, name: str = "Other") -> httpx.Response:
        headers = {} if if_match is None else {"if-match": if_match}
        return await http.patch("/tenants/etags", json={"display_name": name}, headers=headers)

    assert (await change(None)).json()["error"]["code"] == "precondition_required"
    for stale in ('"0"', f"W/{etag}"):
        refused = await change(stale)
        assert (refused.status_code, refused.json()["error"]["code"]) == (412, "precondition_failed")
    assert (await change("etag")).status_code == 400
    changed = await change(f'"0", {etag}')
    assert (changed.status_code, changed.json()["display_name"]) == (200, "Other")
    assert (await change(etag)).status_code == 412
    assert (await change(changed.headers["etag"], "Third")).status_code == 200
    assert (await change("*", "Fourth")).status_code == 200


async def test_one_of_several_concurrent_changes_succeeds(http: httpx.AsyncClient) -> None:
    etag = (await http.post("/tenants", json={"slug": "race"})).headers["etag"]
    changes = (
        http.patch("/tenants/race", json={"display_name": f"Name {n}"}, headers={"if-match": etag}) for n in range(5)
    )
    assert sorted(answer.status_code for answer in await asyncio.gather(*changes)) == [200, 412, 412, 412, 412]


async def test_one_of_several_concurrent_limits_is_stored(http: httpx.AsyncClient, side: AdminSide) -> None:
    quota = side.services.usage.quotas.set(side.services.accounts.tenants.create("raced").id, "tokens_per_minute", 5)
    path = f"/quotas/{quota.id}"
    etag = (await http.get(path)).headers["etag"]
    changes = (http.patch(path, json={"limit": limit}, headers={"if-match": etag}) for limit in range(10, 15))
    answers = await asyncio.gather(*changes)
    assert sorted(answer.status_code for answer in answers) == [200, 412, 412, 412, 412]
    (written,) = (answer.json()["limit"] for answer in answers if answer.status_code == 200)
    assert (await http.get(path)).json()["limit"] == written


async def test_oversized_body_is_refused_before_it_is_stored(http: httpx.AsyncClient) -> None:
    response = await http.post("/tenants", content=b"x" * 70_000, headers={"idempotency-key": "large"})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")


async def test_endless_body_times_out(side: AdminSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_TIMEOUT_S", 0.05)

    async def forever() -> Any:
        yield b'{"slug":'
        await asyncio.sleep(30)

    async with client(side, ADMIN_KEY) as http:
        response = await http.post("/tenants", content=forever())
    assert (response.status_code, response.json()["error"]["code"]) == (400, "body_timeout")


@pytest.mark.parametrize(
    ("pauses_s", "stall_s", "status"),
    [
        # A busy machine may prolong the pauses.
        pytest.param([0.01] * 8, 30.0, 201, id="slow but steady"),
        pytest.param([0.0, 30.0], 0.05, 400, id="stops"),
    ],
)
async def test_stalled_body_times_out_long_before_a_slow_body(
    side: AdminSide, monkeypatch: pytest.MonkeyPatch, pauses_s: list[float], stall_s: float, status: int
) -> None:
    monkeypatch.setattr(request_body, "BODY_STALL_S", stall_s)
    sent = json.dumps({"slug": f"slow-{secrets.token_hex(4)}"}).encode()

    async def slowly() -> Any:
        for number, pause_s in enumerate(pauses_s):
            yield sent[number : number + 1]
            await asyncio.sleep(pause_s)
        yield sent[len(pauses_s) :]

    async with client(side, ADMIN_KEY) as http:
        response = await http.post("/tenants", content=slowly())
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["code"] == "body_timeout"


HOSTILE = ["../../etc/passwd", "а-cyrillic", "a\u202eb", "a\x00b", "a\nb", "%2e%2e", "a/b", "", " ", "ａｂｃ", "x" * 64]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: repr(name)[:20])
async def test_hostile_names_are_refused_and_not_repeated(http: httpx.AsyncClient, side: AdminSide, name: str) -> None:
    tenant = side.services.accounts.tenants.get("names") or side.services.accounts.tenants.create("names")
    found = side.services.adapters.registry.find_adapter(tenant.id, "good")
    adapter = found or side.services.adapters.registry.create_adapter(tenant.id, "good")
    calls = [
        ("POST", "/tenants", {"slug": name}),
        ("POST", "/adapters", {"tenant": "names", "name": name}),
        ("POST", "/adapters", {"tenant": name, "name": "other"}),
        ("POST", "/api_keys", {"tenant": "names", "adapters": [name]}),
        ("GET", f"/adapters?tenant=names&name={httpx.URL('', params={'a': name}).params}", None),
    ]
    for method, path, body in calls:
        response = await http.request(method, path, json=body)
        assert response.status_code in (200, 400, 404), (path, response.text)
        if response.status_code == 200:
            assert response.json()["data"] == []
        elif len(name) > 1:
            assert name not in response.text
    encoded = str(httpx.QueryParams({"n": name}))[2:].replace("+", "%20")
    for path in (f"/adapters/{adapter.id}/aliases/{encoded}", f"/tenants/{encoded}", f"/api_keys/{encoded}"):
        # With an empty name, call the list's path.
        response = await http.get(path if encoded else path.rstrip("/"))
        assert response.status_code in (200, 400, 404), path
    for body in ({"display_name": f"a{name}\u2066b"}, {"display_name": ""}):
        response = await http.patch("/tenants/names", json=body, headers={"if-match": "*"})
        assert response.status_code == 400


def add_version(side: AdminSide, adapter_id: str) -> str:
    version_id = new_id("adv")
    values = {"id": version_id, "adapter_id": adapter_id, "number": 1, "state": "rejected", "upload_id": new_id("upl")}
    with side.services.database.write() as connection:
        connection.execute(insert(adapter_versions).values(**values, report={}, created_us=1))
    return version_id


async def test_foreign_objects_look_like_missing_objects(http: httpx.AsyncClient, side: AdminSide) -> None:
    owner = side.services.accounts.tenants.create("owner")
    adapter = side.services.adapters.registry.create_adapter(owner.id, "private")
    key = side.services.accounts.api_keys.create(owner.id, "theirs").key
    request_id = reserve(side, owner.id, key.id)
    policy = side.services.usage.quotas.set(owner.id, "requests_per_minute", 5)
    price = side.services.usage.prices.add(
        tenant_id=owner.id, scope="all", prompt_nanos=1, cached_nanos=None, completion_nanos=2
    )
    version_id = add_version(side, adapter.id)
    assert (await client(side, ADMIN_KEY).get(f"/jobs/job_{version_id[4:]}")).status_code == 200
    foreign = {
        "adapter_id": adapter.id,
        "key_id": key.id,
        "request_id": request_id,
        "quota_id": policy.id,
        "price_id": price.id,
        "job_id": f"job_{version_id[4:]}",
        "id_or_slug": "owner",
        "tenant": "owner",
    }
    unknown = {name: f"{value[:4]}{'0' * 32}" if "_" in value else "nobody" for name, value in foreign.items()}
    described = ADMIN_DOCUMENT.of(create_admin_app(side.services))
    stranger = client(side, key_of(side, "stranger", "tenant:admin"))
    num_hidden, hidden = 0, set[str]()
    for path, operation, method in operations(described):
        needed = [one["name"] for one in operation.get("parameters", []) if one["in"] == "path"]
        if not needed or not path.startswith(BASE) or needed[0] not in foreign:
            continue
        answers = []
        for names in (foreign, unknown):
            filled = path.removeprefix(BASE)
            for name in needed:
                filled = filled.replace(f"{{{name}}}", names.get(name, "1"))
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
            answers.append(await stranger.request(method, filled, json=body, headers={"if-match": "*"}))
        assert answers[0].status_code == answers[1].status_code, (method, path)
        assert answers[0].status_code in (403, 404), (method, path, answers[0].text)
        assert answers[0].content == answers[1].content, (method, path)
        if answers[0].status_code == 404:
            hidden.add(needed[0])
            num_hidden += 1
    assert hidden == {"adapter_id", "key_id", "request_id", "quota_id", "price_id", "job_id", "id_or_slug"}
    assert num_hidden > 25


async def test_developer_can_push_versions_but_not_move_default(
    side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    developer = client(side, key_of(side, "makers", "tenant:develop"))
    made = await developer.post("/adapters", json={"tenant": "makers", "name": "support"})
    adapter_id = made.json()["id"]
    full = client(side, key_of(side, "makers", "tenant:develop"))
    full.base_url = httpx.URL("http://admin")
    version = await push(full, adapter_id, make_adapter())
    assert version["state"] == "ready"
    job = (await developer.get(f"/jobs/job_{version['id'][4:]}")).json()
    assert (job["state"], job["model"]) == ("succeeded", "makers/support@1")
    assert (await developer.get("/jobs")).json()["data"] == []
    body = {"version": 1}
    assert (await developer.put(f"/adapters/{adapter_id}/aliases/canary", json=body)).status_code == 200
    for method, path in (("PUT", "aliases/default"), ("POST", "aliases/default/rollback")):
        refused = await developer.request(method, f"/adapters/{adapter_id}/{path}", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    for method, path in (
        ("POST", f"adapters/{adapter_id}/versions/1/archive"),
        ("POST", f"adapters/{adapter_id}/disable"),
        ("DELETE", f"adapters/{adapter_id}/aliases/canary"),
        ("POST", f"adapters/{adapter_id}/versions/1/pin"),
        ("POST", "api_keys"),
    ):
        assert (await developer.request(method, f"/{path}", json={"tenant": "makers"})).status_code == 403, path
    viewer = client(side, key_of(side, "makers", "tenant:read"))
    assert (await viewer.get(f"/adapters/{adapter_id}")).status_code == 200
    assert (await viewer.post(f"/adapters/{adapter_id}/versions/1/preload")).status_code == 403
    preloaded = (await developer.post(f"/adapters/{adapter_id}/versions/1/preload")).json()
    assert (preloaded["state"], preloaded["pinned"]) == ("resident", False)
    own = (await developer.get("/residency")).json()
    assert [one["versions"][0]["model"] for one in own["data"]] == ["makers/support@1"]
    assert (own["pages"], own["tiers"]) == (None, None)
    assert (await client(side, key_of(side, "others", "tenant:read")).get("/residency")).json()["data"] == []


async def test_limited_key_reaches_only_its_adapters(side: AdminSide) -> None:
    tenant = side.services.accounts.tenants.create("limits")
    first, second = (side.services.adapters.registry.create_adapter(tenant.id, name) for name in ("first", "second"))
    secret = key_of(side, "limits", "adapters", "tenant:develop", adapters=["first"])
    limited = client(side, secret)
    assert [one["name"] for one in (await limited.get("/adapters")).json()["data"]] == ["first"]
    assert (await limited.get(f"/adapters/{first.id}")).status_code == 200
    assert (await limited.get(f"/adapters/{second.id}")).status_code == 404
    assert (await limited.post("/adapters", json={"tenant": "limits", "name": "third"})).status_code == 403
    principal = side.services.accounts.api_keys.authenticate(secret)
    assert isinstance(principal, Principal)
    assert principal.adapter_ids == {first.id}
    resolver = ModelResolver(AdapterRegistry(side.services.database), "the-base")
    with pytest.raises(ModelNotFound):
        resolver.resolve(principal, "second")
    admin = client(side, ADMIN_KEY)
    for body, param in (
        ({"tenant": "limits", "adapters": ["first"], "scopes": ["tenant:admin"]}, "adapters"),
        ({"tenant": "limits", "adapters": ["nothing"]}, "adapters"),
        ({"tenant": None, "adapters": ["first"]}, "adapters"),
    ):
        refused = await admin.post("/api_keys", json=body)
        assert refused.status_code in (400, 404)
        assert refused.json()["error"]["param"] == param


async def test_tenant_administrator_manages_its_own_keys(side: AdminSide) -> None:
    admin = client(side, key_of(side, "keepers", "tenant:admin"))
    made = await admin.post("/api_keys", json={"tenant": "keepers", "scopes": ["tenant:develop"]})
    assert made.status_code == 201
    key_id, etag = made.json()["id"], made.headers["etag"]
    changed = await admin.patch(f"/api_keys/{key_id}", json={"name": "ci"}, headers={"if-match": etag})
    assert changed.json()["name"] == "ci"
    rotated = (await admin.post(f"/api_keys/{key_id}/rotate", json={"grace_s": 60})).json()
    assert rotated["id"] == key_id
    assert rotated["previous_secret_expires_at"] is not None
    both = await admin.post(f"/api_keys/{key_id}/rotate", json={"grace_s": 60, "keep_previous": True})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "grace_s")
    for secret in (made.json()["secret"], rotated["secret"]):
        assert (await client(side, secret).get("/tenants")).status_code == 200
    assert (await admin.delete(f"/api_keys/{key_id}")).json()["revoked_at"] is not None
    again = await admin.post(f"/api_keys/{key_id}/rotate")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "api_key_revoked")
    for body in ({"tenant": None}, {"tenant": "keepers", "scopes": ["platform:admin"]}):
        assert (await admin.post("/api_keys", json=body)).status_code in (400, 403)
    headers = {"if-match": "*"}
    assert (await admin.patch("/tenants/keepers", json={"display_name": "K"}, headers=headers)).status_code == 200
    assert (await admin.patch("/tenants/keepers", json={"weight": 5}, headers=headers)).status_code == 403


async def test_keys_of_a_suspended_tenant_work_again_after_resuming(http: httpx.AsyncClient, side: AdminSide) -> None:
    own = client(side, key_of(side, "paused", "tenant:read"))
    assert (await own.get("/tenants")).status_code == 200
    for state, status in (("suspended", 401), ("active", 200)):
        changed = await http.patch("/tenants/paused", json={"state": state}, headers={"if-match": "*"})
        assert changed.json()["state"] == state
        assert (await own.get("/tenants")).status_code == status


async def test_objects_in_use_cannot_be_deleted(http: httpx.AsyncClient, side: AdminSide) -> None:
    tenant = side.services.accounts.tenants.create("used")
    adapter = side.services.adapters.registry.create_adapter(tenant.id, "busy")
    side.services.usage.quotas.set(tenant.id, "requests_per_minute", 5)
    refused = await http.delete("/tenants/used")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "tenant_in_use")
    assert refused.json()["error"]["message"].endswith("suspend it, and purge it to delete it")
    declared_files = [{"name": name, "size": 1, "sha256": "0" * 64} for name in FILES]
    await http.post(f"/adapters/{adapter.id}/uploads", json={"files": declared_files})
    refused = await http.delete(f"/adapters/{adapter.id}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_in_use")
    await http.post("/tenants", json={"slug": "unused"})
    unused = await http.post("/adapters", json={"tenant": "unused", "name": "mistake"})
    assert (await http.delete(f"/adapters/{unused.json()['id']}")).status_code == 204
    assert (await http.delete("/tenants/unused")).status_code == 204
    assert (await http.get("/tenants/unused")).status_code == 404


async def test_concurrent_identical_uploads_create_one_version(
    http: httpx.AsyncClient, side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    tenant = side.services.accounts.tenants.create("twice")
    adapter = side.services.adapters.registry.create_adapter(tenant.id, "support")
    directory = make_adapter()
    uploads = []
    for _ in range(2):
        upload = (await http.post(f"/adapters/{adapter.id}/uploads", json={"files": declared(directory)})).json()
        for file in upload["files"]:
            content = (directory / file["name"]).read_bytes()
            assert (await http.put(file["url"].removeprefix(BASE), content=content)).status_code == 204
        uploads.append(upload["id"])
    calls = (http.post(f"/adapters/{adapter.id}/versions", json={"upload_id": upload}) for upload in uploads)
    answers = await asyncio.gather(*calls)
    assert [answer.status_code for answer in answers] == [202, 202]
    assert {answer.json()["number"] for answer in answers} == {1}


def reserve(side: AdminSide, tenant_id: str, key_id: str) -> str:
    request_id = new_id("req")
    Admission(side.services.database).reserve(
        ReservationRequest(
            request_id=request_id,
            tenant_id=tenant_id,
            api_key_id=key_id,
            model="the-base",
            adapter_version_id=None,
            endpoint="chat",
            prompt_tokens=3,
            reserved_tokens=20,
        )
    )
    return request_id


async def test_running_requests_are_listed_and_cancelled(side: AdminSide) -> None:
    tenant = side.services.accounts.tenants.create("callers")
    key = side.services.accounts.api_keys.create(tenant.id, "caller").key
    request_id = reserve(side, tenant.id, key.id)
    admission = Admission(side.services.database)
    assert admission.checkpoint([RequestCheckpoint(request_id, 7)]) == []
    viewer, admin = (client(side, key_of(side, "callers", scope)) for scope in ("tenant:read", "tenant:admin"))
    (shown,) = (await viewer.get("/requests")).json()["data"]
    assert (shown["id"], shown["state"], shown["completion_tokens"]) == (request_id, "running", 7)
    assert (shown["tenant"], shown["api_key_id"], shown["model"]) == ("callers", key.id, "the-base")
    assert (await viewer.post(f"/requests/{request_id}/cancel")).status_code == 403
    cancelled = await admin.post(f"/requests/{request_id}/cancel")
    assert (cancelled.status_code, cancelled.json()["state"]) == (202, "cancelling")
    # The request's gateway learns of the cancellation at its next checkpoint.
    assert admission.checkpoint([RequestCheckpoint(request_id, 8)]) == [request_id]


async def test_pin_survives_an_engine_restart(
    http: httpx.AsyncClient, side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    tenant = side.services.accounts.tenants.create("pinned")
    adapter = side.services.adapters.registry.create_adapter(tenant.id, "support")
    whole = client(side, ADMIN_KEY)
    whole.base_url = httpx.URL("http://admin")
    digest = (await push(whole, adapter.id, make_adapter()))["digest"]
    version = f"/adapters/{adapter.id}/versions/1"
    pinned = (await http.post(f"{version}/pin")).json()
    assert (pinned["state"], pinned["pinned"], pinned["digest"]) == ("resident", True, digest)
    (shown,) = [one for one in (await http.get("/residency")).json()["data"] if one["digest"] == digest]
    assert (shown["is_pinned"], shown["versions"][0]["model"]) == (True, "pinned/support@1")
    side.engine.pinned.clear()
    await Upkeep(side.services).renew_pins()
    assert digest in side.engine.pinned
    assert (await http.get(version)).json()["pinned"] is True
    assert (await http.post(f"{version}/unpin")).json()["pinned"] is False
    assert digest not in side.engine.pinned
    side.engine.pinned.clear()
    await Upkeep(side.services).renew_pins()
    assert side.engine.pinned == set()
    assert (await http.post(f"/adapters/{adapter.id}/versions/9/pin")).status_code == 404
