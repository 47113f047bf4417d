from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

import httpx
import pytest
from sqlalchemy import insert
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.records import Adapter, UploadFile
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.admin.serving.app import ADMIN_DOCUMENT, create_admin_app
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import adapter_versions
from loramux.platform.accounts.model_names import ModelNotFound, ModelResolver
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.ledger.query import GROUPS
from loramux.platform.ledger.rollups import UsageRollups
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.requests.openapi import operations
from tests.admin.added_batches import add_batch
from tests.admin.admin_side import ADMIN_KEY, TARGET, AdminSide, open_admin_side
from tests.admin.app_client import CONSOLE_HOST
from tests.admin.console.signed_in_browser import Browser, Stream
from tests.admin.finished_evals import add_finished_eval

pytestmark = pytest.mark.anyio
BASE = "/admin/v1"
FAR_US = 4_000_000_000_000_000
AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")
Names = Mapping[str, str]


class World:
    """A tenant with a key for the adapters `support` and `gift`, but not `payroll`. Another tenant granted `gift`.

    Each adapter has versions, an upload, jobs, limits, prices, and running and settled requests. A third tenant has the
    same kinds of objects. `hidden` contains all values that the limited key must not be able to read.
    """

    def __init__(self, side: AdminSide) -> None:
        self.side, self.services = side, side.services
        self.hidden: set[str] = {"payroll", "ledgers", "initech"}
        self._admission = Admission(self.services.database)
        self._prompt = itertools.count(41_001, 1_009)
        tenants, keys, registry = (
            self.services.accounts.tenants,
            self.services.accounts.api_keys,
            self.services.adapters.registry,
        )
        self.tenant, owner, stranger = (tenants.create(slug) for slug in ("acme", "globex", "initech"))
        self.support = registry.create_adapter(self.tenant.id, "support")
        self.payroll = registry.create_adapter(self.tenant.id, "payroll")
        self.gift = registry.create_adapter(owner.id, "gift")
        foreign = registry.create_adapter(stranger.id, "ledgers")
        AdapterGrants(self.services.database).add(self.gift, self.tenant.id)
        self.scopes = ["adapters", "base", "tenant:develop"]
        made = keys.create(self.tenant.id, "limited", self.scopes, adapters=["support", "globex/gift"])
        self.key_id, self.secret = made.key.id, made.secret
        another = keys.create(self.tenant.id, "robot-of-payroll").key.id
        theirs = keys.create(stranger.id, "robot-of-ledgers").key.id
        self.hidden |= {another, theirs, stranger.id, "robot-of-payroll", "robot-of-ledgers"}
        self.own = self._furnish(self.support, self.tenant.id, self.key_id, is_hidden=False)
        self._furnish(self.gift, self.tenant.id, self.key_id, is_hidden=False)
        self.others = [
            self._furnish(self.payroll, self.tenant.id, another, is_hidden=True),
            self._furnish(foreign, stranger.id, theirs, is_hidden=True),
        ]
        for subject_id in (self.tenant.id, "platform"):
            limit = self.services.usage.quotas.set(subject_id, "tokens_per_day", next(self._prompt) * 1000)
            self.hidden |= {limit.id, str(limit.limit)}
        # The limited key does not cover the base model.
        self._use(self.tenant.id, another, "the-base", None, is_hidden=True)

    def _furnish(self, adapter: Adapter, payer_id: str, key_id: str, *, is_hidden: bool) -> Names:
        """Add objects of every kind to an adapter and return their identifiers by route parameter."""
        files = (UploadFile(CONFIG_FILE, 10, "0" * 64), UploadFile(TENSORS_FILE, 10, "1" * 64))
        upload, used = (self.services.adapters.ingest.create_upload(adapter.id, files) for _ in range(2))
        ready = self._version(adapter, 1, state="ready", upload_id=used.id, max_rank=2, num_pages=1)
        job = self._version(adapter, 2, state="validating", claimed_by=new_id("srv"), claim_expires_us=FAR_US)
        failed = self._version(adapter, 3, state="rejected")
        AdapterAliases(self.services.database).set(adapter.id, "default", {1: 100})
        AdapterAliases(self.services.database).set(adapter.id, "canary", {1: 100})
        of_adapter, of_key = (
            self.services.usage.quotas.set(subject_id, "requests_per_minute", next(self._prompt))
            for subject_id in (adapter.id, key_id)
        )
        price = self.services.usage.prices.add(
            tenant_id=payer_id, scope=adapter.id, prompt_nanos=1, cached_nanos=None, completion_nanos=2
        )
        listed = self.services.usage.prices.add(
            tenant_id=None, scope=adapter.id, prompt_nanos=3, cached_nanos=None, completion_nanos=4
        )
        self.side.engine.resident[ready["digest"]] = 1
        eval_id = add_finished_eval(self.services.database, adapter.id, 1, passed=2)
        batch_id = add_batch(self.services.database, payer_id, key_id)
        webhook, _ = self.services.events.webhooks.create(
            adapter.tenant_id, f"https://{adapter.name}.example.com/hook", None
        )
        self.hidden |= {webhook.id, webhook.url}
        model = f"{adapter.tenant_slug}/{adapter.name}@1"
        for _ in range(2):
            self._use(payer_id, key_id, model, ready["id"], is_hidden=is_hidden)
        running = self._begin(payer_id, key_id, model, ready["id"], 5)
        if is_hidden:
            self.hidden |= {
                adapter.id,
                upload.id,
                used.id,
                of_adapter.id,
                of_key.id,
                price.id,
                listed.id,
                running,
                eval_id,
                batch_id,
            }
            self.hidden |= {value for version in (ready, job, failed) for value in (version["id"], version["digest"])}
            self.hidden |= {version["id"].replace("adv_", "job_") for version in (ready, job, failed)}
        return {
            "adapter_id": adapter.id,
            "number": "1",
            "name": "canary",
            "tenant": adapter.tenant_slug,
            "id_or_slug": adapter.tenant_slug,
            "upload_id": upload.id,
            "base_id": "b" * 64,
            "key_id": key_id,
            "quota_id": of_adapter.id,
            "metric": "tokens_per_day",
            "price_id": price.id,
            "eval_id": eval_id,
            "batch_id": batch_id,
            "webhook_id": webhook.id,
            "job_id": job["id"].replace("adv_", "job_"),
            "request_id": running,
            "verb": "archive",
        }

    def _version(self, adapter: Adapter, number: int, **values: Any) -> dict[str, Any]:
        digest = f"{adapter.name}{number}".encode().hex().ljust(64, "f")
        values = {"upload_id": new_id("upl"), "report": {}, "created_us": 1, **values}
        values |= {"id": new_id("adv"), "adapter_id": adapter.id, "number": number, "digest": digest}
        with self.services.database.write() as connection:
            connection.execute(insert(adapter_versions).values(**values))
        return values

    def _use(self, tenant_id: str, key_id: str, model: str, version_id: str | None, *, is_hidden: bool) -> None:
        prompt = next(self._prompt)
        request_id = self._begin(tenant_id, key_id, model, version_id, prompt)
        settlement = Settlement(status="completed", prompt_tokens=prompt, completion_tokens=3, cached_tokens=2)
        self._admission.settle(request_id, settlement)
        if is_hidden:
            self.hidden |= {request_id, str(prompt)}

    def _begin(self, tenant_id: str, key_id: str, model: str, version_id: str | None, prompt: int) -> str:
        request_id = new_id("req")
        self._admission.reserve(
            ReservationRequest(
                request_id=request_id,
                tenant_id=tenant_id,
                api_key_id=key_id,
                model=model,
                adapter_version_id=version_id,
                endpoint="completions",
                prompt_tokens=prompt,
                reserved_tokens=prompt + 3,
                end_user=f"user-of-{model.partition('/')[2].partition('@')[0] or 'base'}",
            )
        )
        return request_id

    def leaks(self, text: str) -> list[str]:
        """Return the hidden values that a text contains, including numbers with thousands separators."""
        words = {word for word in self.hidden if not word.isdecimal()}
        numbers = {shown for word in self.hidden if word.isdecimal() for shown in (word, f"{int(word):,}")}
        found = [word for word in words if word in text]
        # Ignore matches inside identifiers, which can contain the digits by chance.
        return found + [n for n in numbers if re.search(rf"(?<![0-9a-f,.]){re.escape(n)}(?![0-9a-f])", text)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_admin_side(tmp_path_factory.mktemp("limited"), TARGET) as side:
        yield World(side)


@pytest.fixture(scope="module")
def app(world: World) -> ASGIApp:
    return create_admin_app(world.services)


def client(app: ASGIApp, key: str, base_url: str = f"http://admin{BASE}") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url=base_url, headers={"authorization": f"Bearer {key}"})


