from __future__ import annotations

import httpx
import pytest

from tests.admin.rest.tenants_and_keys import bearer, new_key, new_tenant
from tests.platform.events.target import listening_target

pytestmark = pytest.mark.anyio
URL = "https://hooks.example.com/x"
PATH = "/admin/v1/webhooks"


async def test_webhook_is_created_listed_tested_and_deleted(http: httpx.AsyncClient) -> None:
    await new_tenant(http, "acme")
    key = bearer((await new_key(http, "acme", "tenant:admin"))["secret"])
    with listening_target() as target:
        body = {"url": target.url, "types": ["alias.moved"]}
        made = (await http.post(PATH, json=body, headers=key)).json()
        assert made["secret"].startswith("whsec_")
        assert (made["tenant"], made["state"], made["types"]) == ("acme", "active", ["alias.moved"])
        place = f"{PATH}/{made.pop('id')}"
        assert "secret" not in (await http.get(place, headers=key)).json()
        tested = (await http.post(f"{place}/test", headers=key)).json()
        assert (tested["delivered"], tested["status"], tested["error"]) == (True, 204, None)
        assert target.documents[0]["type"] == "webhook.test"
        assert target.documents[0]["id"] == tested["event_id"]
        target.status = 500
        failed = (await http.post(f"{place}/test", headers=key)).json()
        assert (failed["delivered"], failed["error"]) == (False, "the target answered with 500")
    assert len((await http.get(PATH, headers=key)).json()["data"]) == 1
    assert (await http.delete(place, headers=key)).json()["deleted"] is True
    assert (await http.delete(place, headers=key)).json()["error"]["code"] == "webhook_not_found"
    assert (await http.get(PATH, headers=key)).json()["data"] == []


async def test_repeated_call_does_not_repeat_the_secret(http: httpx.AsyncClient) -> None:
    await new_tenant(http, "acme")
    headers = {"idempotency-key": "once"}
    made = [(await http.post(PATH, json={"url": URL, "tenant": "acme"}, headers=headers)).json() for _ in range(2)]
    assert made[0]["id"] == made[1]["id"]
    assert (made[0]["secret"] is None, made[1]["secret"]) == (False, None)


@pytest.mark.parametrize(
    "body",
    [
        *({}, {"url": URL, "tenant": "acme", "types": []}, {"url": URL, "tenant": "acme", "types": ["x"]}),
        *({"url": "ftp://x", "tenant": "acme"}, {"url": URL}, {"url": 1, "tenant": "acme"}),
        {"url": "https://xn--a/", "tenant": "acme"},
        {"url": URL, "tenant": "acme", "secret": "whsec_mine"},
    ],
    ids=str,
)
async def test_hostile_bodies_are_refused(http: httpx.AsyncClient, body: object) -> None:
    await new_tenant(http, "acme")
    answer = await http.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


async def test_readers_cannot_create_and_strangers_see_nothing(http: httpx.AsyncClient) -> None:
    for slug in ("acme", "globex"):
        await new_tenant(http, slug)
    webhook = (await http.post(PATH, json={"url": URL, "tenant": "globex"})).json()["id"]
    reader = bearer((await new_key(http, "acme", "tenant:read"))["secret"])
    writer = bearer((await new_key(http, "acme", "tenant:admin"))["secret"])
    assert (await http.post(PATH, json={"url": URL}, headers=reader)).status_code == 403
    assert (await http.get(PATH, headers=reader)).json()["data"] == []
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/test")):
        answer = await http.request(method, f"{PATH}/{webhook}{path}", headers=writer)
        assert answer.json()["error"]["code"] == "webhook_not_found", method
    answer = await http.post(PATH, json={"url": URL, "tenant": "globex"}, headers=writer)
    assert answer.json()["error"]["code"] == "tenant_not_found"
