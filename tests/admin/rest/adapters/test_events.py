"""Events as a stream: who sees which, and how a reader continues after a break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema
import pytest

from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.admin.client.followed_events import NumberedReader
from loramux.admin.rest.adapters import events
from loramux.admin.rest.services import MAX_EVENT_STREAMS_EACH
from loramux.admin.serving.app import create_admin_app
from loramux.platform.events.event_log import EventLog
from tests.admin.admin_side import ADMIN_KEY, AdminSide
from tests.admin.rest.adapters.ready_versions import add_ready_versions
from tests.admin.rest.tenants_and_keys import bearer, new_key, new_tenant

pytestmark = pytest.mark.anyio
Told = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """End streams once they have caught up, because the tests' client reads whole responses."""
    monkeypatch.setattr(events, "LIFETIME_S", 0.05)
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.01)


async def move(side: AdminSide, http: httpx.AsyncClient, slug: str, name: str) -> str:
    """Add an adapter, and move its default alias."""
    adapter = (await http.post("/admin/v1/adapters", json={"tenant": slug, "name": name})).json()["id"]
    add_ready_versions(side.services.database, adapter, 2)
    return str(adapter)


async def told(http: httpx.AsyncClient, path: str = "", after: int | None = None, key: str = ADMIN_KEY) -> Told:
    headers = bearer(key) | ({} if after is None else {"last-event-id": str(after)})
    response = await http.get(f"/admin/v1/events{path}", headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [document for _, document in NumberedReader().feed(response.content) if document is not None]


async def test_tenants_key_follows_only_its_own_events(http: httpx.AsyncClient, admin_side: AdminSide) -> None:
    for slug in ("acme", "globex"):
        await new_tenant(http, slug)
    keys = {slug: (await new_key(http, slug, "tenant:read"))["secret"] for slug in ("acme", "globex")}
    for slug, name in (("acme", "support"), ("globex", "secret"), ("acme", "sales")):
        await move(admin_side, http, slug, name)
    mine = await told(http, after=0, key=keys["acme"])
    assert [(one["sequence"], one["model"]) for one in mine] == [(1, "acme/support"), (2, "acme/sales")]
    assert mine[0]["data"] == {"alias": "default", "action": "set", "revision": 1, "targets": {"1": 100}}
    assert [one["model"] for one in await told(http, after=0, key=keys["globex"])] == ["globex/secret"]
    # For the operator, numbers run over all tenants, unless one is named.
    whole = await told(http, after=0)
    assert [(one["sequence"], one["tenant"]) for one in whole] == [(1, "acme"), (2, "globex"), (3, "acme")]
    assert [one["sequence"] for one in await told(http, "?tenant=acme", after=1)] == [2]
    for path in ("?tenant=globex", "?tenant=nobody"):
        answer = await http.get(f"/admin/v1/events{path}", headers=bearer(keys["acme"]))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "tenant_not_found")