@pytest.fixture
async def limited(app: ASGIApp, world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with client(app, world.secret) as made:
        yield made


# How each route responds to the limited key. Add every new route to one of these sets.

NARROWED = {
    "GET /adapters",
    "GET /api_keys",
    "GET /batches",
    "GET /costs",
    "GET /events/recent",
    "GET /jobs",
    "GET /models",
    "GET /prices",
    "GET /quotas",
    "GET /quotas/effective",
    "GET /requests",
    "GET /residency",
    "GET /usage",
    "GET /usage/events",
    "GET /usage/events/export",
    "GET /webhooks",
}
"""Lists that are filtered to the key's adapters and their objects."""

ONE_OF_ITS = {
    "DELETE /adapters/{adapter_id}/uploads/{upload_id}",
    "GET /adapters/{adapter_id}",
    "GET /adapters/{adapter_id}/aliases",
    "GET /adapters/{adapter_id}/aliases/{name}",
    "GET /adapters/{adapter_id}/aliases/{name}/history",
    "GET /adapters/{adapter_id}/evals",
    "GET /adapters/{adapter_id}/grants",
    "GET /adapters/{adapter_id}/uploads",
    "GET /adapters/{adapter_id}/versions",
    "GET /adapters/{adapter_id}/versions/{number}",
    "GET /adapters/{adapter_id}/versions/{number}/report",
    "GET /api_keys/{key_id}",
    "GET /batches/{batch_id}",
    "GET /evals/{eval_id}",
    "GET /evals/{eval_id}/answers",
    "GET /jobs/{job_id}",
    "GET /prices/{price_id}",
    "GET /quotas/{quota_id}",
    "GET /requests/{request_id}",
    "POST /adapters/{adapter_id}/aliases/{name}/rollback",
    "POST /adapters/{adapter_id}/uploads",
    "POST /adapters/{adapter_id}/versions/{number}/evals",
    "POST /adapters/{adapter_id}/versions/{number}/preload",
    "POST /evals/{eval_id}/cancel",
    "PUT /adapters/{adapter_id}/aliases/{name}",
}
"""Routes that find only objects of the key's adapters. Any other object gets a 404."""

ONE_THAT_IS_NOT_THERE = {
    # No files were uploaded, so none are stored.
    "GET /adapters/{adapter_id}/versions/{number}/files/{name}",
    "POST /adapters/{adapter_id}/versions",
    "PUT /adapters/{adapter_id}/push",
    "PUT /adapters/{adapter_id}/uploads/{upload_id}/files/{name}",
}
"""Like `ONE_OF_ITS`, but the call also fails for objects of the key's adapters, because they have no content."""

OF_THE_TENANT = {"GET /server/structure", "GET /server/vocabulary", "GET /tenants", "GET /tenants/{id_or_slug}"}
"""Routes that return the tenant's names, limits and states, or the base's, but nothing about its adapters."""

PUBLIC = {
    "GET /health",
    "GET /health/live",
    "GET /health/ready",
    "GET /ping",
    "GET /metrics",
    "GET /openapi.json",
}
"""Routes outside `/admin/v1`. The metrics name no adapter."""

STREAMED = {"GET /events"}
"""Streams that end after minutes. `adapters/test_events.py` tests what they show."""

SCRAPED = {"GET /metrics/routing"}
"""Routes that name every adapter in the engine. They need a scrape token or a call from the server's machine."""

NEVER_THERE = {"GET /webhooks/{webhook_id}"}
"""Routes of objects that concern all of the tenant's adapters, so that a limited key never finds them."""

REFUSED = {
    "DELETE /adapters/{adapter_id}",
    "DELETE /adapters/{adapter_id}/aliases/{name}",
    "DELETE /adapters/{adapter_id}/grants/{tenant}",
    "DELETE /api_keys/{key_id}",
    "DELETE /bases/{base_id}",
    "DELETE /prices/{price_id}",
    "DELETE /quotas/{quota_id}",
    "DELETE /tenants/{id_or_slug}",
    "DELETE /webhooks/{webhook_id}",
    "GET /audit_log",
    "GET /bases",
    "GET /bases/{base_id}",
    "GET /bases/{base_id}/rejected",
    "GET /engine",
    "GET /replicas",
    "GET /server",
    "GET /server/findings",
    "PATCH /api_keys/{key_id}",
    "PATCH /quotas/{quota_id}",
    "PATCH /tenants/{id_or_slug}",
    "POST /adapters",
    "POST /adapters/{adapter_id}/disable",
    "POST /adapters/{adapter_id}/enable",
    "POST /adapters/{adapter_id}/purge",
    "POST /adapters/{adapter_id}/versions/{number}/archive",
    "POST /adapters/{adapter_id}/versions/{number}/pin",
    "POST /adapters/{adapter_id}/versions/{number}/purge",
    "POST /adapters/{adapter_id}/versions/{number}/quarantine",
    "POST /adapters/{adapter_id}/versions/{number}/restore",
    "POST /adapters/{adapter_id}/versions/{number}/unpin",
    "POST /api_keys",
    "POST /api_keys/{key_id}/rotate",
    "POST /bases/{base_id}/revalidate",
    "POST /batches/{batch_id}/cancel",
    "POST /prices",
    "POST /quotas",
    "POST /quotas/check",
    "POST /requests/{request_id}/cancel",
    "POST /tenants",
    "POST /tenants/{id_or_slug}/purge",
    "POST /webhooks",
    "POST /webhooks/{webhook_id}/test",
    "PUT /adapters/{adapter_id}/grants/{tenant}",
    "PUT /bases/weights",
    "PUT /quotas/tenants/{tenant}/{metric}",
}
"""Routes that return 403 whether or not the object exists."""

KINDS = (NARROWED, ONE_OF_ITS, ONE_THAT_IS_NOT_THERE, OF_THE_TENANT, PUBLIC, STREAMED, SCRAPED, NEVER_THERE, REFUSED)

BODIES: Mapping[str, Mapping[str, Any]] = {
    "PUT /adapters/{adapter_id}/aliases/{name}": {"version": 1, "share_base_cache": 16},
    "POST /adapters/{adapter_id}/uploads": {
        "files": [{"name": name, "size": 10, "sha256": "2" * 64} for name in (CONFIG_FILE, TENSORS_FILE)]
    },
    "POST /adapters": {"tenant": "acme", "name": "payroll"},
    "POST /quotas/check": {"prompt_tokens": 1, "max_tokens": 1},
}
"""Bodies that replace documented examples, because the objects in those examples do not exist here."""


def calls(app: Any) -> Iterator[tuple[str, str, str, Any]]:
    """Yield each operation's name (as in `KINDS`), method, path, and example body."""
    for path, operation, method in operations(ADMIN_DOCUMENT.of(app)):
        name = f"{method.upper()} {path.removeprefix(BASE)}"
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
        yield name, method, path, BODIES.get(name, body)


def filled(path: str, names: Names) -> str:
    return re.sub(r"\{(\w+)(?::\w+)?\}", lambda found: names[found[1]], path)


def unknown(names: Names) -> Names:
    return {
        name: f"{value[:4]}{'0' * 32}" if re.fullmatch(r"[a-z]{3}_[0-9a-f]{32}", value) else value
        for name, value in names.items()
    }


def test_every_route_belongs_to_exactly_one_kind(app: ASGIApp) -> None:
    assert sorted(name for name, *_ in calls(app)) == sorted(itertools.chain(*KINDS))


async def test_routes_return_only_the_limited_keys_own_objects(app: ASGIApp, world: World) -> None:
    async with client(app, world.secret, "http://localhost") as limited:
        for name, method, path, body in calls(app):
            if name in SCRAPED | STREAMED:
                continue
            answer = await limited.request(method, filled(path, world.own), json=body, headers={"if-match": "*"})
            assert world.leaks(answer.text) == [], name
            assert world.leaks(str(answer.headers)) == [], name
            if name in REFUSED:
                assert answer.status_code == 403, (name, answer.text)
            elif name in ONE_THAT_IS_NOT_THERE | NEVER_THERE:
                assert answer.status_code in (400, 404, 409), (name, answer.text)
            else:
                assert answer.is_success, (name, answer.text)


async def test_other_adapters_objects_look_like_missing_objects(app: ASGIApp, world: World) -> None:
    async with client(app, world.secret, "http://admin") as limited:
        for name, method, path, body in calls(app):
            if name not in ONE_OF_ITS | ONE_THAT_IS_NOT_THERE | NEVER_THERE | REFUSED or "{" not in path:
                continue
            for others in world.others:
                theirs, nobodys = [
                    await limited.request(method, filled(path, names), json=body, headers={"if-match": "*"})
                    for names in (others, unknown(others))
                ]
                assert theirs.status_code == (403 if name in REFUSED else 404), (name, theirs.text)
                assert (theirs.status_code, theirs.content) == (nobodys.status_code, nobodys.content), name
                for one in (theirs, nobodys):
                    del one.headers["x-request-id"]
                assert theirs.headers == nobodys.headers, name


LISTS = [
    "/adapters?tenant=acme",
    "/adapters?tenant=acme&name=payroll",
    "/adapters?limit=1",
    "/api_keys?tenant=acme",
    "/costs?group_by=key,model",
    "/jobs?state=queued",
    "/jobs?state=succeeded",
    "/jobs?state=failed",
    "/events/recent?limit=1",
    "/events/recent?tenant=acme&limit=100",
    "/prices?tenant=acme&limit=100",
    "/quotas?tenant=acme&limit=100",
    "/quotas/effective?tenant=acme",
    "/residency?tier=host",
    "/residency?tier=disk&limit=1",
    "/residency?limit=1",
    "/requests?tenant=acme&limit=1",
    "/tenants?limit=100",
    "/usage?bucket=1h&group_by=endpoint",
    "/usage?top=1&group_by=model",
    "/usage?format=csv&group_by=key,version,model",
    "/usage/events?limit=1",
    "/usage/events/export?format=csv",
    *(f"/usage?group_by={group}" for group in GROUPS),
]


@pytest.mark.parametrize("path", LISTS)
async def test_filters_cannot_widen_a_list(limited: httpx.AsyncClient, world: World, path: str) -> None:
    answer = await limited.get(path)
    assert answer.status_code == 200, answer.text
    assert world.leaks(answer.text) == []
    address = httpx.URL(path)
    if address.path != "/tenants":
        theirs, nobodys = [
            await limited.get(address.copy_set_param("tenant", tenant)) for tenant in ("initech", "nobody")
        ]
        assert (theirs.status_code, theirs.json()["error"]["code"]) == (404, "tenant_not_found")
        assert theirs.content == nobodys.content


@pytest.mark.parametrize(
    ("theirs", "nobodys"),
    [
        ("adapter=payroll", "adapter=nothing"),
        ("tenant=initech&adapter=ledgers", "tenant=initech&adapter=nothing"),
        ("key=%(hidden)s", "key=key_00000000000000000000000000000000"),
    ],
)
async def test_effective_limits_of_other_objects_return_404(
    limited: httpx.AsyncClient, world: World, theirs: str, nobodys: str
) -> None:
    asked = [one % {"hidden": world.others[0]["key_id"]} for one in (theirs, nobodys)]
    answers = [await limited.get(f"/quotas/effective?{one}") for one in asked]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].content == answers[1].content


