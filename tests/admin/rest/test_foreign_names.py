"""Requests for another tenant's object and for an unused name run the same SQL and get the same response.

Counting statements is enough: a client could only measure an extra round trip or transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from sqlalchemy import event

from loramux.migrations.identifiers import new_id
from tests.admin.added_batches import add_batch
from tests.admin.admin_side import AdminSide
from tests.admin.metered_requests import begin_request
from tests.admin.rest.adapters.ready_versions import add_ready_versions
from tests.admin.rest.tenants_and_keys import bearer, new_key, new_tenant

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Stock:
    foreign: dict[str, str]
    unknown: dict[str, str]
    own: str
    """Identifier of one of acme's adapters."""
    headers: dict[str, str]


@pytest.fixture
async def stock(http: httpx.AsyncClient, admin_side: AdminSide) -> Stock:
    made = {slug: await new_tenant(http, slug) for slug in ("acme", "globex")}
    own, secret = [
        (await http.post("/admin/v1/adapters", json={"tenant": slug, "name": name})).json()["id"]
        for slug, name in (("acme", "support"), ("globex", "secret"))
    ]
    add_ready_versions(admin_side.services.database, secret, 1)
    key = await new_key(http, "globex")
    quota = (await http.post("/admin/v1/quotas", json={"tenant": "globex", "metric": "adapters", "limit": 9})).json()
    foreign = {
        "slug": "globex",
        "tenant": made["globex"],
        "adapter": secret,
        "model": "globex/secret",
        "key": key["id"],
        "quota": quota["id"],
        "batch": add_batch(admin_side.services.database, made["globex"], key["id"]),
        "webhook": (
            await http.post("/admin/v1/webhooks", json={"tenant": "globex", "url": "https://hooks.example.com"})
        ).json()["id"],
        "request": begin_request(admin_side, made["globex"], key["id"], "globex/secret@1", 1),
    }
    unknown = {kind: new_id(value[:3]) for kind, value in foreign.items()}
    unknown.update(slug="nobody", model="nobody/secret")
    owner = bearer((await new_key(http, "acme", "tenant:admin"))["secret"])
    return Stock(foreign, unknown, own, owner)


@contextmanager
def statements_of(side: AdminSide) -> Iterator[list[str]]:
    """Record the SQL statements, commits and rollbacks of all threads during the block."""
    seen: list[str] = []
    engine = side.services.database._engine
    heard = {
        "before_cursor_execute": lambda connection, cursor, statement, *rest: seen.append(statement),
        "rollback": lambda connection: seen.append("ROLLBACK"),
        "commit": lambda connection: seen.append("COMMIT"),
    }
    for name, listener in heard.items():
        event.listen(engine, name, listener)
    try:
        yield seen
    finally:
        for name, listener in heard.items():
            event.remove(engine, name, listener)


CALLS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("DELETE", "/adapters/{own}/grants/{slug}", None),
    ("DELETE", "/adapters/{own}/grants/{tenant}", None),
    ("GET", "/tenants/{slug}", None),
    ("GET", "/adapters?tenant={slug}", None),
    ("GET", "/adapters/{adapter}", None),
    ("POST", "/adapters/{adapter}/disable", None),
    ("GET", "/adapters/{adapter}/grants", None),
    ("GET", "/adapters/{adapter}/aliases/default", None),
    ("GET", "/adapters/{adapter}/versions/1", None),
    ("PUT", "/adapters/{adapter}/push", None),
    ("GET", "/api_keys/{key}", None),
    ("DELETE", "/api_keys/{key}", None),
    ("POST", "/api_keys", {"tenant": "acme", "adapters": ["{model}"]}),
    ("POST", "/api_keys", {"tenant": "acme", "adapters": ["{adapter}"]}),
    ("GET", "/quotas/{quota}", None),
    ("GET", "/quotas?tenant={slug}", None),
    ("GET", "/quotas/effective?tenant={tenant}", None),
    ("GET", "/quotas/effective?key={key}", None),
    ("GET", "/quotas/effective?adapter={adapter}", None),
    ("POST", "/quotas/check", {"adapter": "{adapter}", "prompt_tokens": 1, "max_tokens": 1}),
    ("GET", "/batches/{batch}", None),
    ("POST", "/batches/{batch}/cancel", None),
    ("GET", "/requests/{request}", None),
    ("POST", "/requests/{request}/cancel", None),
    ("GET", "/audit_log?tenant={slug}", None),
    ("GET", "/events?tenant={slug}", None),
    ("GET", "/events?adapter={adapter}", None),
    ("GET", "/events/recent?tenant={slug}", None),
    ("GET", "/events/recent?adapter={adapter}", None),
    ("GET", "/webhooks?tenant={slug}", None),
    ("GET", "/webhooks/{webhook}", None),
    ("DELETE", "/webhooks/{webhook}", None),
    ("POST", "/webhooks/{webhook}/test", None),
    ("POST", "/webhooks", {"tenant": "{slug}", "url": "https://hooks.example.com"}),
    ("GET", "/prices?tenant={slug}", None),
    ("GET", "/usage/events?tenant={slug}", None),
]


async def test_foreign_and_unused_names_are_indistinguishable(
    http: httpx.AsyncClient, admin_side: AdminSide, stock: Stock
) -> None:
    def filled(template: Any, names: dict[str, str]) -> Any:
        if isinstance(template, dict):
            return {name: filled(value, names) for name, value in template.items()}
        if isinstance(template, list):
            return [filled(value, names) for value in template]
        return template.format(own=stock.own, **names) if isinstance(template, str) else template

    async def ask(method: str, path: str, body: Any, names: dict[str, str]) -> tuple[int, str, list[str]]:
        with statements_of(admin_side) as seen:
            response = await http.request(
                method, f"/admin/v1{filled(path, names)}", json=filled(body, names), headers=stock.headers
            )
        text = response.text.replace(response.headers["x-request-id"], "")
        for kind, name in names.items():
            text = text.replace(name, f"<{kind}>")
        return response.status_code, text, seen

    for method, path, body in CALLS:
        # Fill the caches, so that both measured calls hit them.
        await ask(method, path, body, stock.unknown)
        foreign, unknown = [await ask(method, path, body, names) for names in (stock.foreign, stock.unknown)]
        assert foreign[0] == 404, (method, path, foreign)
        assert foreign == unknown, (method, path)


async def test_grant_is_removed_by_slug_or_identifier(
    http: httpx.AsyncClient, stock: Stock, admin_side: AdminSide
) -> None:
    grants = f"/admin/v1/adapters/{stock.own}/grants"
    for name in ("globex", stock.foreign["tenant"]):
        assert (await http.put(f"{grants}/globex")).status_code == 200
        assert (await http.delete(f"{grants}/{name}", headers=stock.headers)).status_code == 204
        assert (await http.get(grants)).json()["data"] == []
    # If one tenant's slug equals another tenant's identifier, the identifier takes precedence.
    double = await new_tenant(http, stock.foreign["tenant"])
    for granted in (stock.foreign["tenant"], double):
        assert (await http.put(f"{grants}/{granted}")).status_code == 200
    assert (await http.delete(f"{grants}/{stock.foreign['tenant']}", headers=stock.headers)).status_code == 204
    assert [one["tenant_id"] for one in (await http.get(grants)).json()["data"]] == [double]