async def test_each_event_is_as_the_openapi_document_describes_it(
    http: httpx.AsyncClient, admin_side: AdminSide
) -> None:
    await new_tenant(http, "acme")
    await move(admin_side, http, "acme", "support")
    response = await http.get("/admin/v1/events", headers=bearer(ADMIN_KEY) | {"last-event-id": "0"})
    document = (await http.get("/openapi.json", headers=bearer(ADMIN_KEY))).json()
    described = document["paths"]["/admin/v1/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]
    sent = [part for part in response.text.split("\n\n") if "data:" in part]
    assert len(sent) == 1
    for event in sent:
        fields = dict(line.split(": ", 1) for line in event.splitlines() if not line.startswith(":"))
        jsonschema.validate(fields, described["schema"])
        assert fields.keys() == described["schema"]["properties"].keys()


async def test_limited_key_follows_only_its_adapters(http: httpx.AsyncClient, admin_side: AdminSide) -> None:
    await new_tenant(http, "acme")
    support, payroll = [await move(admin_side, http, "acme", name) for name in ("support", "payroll")]
    body = {"tenant": "acme", "scopes": ["tenant:develop"], "adapters": [support]}
    key = (await http.post("/admin/v1/api_keys", json=body)).json()["secret"]
    assert [one["model"] for one in await told(http, after=0, key=key)] == ["acme/support"]
    assert [one["model"] for one in await told(http, f"?adapter={support}", after=0, key=key)] == ["acme/support"]
    answer = await http.get(f"/admin/v1/events?adapter={payroll}", headers=bearer(key))
    assert answer.json()["error"]["code"] == "adapter_not_found"


async def test_list_goes_from_the_newest_event_to_older_ones(http: httpx.AsyncClient, admin_side: AdminSide) -> None:
    for slug in ("acme", "globex"):
        await new_tenant(http, slug)
    adapters = [await move(admin_side, http, "acme", name) for name in ("support", "sales")]
    await move(admin_side, http, "globex", "secret")
    key = (await new_key(http, "acme", "tenant:read"))["secret"]

    async def listed(query: str, key: str = ADMIN_KEY) -> dict[str, Any]:
        answer = await http.get(f"/admin/v1/events/recent{query}", headers=bearer(key))
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    whole = await listed("")
    assert [(one["sequence"], one["model"]) for one in whole["data"]] == [
        (3, "globex/secret"),
        (2, "acme/sales"),
        (1, "acme/support"),
    ]
    first = await listed("?limit=1", key)
    assert ([one["model"] for one in first["data"]], first["has_more"]) == (["acme/sales"], True)
    older = await listed(f"?limit=1&after={first['last_id']}", key)
    assert ([one["sequence"] for one in older["data"]], older["has_more"]) == ([1], False)
    assert older["data"] == (await listed(f"?adapter={adapters[0]}", key))["data"]
    assert (await listed("?types=version.ready"))["data"] == []
    body = {"tenant": "acme", "scopes": ["tenant:develop"], "adapters": [adapters[0]]}
    limited = (await http.post("/admin/v1/api_keys", json=body)).json()["secret"]
    assert [one["model"] for one in (await listed("", limited))["data"]] == ["acme/support"]


async def test_reader_continues_where_it_left_off(http: httpx.AsyncClient, admin_side: AdminSide) -> None:
    await new_tenant(http, "acme")
    adapter = await move(admin_side, http, "acme", "support")
    response = await http.get("/admin/v1/events")
    numbers = [number for number, _ in NumberedReader().feed(response.content)]
    # Without a number, a stream begins with the next event, and says where that is.
    assert set(numbers) == {1}
    AdapterAliases(admin_side.services.database).set(adapter, "default", {2: 100})
    AdapterAliases(admin_side.services.database).set(adapter, "canary", {1: 90, 2: 10})
    continued = await told(http, after=numbers[0])
    assert [one["data"]["targets"] for one in continued] == [{"2": 100}, {"1": 90, "2": 10}]
    assert [one["sequence"] for one in await told(http, after=2)] == [3]
    assert await told(http, "?types=version.ready,budget.threshold", after=0) == []
    # A number from a database that has since been restored.
    assert await told(http, after=10**17) == []


async def test_reader_learns_that_events_have_expired(http: httpx.AsyncClient, admin_side: AdminSide) -> None:
    await new_tenant(http, "acme")
    await move(admin_side, http, "acme", "support")
    assert len(await told(http, after=0)) == 1
    EventLog(admin_side.services.database).sweep(kept_days=0)
    (gap,) = await told(http, after=0)
    assert gap == {"object": "event", "type": "events.expired", "after": 0}
    assert await told(http, after=1) == []


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("", "-1"),
        ("", "1e3"),
        ("", "9" * 19),
        ("", "evt_1"),
        ("?types=alias.moved,x", None),
        ("?types=", None),
        ("?adapter=x", None),
        ("?tenant=" + "a" * 65, None),
        ("/recent?types=alias.moved,x", None),
        ("/recent?after=x", None),
        ("/recent?limit=0", None),
    ],
)
async def test_hostile_calls_are_refused(http: httpx.AsyncClient, path: str, number: str | None) -> None:
    headers = {} if number is None else {"last-event-id": number}
    answer = await http.get(f"/admin/v1/events{path}", headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


async def test_event_arrives_while_the_reader_waits(
    admin_side: AdminSide, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LIFETIME_S", 60.0)
    monkeypatch.setattr(events, "HEARTBEAT_S", 60.0)
    await new_tenant(http, "acme")
    async with open_stream(admin_side) as lines:
        assert await anext(lines) == {"number": 0}
        await move(admin_side, http, "acme", "support")
        found = await anext(lines)
    assert found["model"] == "acme/support"


async def test_streams_of_a_tenant_are_limited(
    admin_side: AdminSide, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loramux.admin.server.transfer_slots.WAIT_S", 0.01)
    slots = admin_side.services.slots.event_streams
    await new_tenant(http, "acme")
    key = (await new_key(http, "acme", "tenant:read"))["secret"]
    tenant_id = (await http.get("/admin/v1/tenants/acme")).json()["id"]
    held = [await slots.acquire_slot(tenant_id, rests=False) for _ in range(MAX_EVENT_STREAMS_EACH)]
    answer = await http.get("/admin/v1/events", headers=bearer(key))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_event_streams")
    held.pop()()
    assert await told(http, after=0, key=key) == []
    for release in held:
        release()
    assert slots.num_taken == 0


@asynccontextmanager
async def open_stream(side: AdminSide) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Call the route as a server does, and yield what its stream sends, as it is sent."""
    app, sent, is_gone = create_admin_app(side.services), asyncio.Queue[dict[str, Any]](), asyncio.Event()
    headers = [(b"authorization", f"Bearer {ADMIN_KEY}".encode()), (b"host", b"admin"), (b"last-event-id", b"0")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/admin/v1/events",
        "raw_path": b"/admin/v1/events",
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("admin", 80),
    }

    async def receive() -> dict[str, Any]:
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            for number, document in NumberedReader().feed(message["body"]):
                if document is not None or number is not None:
                    sent.put_nowait(document or {"number": number})

    async def documents() -> AsyncIterator[dict[str, Any]]:
        while True:
            async with asyncio.timeout(30):
                yield await sent.get()

    task = asyncio.create_task(app(scope, receive, send))
    try:
        yield documents()
    finally:
        is_gone.set()
        async with asyncio.timeout(30):
            await task
    assert side.services.slots.event_streams.num_taken == 0