async def test_limited_key_sees_its_own_objects(limited: httpx.AsyncClient, world: World) -> None:
    own, gift = world.own, world.gift.id

    async def data(path: str) -> list[Any]:
        return list((await limited.get(path)).json()["data"])

    assert [one["id"] for one in await data("/api_keys")] == [world.key_id]
    assert [one["id"] for one in await data("/jobs")] == [own["job_id"]]
    assert own["request_id"] in {one["id"] for one in await data("/requests")}
    assert {one["model"] for one in await data("/usage/events")} == {"acme/support@1", "globex/gift@1"}
    assert {one["subject_id"] for one in await data("/quotas")} == {world.key_id, world.support.id}
    assert {one["scope"] for one in await data("/prices")} == {world.support.id, gift}
    effective = await data(f"/quotas/effective?key={world.key_id}&adapter=support")
    assert {one["subject_id"] for one in effective} == {world.key_id, world.support.id}
    # Only a granted adapter's owner may see where its weights are loaded.
    assert [one["versions"][0]["model"] for one in await data("/residency")] == ["acme/support@1"]


async def test_base_model_requests_are_not_in_the_keys_usage(limited: httpx.AsyncClient) -> None:
    rows = (await limited.get("/usage?group_by=adapter,model")).json()["data"][0]["results"]
    assert all(row["adapter"] for row in rows)
    assert {row["model"] for row in rows} == {"acme/support@1", "globex/gift@1"}


@pytest.mark.parametrize("is_folded", [False, True], ids=["single requests", "rolled up"])
async def test_usage_equals_the_sum_of_its_events(app: ASGIApp, world: World, is_folded: bool) -> None:
    if is_folded:
        UsageRollups(world.services.database).fold_all()
    # Ask for whole days, which are answered from the coarsest rollups.
    span = "start=0" if is_folded else ""
    async with client(app, world.secret) as limited, client(app, ADMIN_KEY) as operator:
        events = (await limited.get("/usage/events?limit=100")).json()["data"]
        assert len(events) == 4
        expected = {name: sum(event[name] for event in events) for name in AMOUNTS[1:]} | {"requests": len(events)}
        for groups in ("", *GROUPS, "key,model,status"):
            if "end_user" in groups and span:
                continue
            for path in (f"/usage?{span}&group_by={groups}", f"/usage?{span}&group_by={groups}&top=1"):
                page = (await limited.get(path)).json()
                (bucket,) = page["data"]
                sums = page.get("total") or {name: sum(row[name] for row in bucket["results"]) for name in AMOUNTS}
                assert {name: sums[name] for name in AMOUNTS} == expected, path
        # The operator's report has the same sums for these adapters.
        (bucket,) = (await operator.get(f"/usage?{span}&tenant=acme&group_by=adapter")).json()["data"]
        of_its = [row for row in bucket["results"] if row["adapter"] in (world.support.id, world.gift.id)]
        assert {name: sum(row[name] for row in of_its) for name in AMOUNTS} == expected
        costs = (await limited.get(f"/costs?{span}&group_by=")).json()["data"][0]["results"]
        assert sum(row["amount_nanos"] for row in costs) == expected["cost_nanos"]


async def test_other_adapters_with_equal_weights_are_not_named(app: ASGIApp, world: World) -> None:
    """Versions of several adapters can share a digest. Residency lists only versions of the key's adapters."""
    digest = b"support1".hex().ljust(64, "f")
    values = {"id": new_id("adv"), "adapter_id": world.payroll.id, "number": 9, "digest": digest, "state": "ready"}
    with world.services.database.write() as connection:
        connection.execute(insert(adapter_versions).values(**values, upload_id=new_id("upl"), report={}, created_us=1))
    async with client(app, world.secret) as limited:
        (held,) = (await limited.get("/residency")).json()["data"]
    assert [one["model"] for one in held["versions"]] == ["acme/support@1"]


def test_models_listed_are_the_keys_own(world: World) -> None:
    principal = world.services.accounts.api_keys.authenticate(world.secret)
    assert principal is not None
    resolver = ModelResolver(world.services.adapters.registry, "the-base")
    names = [model.name for model in resolver.list_models(principal)]
    assert sorted(names) == ["acme/support@1", "globex/gift@1", "the-base"]
    for name in ("payroll", "acme/payroll@1", "acme/payroll:default", "initech/ledgers"):
        with pytest.raises(ModelNotFound):
            resolver.resolve(principal, name)


def pages(app: Any, method: str) -> Iterable[str]:
    console = next(route.app for route in app.routes if isinstance(route, Mount))
    assert isinstance(console, Starlette)
    return [route.path for route in console.routes if isinstance(route, Route) and method in (route.methods or ())]


QUERIES = ("", "?tenant=acme", "?tenant=initech", "?name=payroll&tenant=acme", "?state=failed", "?tier=disk")
QUERIES += ("?days=30&group_by=key", "?days=7&group_by=model&tenant=acme")


@pytest.fixture
async def signed_in(app: ASGIApp, world: World) -> AsyncIterator[Browser]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=CONSOLE_HOST) as made:
        browser = Browser(made)
        await browser.sign_in(world.secret)
        yield browser


async def test_console_pages_leak_nothing_to_a_limited_key(app: ASGIApp, world: World, signed_in: Browser) -> None:
    num_shown = 0
    for path in pages(app, "GET"):
        if path.startswith("/live/"):
            continue
        for query in QUERIES if "{" not in path else ("", "?tenant=initech"):
            answer = await signed_in.client.get(f"/console{filled(path, world.own)}{query}")
            assert answer.status_code in (200, 303, 400, 403, 404), (path, query)
            # The filter form repeats the values in the query.
            asked = {value for value in ("initech", "payroll") if value in query}
            assert set(world.leaks(answer.text)) <= asked, (path, query)
            num_shown += answer.status_code == 200
    assert num_shown > 60


async def test_pages_of_hidden_objects_look_like_missing_pages(app: ASGIApp, world: World, signed_in: Browser) -> None:
    num_hidden = 0
    for path in pages(app, "GET"):
        if "{" not in path:
            continue
        for others in world.others:
            texts = []
            for names in (others, unknown(others)):
                answer = await signed_in.client.get(f"/console{filled(path, names)}")
                text = answer.text
                for name, value in names.items():
                    text = text.replace(value, f"the {name}") if "_" in value else text
                texts.append((answer.status_code, text))
                num_hidden += answer.status_code == 404
            assert texts[0] == texts[1], path
    assert num_hidden > 20


async def test_console_forms_leak_nothing_to_a_limited_key(app: ASGIApp, world: World, signed_in: Browser) -> None:
    page = await signed_in.get("/")
    token = re.search(r'name="csrf-token" content="([^"]+)"', page.text)
    assert token
    form = {"csrf": token[1], "tenant": "acme", "version": "1", "metric": "tokens_per_day", "limit": "9"}
    for path in pages(app, "POST"):
        if path in ("/login", "/logout"):
            continue
        for others in world.others:
            sent = {**form, "adapter_id": others["adapter_id"], "name": "payroll"}
            answer = await signed_in.client.post(
                f"/console{filled(path, others)}",
                data=sent,
                headers={"x-csrf-token": token[1], "referer": f"{CONSOLE_HOST}/console/jobs"},
            )
            assert answer.status_code in (303, 400, 401, 403, 404, 415, 422, 503), (path, answer.text)
            shown = answer
            if answer.status_code == 303:
                shown = await signed_in.client.get(answer.headers["location"])
            assert world.leaks(shown.text) == [], path


LIVE = ["/live/batches", "/live/events", "/live/overview", "/live/requests", "/live/residency"]


@pytest.mark.parametrize("path", LIVE)
async def test_live_parts_leak_nothing_to_a_limited_key(
    app: ASGIApp, world: World, signed_in: Browser, path: str
) -> None:
    assert {one for one in pages(app, "GET") if one.startswith("/live/")} == {*LIVE}
    async with Stream(app, signed_in.client, f"/console{path}") as stream:
        assert world.leaks(await stream.until("event: ")) == []
