"""The console's pages, tested without a browser."""

from __future__ import annotations

import hashlib
import html
import html.parser
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import anyio
import msgspec
import pytest
from sqlalchemy import delete, insert, update
from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loramux.adapter_store.registry.base_servers import OwnServer
from loramux.adapter_store.registry.records import CanaryRule
from loramux.admin.console.app import create_console
from loramux.admin.console.rest_calls import RestError
from loramux.admin.serving.app import create_admin_app
from loramux.engine.protocol.messages import DiskPageCounts, HostPageCounts
from loramux.migrations import schema
from loramux.migrations.events import EventType, note_event
from loramux.migrations.schema import adapter_versions, base_servers, version_bases, webhooks
from loramux.platform.replicas.data_parallel import DataParallelEngines
from tests.admin.added_batches import add_batch
from tests.admin.admin_side import ADMIN_KEY, MODEL_SOURCE, AdminSide
from tests.admin.app_client import client_of
from tests.admin.console.signed_in_browser import Browser, Stream, first_match
from tests.admin.finished_evals import add_finished_eval
from tests.admin.fleet import PEER, SILENT, ScriptedFleet
from tests.admin.metered_requests import begin_request, settle_request
from tests.admin.rest.adapters.ready_versions import add_ready_versions
from tests.platform.ready_adapters import add_ready_adapter
from tests.platform.replicas.lab import ChosenRouter
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio
HOSTILE = "'\"></code></td></script><x-nasty><b nasty=1 onnasty=1>{{7*7}}&lt;\x00\x1b[2J\u202e\u200b\r\n"


PAGES = ["/", "/adapters", "/residency", "/residency?tier=disk", "/requests", "/playground", "/tenants", "/quotas"]
PAGES += ["/bases", "/keys", "/usage", "/usage?days=30&group_by=endpoint", "/jobs", "/jobs?state=failed"]
PAGES += ["/audit", "/health", "/batches", "/events", "/events?type=alias.moved"]


@pytest.mark.parametrize("path", PAGES)
async def test_empty_page_says_what_to_do(operator: Browser, path: str) -> None:
    page = (await operator.get(path)).text
    assert "<h1>" in page
    assert "Undefined" not in page


async def test_health_page_names_the_source_of_the_model(operator: Browser) -> None:
    assert f"the-base, pulled as {MODEL_SOURCE}" in (await operator.get("/health")).text


@pytest.mark.parametrize(
    ("status", "code", "shown"),
    [
        pytest.param(429, "too_many_reports", "Database reachable", id="busy"),
        pytest.param(503, "read_timeout", "Database reachable", id="slow"),
        pytest.param(503, "quota_unavailable", "Database unreachable", id="down"),
    ],
)
async def test_overview_says_when_the_database_is_down(
    console_side: AdminSide, monkeypatch: pytest.MonkeyPatch, status: int, code: str, shown: str
) -> None:
    async def refuse(*_: Any) -> Any:
        raise RestError(status, {"message": "no report", "code": code})

    monkeypatch.setattr("loramux.admin.console.pages.overview._minutes", refuse)
    async with client_of(create_admin_app(console_side.services)) as client:
        operator = Browser(client)
        await operator.sign_in(ADMIN_KEY)
        page = (await operator.get("/")).text
    assert "Usage cannot be shown:</strong> no report" in page
    assert shown in page


async def test_overview_counts_requests_refused_with_either_status(operator: Browser, console_side: AdminSide) -> None:
    console_side.services.metrics.quotas.refusals.labels("tokens_per_minute", "hard").inc(3)
    page = (await operator.get("/")).text
    figure = r'Refused by quotas</span><span class="value">3</span><span class="sub">with 429 or 400, since'
    assert re.search(figure, page)


@pytest.mark.parametrize(
    "path",
    [
        "/adapters/ada_" + "0" * 32,
        "/adapters/x",
        "/adapters/x/versions/1",
        "/adapters/x/evals",
        "/adapters/x/evals/evl_" + "0" * 32,
        "/tenants/nobody",
        "/nothing",
        "/keys?tenant=no",
        "/bases?base=" + "0" * 64,
        "/bases/" + "0" * 64 + "/forget",
    ],
)
async def test_missing_object_gets_a_not_found_page(operator: Browser, path: str) -> None:
    page = (await operator.get(path, 404)).text
    assert "Not found" in page
    assert "Go to the overview" in page


@pytest.mark.parametrize(
    "path",
    [
        "/adapters?tenant=" + "x" * 300,
        "/adapters?after=%00",
        "/usage?days=-1&group_by=%3Cb%3E&tenant=%00",
        "/residency?tier=%F0%9F%92%A9",
        "/jobs?state=none",
        "/audit?action=%00%0a",
        "/events?tenant=%00&adapter=%3Cb%3E%2F%00&type=%3Cb%3E&after=%00",
        "/adapters/%00",
        "/adapters/x/versions/99999999999999999999",
        "/adapters/x/evals/%00?after_line=-1",
        "/tenants/%E2%80%AE",
        "/bases?base=%00",
        "/bases/%00/revalidate",
        "/bases/weights?base=%00&weight_%00=1",
    ],
)
async def test_bad_input_never_causes_a_server_error(operator: Browser, path: str) -> None:
    response = await operator.client.get(f"/console{path}")
    assert response.status_code < 500, response.text[-300:]
    assert "<b>" not in response.text.replace("<body", "")


PLAIN = {"object", "metric", "unit", "mode", "scope", "scopes", "updated_at", "tier", "kind", "next_page", "etag"}
"""Fields that only the server sets. Pages compare them with known values."""
NAMED = ("aliases", "changes", "modules")
"""Fields that are objects with user-chosen keys."""


class HostileRest:
    """The REST routes, with hostile markup appended to every string in their responses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def spoilt(message: Message) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                message = {**message, "body": msgspec.json.encode(_spoilt(msgspec.json.decode(message["body"])))}
            await send(message)

        # Remove the markup from requests, because pages send names from earlier responses.
        asked = scope["query_string"].replace(quote_plus(HOSTILE).encode(), b"")
        await self._app({**scope, "path": scope["path"].replace(HOSTILE, ""), "query_string": asked}, receive, spoilt)


def _spoilt(value: Any, name: str = "") -> Any:
    if isinstance(value, str) and name not in PLAIN:
        return value + HOSTILE
    if isinstance(value, list):
        return [_spoilt(one, name) for one in value]
    if isinstance(value, dict):
        return {key + HOSTILE if name in NAMED else key: _spoilt(one, key) for key, one in value.items()}
    return value


class Nasty(html.parser.HTMLParser):
    """Finds elements and attributes that only an unescaped name can create."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag] if tag == "x-nasty" else [f"{tag} {name}" for name, _ in attrs if "nasty" in name]


async def test_a_key_is_shown_once(operator: Browser) -> None:
    await operator.post("/tenants", slug="once")
    said = await operator.post(
        "/keys", tenant="once", name="first", scope=["adapters"], days="2", referer="/keys?tenant=once"
    )
    secret = first_match(r"(sk-lmx-[0-9A-Za-z]{16}-[0-9A-Za-z]{43})", said)
    page = (await operator.get("/keys?tenant=once")).text
    assert secret not in page
    key_id = first_match(r"/console/keys/(key_[0-9a-f]{32})/revoke", page)
    assert "is revoked" in await operator.confirm(f"/keys/{key_id}/revoke")


async def test_tenant_page_changes_how_long_responses_are_stored(operator: Browser) -> None:
    await operator.post("/tenants", slug="storing")
    page = (await operator.get("/tenants/storing")).text
    assert "not stored" in page
    [etag] = re.findall(r'name="etag" value="([^"]+)"', page)
    await operator.post("/tenants/storing", etag=html.unescape(etag), response_days="30", referer="/tenants/storing")
    assert "30 days" in (await operator.get("/tenants/storing")).text


async def test_overview_shows_the_goodput(operator: Browser, console_side: AdminSide) -> None:
    assert "Goodput" not in (await operator.get("/")).text
    metrics = console_side.services.metrics.generation
    metrics.first_tokens.labels("default", "in_time").inc(6)
    metrics.first_tokens.labels("default", "late").inc()
    metrics.overload_refusals.labels("flex", "503").inc(3)
    page = (await operator.get("/")).text
    assert '60 %</span><span class="sub">first tokens in time; 1 late, 3 refused' in page


async def test_pages_change_service_tiers(operator: Browser) -> None:
    await operator.post("/tenants", slug="tiered")
    page = (await operator.get("/tenants/tiered")).text
    assert "default at best" in page
    [etag] = re.findall(r'name="etag" value="([^"]+)"', page)
    tiers = {"max_service_tier": "priority", "default_service_tier": "flex"}
    await operator.post("/tenants/tiered", etag=html.unescape(etag), referer="/tenants/tiered", **tiers)
    assert "priority at best" in (await operator.get("/tenants/tiered")).text
    referer = "/keys?tenant=tiered"
    fields = {"tenant": "tiered", "name": "own", "scope": ["adapters"], "max_service_tier": "default"}
    await operator.post("/keys", **fields, referer=referer)
    page = (await operator.get(referer)).text
    assert "service tier default at best" in page
    assert "by default</span>" not in page


async def test_second_editor_of_a_quota_is_warned(operator: Browser) -> None:
    await operator.post("/tenants", slug="edited")
    await operator.post("/quotas", tenant="edited", metric="tokens_per_minute", limit="1,000", referer="/quotas")
    page = (await operator.get("/quotas?tenant=edited")).text
    fields = {name: first_match(f'name="{name}" value="([^"]*)"', page) for name in ("quota_id", "seen")}
    change = {"tenant": "edited", "metric": "tokens_per_minute", "referer": "/quotas?tenant=edited", **fields}
    assert "is now 2,000" in await operator.post("/quotas", **change, limit="2000")
    said = await operator.post("/quotas", **change, limit="3000")
    assert "2,000" in said
    assert "was not saved" in said
    assert ">2,000<" in (await operator.get("/quotas?tenant=edited")).text


async def test_console_reads_and_shows_money_in_the_currency(operator: Browser) -> None:
    await operator.post("/tenants", slug="priced")
    fields = {"tenant": "priced", "metric": "cost_per_month", "referer": "/quotas"}
    assert "is now 0.005" in await operator.post("/quotas", **fields, limit="0.005")
    # A decimal comma must not become a thousands separator.
    assert 'class="notice error"' in await operator.post("/quotas", **fields, limit="1,5")
    page = (await operator.get("/quotas?tenant=priced")).text
    assert ">0.005<" in page
    assert "0.00 of 0.005" in page
    checked = await operator.client.post(
        "/console/quotas/preview",
        data={"tenant": "priced", "metric": "cost_per_month", "limit": "7", "csrf": operator.csrf},
        headers={"referer": "http://admin.example/console/quotas"},
    )
    assert ">7.00<" in checked.text
    assert "7000000000" not in checked.text.replace(",", "")
    audit = (await operator.get("/audit?action=quota.set")).text
    assert "<dt>limit</dt>" in audit
    assert "0.005" in audit


@pytest.mark.parametrize("limit", ["", "many", "-1", "1e9", "9" * 30])
async def test_non_numeric_limit_is_refused(operator: Browser, limit: str) -> None:
    said = await operator.post("/quotas", tenant="nobody", metric="tokens_per_minute", limit=limit, referer="/quotas")
    assert 'class="notice error"' in said


async def test_optional_files_of_a_version_are_shown(operator: Browser, make_adapter: Callable[..., Path]) -> None:
    await operator.post("/tenants", slug="templater")
    await operator.post("/adapters", tenant="templater", name="own")
    listed = (await operator.get("/adapters?tenant=templater")).text
    here = f"/adapters/{first_match(r'/console/adapters/(ada_[0-9a-f]{32})', listed)}"
    directory = make_adapter(config={"task_type": "CAUSAL_LM", "alora_invocation_tokens": [5, 6]})
    template = "{{ messages }}"
    (directory / "chat_template.jinja").write_text(template)
    (directory / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3}')
    (directory / "parsers.json").write_text('{"tool_call_parser": "hermes", "reasoning_parser": "off"}')
    await _upload(operator, here, directory)
    shown = await _until_ready(operator, f"{here}/versions/1")
    assert "<dt>Parsers</dt><dd>tool calls hermes, reasoning off</dd>" in shown
    assert "temperature 0.5, top_k 3</dd>" in shown
    assert "<dt>Activated by tokens</dt><dd><code>5 6</code></dd>" in shown
    assert "Digest of the weights" in shown
    assert hashlib.sha256(template.encode()).hexdigest() in shown
    page = (await operator.get(here)).text
    assert ">template</span>" in page
    assert 'title="Tokens 5 6">activated</span>' in page
    assert 'title="tool calls hermes, reasoning off">parsers</span>' in page
    assert 'title="temperature 0.5, top_k 3">settings</span>' in page


async def test_what_a_version_is_for_is_shown(
    operator: Browser, console_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    await operator.post("/tenants", slug="searcher")
    await operator.post("/adapters", tenant="searcher", name="vectors")
    listed = (await operator.get("/adapters?tenant=searcher")).text
    here = f"/adapters/{first_match(r'/console/adapters/(ada_[0-9a-f]{32})', listed)}"
    await _upload(operator, here, make_adapter(config={"task_type": "FEATURE_EXTRACTION"}))
    assert "<dt>Made for</dt><dd>embedding</dd>" in await _until_ready(operator, f"{here}/versions/1")
    assert ">embedding</span>" in (await operator.get(here)).text
    task = {"kind": "classification", "labels": ["<b>", "\"'&"], "activation": "softmax"}
    with console_side.services.database.write() as connection:
        connection.execute(update(adapter_versions).values(task=task))
    for path in (here, f"{here}/versions/1"):
        page = (await operator.get(path)).text
        assert "classification" in page
        assert "<b>" not in page
        assert "&lt;b&gt;, &#34;&#39;&amp;" in page


async def test_adapter_page_shows_how_clients_call_the_adapter(operator: Browser) -> None:
    await operator.post("/tenants", slug="clients")
    await operator.post("/adapters", tenant="clients", name="called")
    listed = (await operator.get("/adapters?tenant=clients")).text
    page = (await operator.get(first_match(r"/console(/adapters/ada_[0-9a-f]{32})", listed))).text
    shown = html.unescape(page)
    assert 'client.chat.completions.create(\n    model="clients/called"' in shown
    assert "export ANTHROPIC_MODEL=clients/called" in shown
    assert 'model = "clients/called"\nmodel_provider = "loramux"' in shown


async def test_trained_parts_of_a_version_are_shown(operator: Browser, make_adapter: Callable[..., Path]) -> None:
    await operator.post("/tenants", slug="tokens")
    await operator.post("/adapters", tenant="tokens", name="own")
    listed = (await operator.get("/adapters?tenant=tokens")).text
    here = f"/adapters/{first_match(r'/console/adapters/(ada_[0-9a-f]{32})', listed)}"
    await _upload(operator, here, make_adapter(tokens=(5, 6, 60), has_norms=True))
    shown = await _until_ready(operator, f"{here}/versions/1")
    assert '<span class="tag">trainable_token_indices</span>' in shown
    assert "Trained rows: <code>model.embed_tokens</code> 3" in shown
    assert "Trained vectors: <code>input_layernorm.weight</code> 2" in shown


async def test_running_canary_stays_until_its_bounds_are_removed(operator: Browser, console_side: AdminSide) -> None:
    services = console_side.services
    tenant = services.accounts.tenants.create("watching")
    adapter = services.adapters.registry.create_adapter(tenant.id, "voice")
    add_ready_versions(services.database, adapter.id, 2)
    aliases = services.adapters.aliases
    aliases.set(adapter.id, "default", {1: 90, 2: 10}, canary=CanaryRule(max_error_rate=0.02, min_requests=50))
    form = f"/adapters/{adapter.id}/move?alias=default"
    page = (await operator.get(form)).text
    shown = dict(re.findall(r'name="(max_error_percent|max_first_token_s|min_requests)".*? value="([^"]*)"', page))
    assert shown == {"max_error_percent": "2", "max_first_token_s": "", "min_requests": "50"}
    chosen = f"{form}&version=1&version=2&weight_1=90&weight_2=10"
    same = f"{chosen}&max_error_percent=2&max_first_token_s=&min_requests=50"
    assert "already points there" in (await operator.get(same)).text
    await operator.confirm(f"{chosen}&max_error_percent=5&max_first_token_s=2.5&min_requests=50")
    changed = aliases.get(adapter.id, "default")
    assert changed.canary == CanaryRule(max_error_rate=0.05, max_first_token_s=2.5, min_requests=50, versions=(2,))
    undone = (await operator.get(f"/adapters/{adapter.id}/aliases/default/rollback")).text
    assert 'Roll back to <span class="nowrap">v1</span></button>' in undone, "the revision before has the same versions"
    ended = f"{chosen}&max_error_percent=&max_first_token_s=&min_requests=50"
    assert "No longer watched" in (await operator.get(ended)).text
    await operator.confirm(ended)
    assert aliases.get(adapter.id, "default").canary is None
    assert "already points there" in (await operator.get(f"{chosen}&max_error_percent=5")).text


async def test_moving_away_from_a_canary_ends_it(operator: Browser, console_side: AdminSide) -> None:
    services = console_side.services
    tenant = services.accounts.tenants.create("leaving")
    adapter = services.adapters.registry.create_adapter(tenant.id, "voice")
    add_ready_versions(services.database, adapter.id, 2)
    aliases, rule = services.adapters.aliases, CanaryRule(max_error_rate=0.02)
    aliases.set(adapter.id, "default", {1: 90, 2: 10}, canary=rule)
    form = f"/adapters/{adapter.id}/move?alias=default"
    bounds = f"&max_error_percent=2&max_first_token_s=&min_requests={rule.min_requests}"
    more = (await operator.get(f"{form}&version=1&version=2&weight_1=50&weight_2=50{bounds}")).text
    assert "Rolls back on its own if" in more
    other = (await operator.get(f"{form}&version=1&weight_1=100&max_error_percent=3")).text
    assert "Rolls back on its own if" in other, "these bounds are not those of the form"
    away = f"{form}&version=1&weight_1=100{bounds}"
    assert "No longer watched" in (await operator.get(away)).text
    await operator.confirm(away)
    assert aliases.get(adapter.id, "default").canary is None


async def test_adapter_is_uploaded_promoted_and_rolled_back(
    operator: Browser, console_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    await operator.post("/tenants", slug="maker")
    await operator.post("/adapters", tenant="maker", name="voice")
    listed = (await operator.get("/adapters?tenant=maker")).text
    adapter_id = first_match(r"/console/adapters/(ada_[0-9a-f]{32})", listed)
    here = f"/adapters/{adapter_id}"
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:8000 " in (await operator.get(here)).text
    for number in (1, 2):
        await _upload(operator, here, make_adapter(rank=number))
        assert "passed" in await _until_ready(operator, f"{here}/versions/{number}")
    chosen = f"{here}/move?alias=default&version=2&version=1&weight_1=90&weight_2=10"
    assert "v1" in (await operator.get(f"{here}/move?alias=default")).text
    assert "above 0" in (await operator.get(f"{here}/move?alias=default&version=1")).text
    assert "already points there" in (await operator.get(f"{here}/move?alias=default&version=1&weight_1=7")).text
    page = (await operator.get(chosen)).text
    assert "version 1</strong>" in page
    assert "version 1 (90 %) and version 2 (10 %)</strong>" in page
    said = await operator.confirm(chosen)
    assert "version 1 (90 %) and version 2 (10 %)" in said
    assert f'<a href="/console{here}/aliases/default/rollback">Undo' in said
    assert "someone has moved" in await operator.post(
        f"{here}/aliases", alias="default", version="1", weight_1="1", revision="1", referer=here
    )
    page = (await operator.get(f"{here}/aliases/default/rollback")).text
    assert "v1 90 %" in re.sub(r"<[^>]+>", "", page)
    fields = {name: first_match(f'name="{name}" value="([^"]*)"', page) for name in ("seen", "revision")}
    assert "points to version 1 again" in await operator.post(f"{here}/aliases/default/rollback", **fields)
    assert "someone has moved" in await operator.post(f"{here}/aliases/default/rollback", **fields)
    assert "beta now points to version 2" in await operator.confirm(f"{here}/move?alias=beta&version=2&weight_2=1")
    assert "beta still points here" in (await operator.get(f"{here}/versions/2/archive")).text
    said = await operator.confirm(f"{here}/aliases/beta/delete")
    again = html.unescape(first_match(r'<a href="/console([^"]+)">Undo', said))
    assert "beta now points to version 2" in await operator.confirm(again)
    page = (await operator.get(f"{here}/aliases/beta/delete")).text
    seen = first_match('name="seen" value="([^"]*)"', page)
    assert "beta now points" in await operator.confirm(f"{here}/move?alias=beta&version=1&weight_1=1")
    assert "someone has moved" in await operator.post(f"{here}/aliases/beta/delete", seen=seen, referer=here)
    await operator.confirm(f"{here}/aliases/beta/delete")
    assert "is out of service" in await operator.confirm(f"{here}/versions/2/archive")
    assert "is back in service" in await operator.confirm(f"{here}/versions/2/restore")
    assert "even if aliases point at it" in await operator.confirm(f"{here}/versions/2/quarantine")
    await operator.post("/tenants", slug="guest")
    assert "may call this adapter" in await operator.post(f"{here}/grants", tenant="guest", referer=here)
    assert ">guest</th>" in (await operator.get(here)).text
    assert "may no longer call" in await operator.confirm(f"{here}/grants/remove?tenant=guest")
    assert "serves no new requests" in await operator.confirm(f"{here}/state")
    assert "serves requests again" in await operator.confirm(f"{here}/state")


async def test_destructive_actions_ask_for_confirmation(operator: Browser, console_side: AdminSide) -> None:
    services = console_side.services
    tenant = services.accounts.tenants.create("asked")
    key = services.accounts.api_keys.create(tenant.id, "caller")
    services.usage.quotas.set(tenant.id, "cost_per_day", 1_250_000_000)
    empty = services.adapters.registry.create_adapter(tenant.id, "empty")
    running = begin_request(console_side, tenant.id, key.key.id, "the-base", 5)
    assert "0 tokens so far" in (await operator.get(f"/requests/{running}/cancel")).text
    assert "is being cancelled" in await operator.confirm(f"/requests/{running}/cancel")
    page = (await operator.get("/quotas?tenant=asked")).text
    quota = first_match(r"/console(/quotas/qta_[0-9a-f]{32}/delete)", page)
    assert "At most 1.25" in (await operator.get(quota)).text
    said = await operator.confirm(quota)
    assert "/quotas?tenant=asked" not in said
    again = html.unescape(first_match(r'<a href="/console([^"]+)">Undo', said))
    said = await operator.confirm(again)
    assert "is now 1.25" in said
    assert "Set the limit again" not in said
    assert "1 request" in (await operator.get("/tenants/asked/state")).text
    said = await operator.confirm("/tenants/asked/state")
    assert '<a href="/console/tenants/asked/state">Undo' in said
    assert services.accounts.api_keys.authenticate(key.secret) is None
    assert "Changed asked" in await operator.confirm("/tenants/asked/state")
    secret = first_match(
        r"(sk-lmx-[0-9A-Za-z]{16}-[0-9A-Za-z]{43})", await operator.confirm(f"/keys/{key.key.id}/rotate", grace_s="0")
    )
    assert services.accounts.api_keys.authenticate(key.secret) is None
    assert services.accounts.api_keys.authenticate(secret) is not None
    assert "asked/empty is deleted" in await operator.confirm(f"/adapters/{empty.id}/delete")
    services.accounts.tenants.create("mistaken")
    assert "Delete…" in (await operator.get("/tenants/mistaken")).text
    assert "mistaken is deleted" in await operator.confirm("/tenants/mistaken/delete")
    assert "has already ended" in await _followed(operator, f"/requests/req_{'0' * 32}/cancel")


async def test_batches_show_their_progress_and_are_cancelled(operator: Browser, console_side: AdminSide) -> None:
    services = console_side.services
    tenant = services.accounts.tenants.create("batching")
    key = services.accounts.api_keys.create(tenant.id, "caller").key
    batch_id = add_batch(services.database, tenant.id, key.id)
    failure = {"code": "invalid_json_line", "message": "no JSON", "param": None, "line": 7}
    changes: dict[str, Any] = {"state": "failed", "errors": [failure], "finished_us": 9, "num_lines": 0}
    ended = add_batch(services.database, tenant.id, key.id, **changes)
    page = (await operator.get("/batches?tenant=batching")).text
    assert re.search(r'<progress max="100" value="25.0"[^>]*></progress><span>3 of 12</span>', page)
    assert "line 7: <code>invalid_json_line</code>" in page
    assert f"/batches/{ended}/cancel" not in page
    asked = (await operator.get(first_match(rf"/console(/batches/{batch_id}/cancel)", page))).text
    assert "3 requests of batching&#39;s batch answered, 9 to run" in asked
    assert "is being cancelled" in await operator.confirm(f"/batches/{batch_id}/cancel")
    assert services.usage.batches.get(batch_id).state == "cancelling"  # type: ignore[union-attr]
    assert "already cancelling" in await _followed(operator, f"/batches/{batch_id}/cancel")
    assert "No batches yet" in (await operator.get(f"/batches?tenant=batching&after=bat_{'0' * 32}")).text


async def test_events_are_filtered_and_updated_beside_their_webhooks(
    operator: Browser, console_app: ASGIApp, console_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = console_side.services
    tenant, other = (services.accounts.tenants.create(slug) for slug in ("eventful", "uneventful"))
    support, sales = (services.adapters.registry.create_adapter(tenant.id, name) for name in ("support", "sales"))
    add_ready_versions(services.database, support.id, 1)
    _note(console_side, "adapter.loaded", {"version": 1, "server": "srv_1"}, tenant.id, sales.id)
    budget = {"metric": "tokens_per_day", "subject_id": other.id, "percent": 81, "limit": 1000}
    _note(console_side, "budget.threshold", budget, other.id, None)
    path = "/events?tenant=eventful"
    page = (await operator.get(path)).text
    assert re.findall(r'<span class="tag \w+">([a-z]+\.[a-z]+)</span>', page) == ["adapter.loaded", "alias.moved"]
    assert f'<a href="/console/adapters/{sales.id}/versions/1">eventful/sales@1</a>' in page
    assert "version 1 on srv_1" in page
    assert "default -&gt; version 1" in page
    for adapter in ("eventful/support", support.id):
        page = (await operator.get(f"/events?adapter={adapter}")).text
        assert ("eventful/support" in page, "eventful/sales" in page) == (True, False)
    page = (await operator.get("/events?type=budget.threshold")).text
    assert f"tokens_per_day of {other.id}: 81 % of 1000" in page
    assert "eventful/sales" not in page
    assert "there is no adapter eventful/none" in (await operator.get("/events?adapter=eventful/none")).text

    webhook, _ = services.events.webhooks.create(tenant.id, "https://hooks.example.com/in", ["alias.moved"])
    failing = update(webhooks).where(webhooks.c.id == webhook.id).values(num_failures=3, last_error="answered 500")
    with services.database.write() as connection:
        connection.execute(failing)
    page = (await operator.get(path)).text
    shown = r"hooks.example.com/in</code></th><td>eventful</td><td>alias.moved</td>.*failing.*>3</td>.*answered 500"
    assert re.search(shown, page)
    assert "No webhooks" in (await operator.get("/events?tenant=uneventful")).text

    monkeypatch.setattr("loramux.admin.console.pages.events.EVERY_S", 0.01)
    async with Stream(console_app, operator.client, "/console/live/events") as stream:
        await stream.until("eventful/sales@1")
        _note(console_side, "adapter.struck", {"version": 7, "server": "srv_1"}, tenant.id, sales.id)
        await stream.until("eventful/sales@7")


async def test_tenant_sees_only_its_own_events_and_webhooks(console_app: ASGIApp, console_side: AdminSide) -> None:
    services = console_side.services
    secret = ""
    for slug in ("unseen", "seeing"):
        tenant = services.accounts.tenants.create(slug)
        adapter = services.adapters.registry.create_adapter(tenant.id, "voice")
        _note(console_side, "adapter.loaded", {"version": 1, "server": "srv_1"}, tenant.id, adapter.id)
        services.events.webhooks.create(tenant.id, f"https://{slug}.example.com", None)
        secret = services.accounts.api_keys.create(tenant.id, "reader", ["tenant:read"]).secret
    async with client_of(console_app) as client:
        reader = Browser(client)
        await reader.sign_in(secret)
        for path in ("/events", "/events?adapter=voice"):
            page = (await reader.get(path)).text
            assert "seeing/voice@1" in page
            assert "https://seeing.example.com" in page
            assert "unseen" not in page
        page = (await reader.get("/events?tenant=unseen")).text
        assert "there is no such tenant" in page
        assert "unseen/voice" not in page


def _note(side: AdminSide, kind: EventType, data: dict[str, Any], tenant_id: str, adapter_id: str | None) -> None:
    database = side.services.database
    with database.write() as connection:
        note_event(connection, database.now_us(connection), kind, data, tenant_id=tenant_id, adapter_id=adapter_id)


async def _followed(operator: Browser, path: str) -> str:
    return (await operator.client.get((await operator.get(path, 303)).headers["location"])).text


async def test_markup_in_names_is_escaped_on_every_page(
    console_app: ASGIApp, console_side: AdminSide, make_adapter: Callable[..., Path], operator: Browser
) -> None:
    services = console_side.services
    tenant = services.accounts.tenants.create("marked", "Marked <b>")
    key = services.accounts.api_keys.create(tenant.id, "key of <b>")
    services.usage.quotas.set(tenant.id, "tokens_per_minute", 1000)
    settle_request(console_side, tenant.id, key.key.id, "the-base", 5, 5)
    running = begin_request(console_side, tenant.id, key.key.id, "the-base", 5)
    batch_id = add_batch(services.database, tenant.id, key.key.id)
    services.events.webhooks.create(tenant.id, "https://hooks.example.com/marked", None)
    adapter = f"/adapters/{await _voice(operator, make_adapter)}"
    spoilt = Starlette(routes=[Mount("/console", create_console(services, HostileRest(console_app)))])
    pages = [path for path in PAGES if path != "/playground"]
    pages += [adapter, f"{adapter}/versions/1", f"{adapter}/move", f"{adapter}/state", f"{adapter}/delete"]
    eval_id = add_finished_eval(services.database, adapter.split("/")[-1], 1, passed=2)
    pages += [f"{adapter}/evals", f"{adapter}/evals/{eval_id}"]
    pages += [f"{adapter}/versions/1/archive", f"{adapter}/aliases/default/rollback", "/playground?tenant=marked"]
    pages += [
        "/tenants/marked",
        "/tenants/maker",
        "/tenants/marked/state",
        "/quotas?tenant=marked",
        "/keys?tenant=marked",
    ]
    pages += [f"/keys/{key.key.id}/revoke", f"/requests/{running}/cancel", "/jobs?state=succeeded"]
    pages += [f"/batches/{batch_id}/cancel"]
    pages += [f"{adapter}/move?alias=new&version=1&weight_1=1", f"{adapter}/grants/remove?tenant=%3Cb%3E%00"]
    base = _rejecting_base(console_side, "e" * 64, "marked-too")
    pages += [f"/bases?base={base}", f"/bases/{base}/revalidate", f"/bases/{base}/forget", "/bases/weights"]
    num_shown = 0
    async with client_of(spoilt) as client:
        client.cookies = operator.client.cookies
        for path in pages:
            response = await client.get(f"/console{path}")
            assert response.status_code == 200, (path, response.text[-500:])
            found = Nasty()
            found.feed(response.text)
            assert found.found == [], path
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u200b]", response.text), path
            num_shown += "x-nasty" in response.text
    # Check that most pages show a name, because a page without one would prove nothing.
    assert num_shown >= len(pages) - 8


async def _voice(operator: Browser, make_adapter: Callable[..., Path]) -> str:
    """Return the path of an adapter with a version. Create them unless an earlier test did."""
    listed = r"/console/adapters/(ada_[0-9a-f]{32})"
    if (page := await operator.client.get("/console/adapters?tenant=maker")).status_code == 404:
        await operator.post("/tenants", slug="maker")
        await operator.post("/adapters", tenant="maker", name="voice")
        page = await operator.get("/adapters?tenant=maker")
        await _upload(operator, f"/adapters/{first_match(listed, page.text)}", make_adapter())
        await _until_ready(operator, f"/adapters/{first_match(listed, page.text)}/versions/1")
    return first_match(listed, page.text)


async def _upload(operator: Browser, here: str, directory: Path) -> None:
    names = (
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "generation_config.json",
        "parsers.json",
    )
    contents = {name: (directory / name).read_bytes() for name in names if (directory / name).exists()}
    declared = [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    ]
    made = await operator.send("POST", f"{here}/uploads", msgspec.json.encode({"files": declared}))
    assert made.status_code == 201, made.text
    for name, content in contents.items():
        sent = await operator.send(
            "PUT", f"{here}/uploads/{made.json()['id']}/files/{name}", content, "application/octet-stream"
        )
        assert sent.status_code == 204, sent.text
    version = await operator.send("POST", f"{here}/versions", msgspec.json.encode({"upload_id": made.json()["id"]}))
    assert version.status_code == 202, version.text


async def _until_ready(operator: Browser, path: str) -> str:
    for _ in range(400):
        page = (await operator.get(path)).text
        if ">ready</span>" in page:
            return page
        await anyio.sleep(0.05)
    raise AssertionError("the version is not ready")


async def test_viewer_sees_no_forms_and_tenant_sees_only_its_own_objects(
    console_app: ASGIApp, console_side: AdminSide
) -> None:
    services = console_side.services
    tenant, other = services.accounts.tenants.create("own"), services.accounts.tenants.create("foreign")
    services.adapters.registry.create_adapter(tenant.id, "mine")
    services.adapters.registry.create_adapter(other.id, "theirs")
    async with client_of(console_app) as client:
        viewer = Browser(client)
        await viewer.sign_in(services.accounts.api_keys.create(None, "viewer", ["platform:read"]).secret)
        for path in ("/adapters", "/keys", "/tenants", "/quotas", "/tenants/own"):
            page = (await viewer.get(path)).text
            assert set(re.findall(r'<form method="post" action="([^"]+)"', page)) <= {"/console/logout"}, path
        assert "this requires a key" in await viewer.post("/tenants", slug="sneaked", referer="/tenants")
    async with client_of(console_app) as client:
        admin = Browser(client)
        await admin.sign_in(services.accounts.api_keys.create(tenant.id, "admin", ["tenant:admin"]).secret)
        page = (await admin.get("/adapters")).text
        assert "own/mine" in page
        assert "theirs" not in page
        await admin.get("/tenants/foreign", 404)
        await admin.get("/keys?tenant=foreign", 404)
        assert "foreign" not in (await admin.get("/usage")).text


async def test_pages_report_engine_outage_and_recover(operator: Browser, console_side: AdminSide) -> None:
    console_side.engine.die()
    try:
        page = (await operator.get("/residency")).text
        assert "the engine does not answer" in page
        assert "retries automatically" in page
    finally:
        console_side.engine.revive()
    assert "The page pool" in (await operator.get("/residency")).text


async def test_residency_shows_evicted_prefixes_in_main_memory_and_on_disk(
    operator: Browser, console_side: AdminSide
) -> None:
    assert "Evicted prefixes" not in (await operator.get("/residency")).text
    console_side.engine.figures["host_pages"] = HostPageCounts(num_slots=9, num_pages=8)
    text = (await operator.get("/residency?tier=host")).text
    assert "Evicted prefixes in main memory: 8 of 9 pages, 32.0 KiB" in text
    assert "on disk" not in text
    console_side.engine.figures["disk_pages"] = DiskPageCounts(num_slots=70, num_pages=16)
    text = (await operator.get("/residency?tier=disk")).text
    assert "Evicted prefixes on disk: 16 of 70 pages, 64.0 KiB" in text


async def test_pages_report_database_outage_and_recover(
    operator: Browser, console_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any, **__: Any) -> Any:
        raise OperationalError("select", {}, Exception("down"))

    with monkeypatch.context() as broken:
        broken.setattr(type(console_side.services.database), "read", down)
        response = await operator.get("/adapters", 503)
        assert "the database cannot be reached" in response.text.lower()
        assert response.headers["refresh"]
    await operator.get("/adapters")


async def test_usage_is_downloaded_as_csv(operator: Browser) -> None:
    response = await operator.get("/usage.csv?group_by=tenant")
    assert response.headers["content-type"].startswith("text/csv")
    assert "completion_tokens" in response.text.splitlines()[0]
    assert response.headers["content-security-policy"]


async def test_live_part_reports_database_outage_and_ends_with_its_session(
    console_app: ASGIApp, console_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any, **__: Any) -> Any:
        raise OperationalError("select", {}, Exception("down"))

    key = console_side.services.accounts.api_keys.create(None, "watches")
    client = client_of(console_app)
    await Browser(client).sign_in(key.secret)
    monkeypatch.setattr("loramux.admin.console.pages.overview.EVERY_S", 0.01)
    async with Stream(console_app, client, "/console/live/overview") as stream:
        assert "event: figures" in await stream.until("Engine ready")
        console_side.engine.quantization = "int4"
        await stream.until("weights in int4")
        with monkeypatch.context() as broken:
            broken.setattr(type(console_side.services.database), "read", down)
            await stream.until("The database cannot be reached")
        await stream.until("Engine ready")
        console_side.services.accounts.api_keys.revoke(key.key.id)
        await stream.until("event: signed-out")
    await client.aclose()


async def test_pin_buttons_of_the_residency_can_be_told_apart(console_side: AdminSide, operator: Browser) -> None:
    services = console_side.services
    adapter = services.adapters.registry.create_adapter(services.accounts.tenants.create("pinned").id, "voice")
    add_ready_versions(services.database, adapter.id, 2)
    resident = console_side.engine.resident
    before = dict(resident)
    resident.update({"1" * 64: 1, "2" * 64: 1})
    page = (await operator.get("/residency")).text
    resident.clear()
    resident.update(before)
    ids = re.findall(r'<button id="(pin-[^"]+)">', page)
    assert {f"pin-{'1' * 64}", f"pin-{'2' * 64}"} <= set(ids)


async def test_residency_shows_every_server_and_the_chosen_ones_pool(console_side: AdminSide) -> None:
    peer = ScriptedEngine()
    peer.resident["cd" * 32] = 1
    services = console_side.services
    fleet = ScriptedFleet(console_side.engine, peer)
    services = replace(services, engine=replace(services.engine, fleet=fleet))
    async with client_of(create_admin_app(services)) as client:
        operator = Browser(client)
        await operator.sign_in(ADMIN_KEY)
        page = (await operator.get("/residency")).text
        assert "it serves another base" in page
        assert "cdcdcd" not in page
        assert "cdcdcd" in (await operator.get(f"/residency?replica={PEER}")).text
        assert "the engine does not answer" in (await operator.get(f"/residency?replica={SILENT}")).text
        # An unknown server in the query is ignored.
        assert "The page pool" in (await operator.get("/residency?replica=rep_nobody")).text


async def test_residency_shows_the_engines_of_a_server_with_several(console_side: AdminSide) -> None:
    second = ScriptedEngine()
    second.resident["cd" * 32] = 1
    dead = ScriptedEngine()
    dead.die()
    engines = {"engine-0": ScriptedEngine(), "engine-1": second, "engine-2": dead}
    several = DataParallelEngines(engines, ChosenRouter)
    await several.beat()
    services = console_side.services
    services = replace(services, engine=replace(services.engine, client=several.engine, fleet=several))
    async with client_of(create_admin_app(services)) as client:
        operator = Browser(client)
        await operator.sign_in(ADMIN_KEY)
        page = (await operator.get("/residency")).text
        assert "Engines <span" in page
        assert "that share requests" not in page
        assert "cdcdcd" in page, "the adapters of all engines are listed"
        assert "cdcdcd" not in (await operator.get("/residency?replica=engine-0")).text
        assert "cdcdcd" in (await operator.get("/residency?replica=engine-1")).text
        assert "killed by SIGKILL: last words" in page


async def test_bases_show_their_servers_and_rejected_versions(console_side: AdminSide, operator: Browser) -> None:
    base = _rejecting_base(console_side, "b" * 64, "narrow")
    page = (await operator.get(f"/bases?base={base}")).text
    assert "gpu-1:8000 <span" in page
    assert "too wide</td>" in page
    assert first_match(r"/console/adapters/ada_[0-9a-f]{32}/versions/1\">(narrow/old@1)", page)
    assert f"/console/bases/{base}/forget" not in page
    assert "1 version waits for validation" in await operator.confirm(f"/bases/{base}/revalidate")
    assert "No rejected versions" in (await operator.get(f"/bases?base={base}")).text
    assert "gpu-1:8000 serves the base" in await operator.confirm(f"/bases/{base}/forget")
    with console_side.services.database.write() as connection:
        connection.execute(update(base_servers).values(seen_us=base_servers.c.seen_us - 120_000_000))
    page = (await operator.get(f"/bases?base={base}")).text
    assert ">silent</span>" in page
    assert f"/console/bases/{base}/forget" in page
    assert "is forgotten" in await operator.confirm(f"/bases/{base}/forget")
    assert base not in (await operator.get("/bases")).text


async def test_weights_divide_requests_between_bases(console_side: AdminSide, operator: Browser) -> None:
    for base in "56":
        console_side.services.adapters.bases.register(base * 64, "divided", "f" * 64)
    assert "/console/bases/weights" in (await operator.get("/bases")).text
    five, six = "5" * 64, "6" * 64
    chosen = f"base={five}&base={six}&weight_{five}=90&weight_{six}=10"
    assert "(90 %) and divided" in (await operator.get(f"/bases/weights?{chosen}")).text
    assert "Requests are now served by divided" in await operator.confirm(f"/bases/weights?{chosen}")
    assert 'value="90"' in (await operator.get("/bases/weights")).text
    assert "at least two bases" in (await operator.get(f"/bases/weights?base={five}&weight_{five}=1")).text
    assert "must be a whole number" in (await operator.get(f"/bases/weights?base={five}&weight_{five}=x")).text
    none = f"base={five}&base={six}"
    assert "Remove weights" in (await operator.get(f"/bases/weights?{none}")).text
    assert "the base of the server" in await operator.confirm(f"/bases/weights?{none}")
    for base in "56":
        console_side.services.adapters.bases.forget(base * 64)


def _rejecting_base(side: AdminSide, base_id: str, slug: str) -> str:
    """Return a base with a server, and a rejected version of a new tenant."""
    services = side.services
    tenant = services.accounts.tenants.create(slug)
    adapter_id = add_ready_adapter(services.database, tenant.id, "old", [base_id])
    OwnServer(services.database, base_id, "llama", "gpu-1:8000").report(is_draining=False)
    version = services.adapters.registry.list_versions(adapter_id, 1).data[0]
    verdict = {"state": "rejected", "code": "base_mismatch", "message": "too wide", "checked_us": 1}
    with services.database.write() as connection:
        connection.execute(delete(version_bases).where(version_bases.c.version_id == version.id))
        connection.execute(insert(version_bases).values(version_id=version.id, base_id=base_id, **verdict))
    return base_id


class EchoGateway:
    """Stands in for the OpenAI API, and keeps the bodies that it receives."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append(msgspec.json.decode((await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def test_playground_suggests_models_and_sends_the_turns_before_a_question(console_side: AdminSide) -> None:
    gateway = EchoGateway()
    services = replace(console_side.services, gateway=gateway)
    tenant = services.accounts.tenants.create("player")
    adapter = services.adapters.registry.create_adapter(tenant.id, "voice")
    add_ready_versions(services.database, adapter.id, 2)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arr"}]
    asked = {"tenant": "player", "model": "player/voice@2", "message": "And now?", "system": "Be brief."}
    settings = {"max_tokens": 5, "temperature": 0}
    async with client_of(create_admin_app(services)) as client:
        browser = Browser(client)
        await browser.sign_in(ADMIN_KEY)
        page = (await browser.get("/playground?tenant=player")).text
        suggested = re.findall(r'<option value="([^"]+)"></option>', page)
        assert suggested == ["the-base", "player/voice", "player/voice@2", "player/voice@1"]
        assert 'value="player/voice"' in page, "the first lane asks an adapter"
        for history in ([], turns):
            body = msgspec.json.encode({**asked, **settings, "history": history})
            assert (await browser.send("POST", "/playground/stream", body)).status_code == 200
        for wrong in ([{"role": "system", "content": "x"}], [{"role": "user"}], turns * 101):
            body = msgspec.json.encode({**asked, **settings, "history": wrong})
            assert (await browser.send("POST", "/playground/stream", body)).status_code == 400
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "And now?"}
    assert [body["messages"] for body in gateway.bodies] == [[system, question], [system, *turns, question]]


async def test_playground_uses_no_key_of_an_earlier_role(console_side: AdminSide) -> None:
    gateway = EchoGateway()
    services = replace(console_side.services, gateway=gateway)
    api_keys, tenant = services.accounts.api_keys, services.accounts.tenants.create("demoted")
    own = api_keys.create(tenant.id, "own", ["tenant:admin"])
    question = {"tenant": "", "model": "the-base", "message": "Hi", "system": "", "max_tokens": 5, "temperature": 0}
    body = msgspec.json.encode(question)

    def playground_keys() -> list[str]:
        return [key.id for key in api_keys.list(tenant.id, 20).data if key.name == "console playground"]

    async with client_of(create_admin_app(services)) as client:
        browser = Browser(client)
        await browser.sign_in(own.secret)
        for _ in range(2):
            assert (await browser.send("POST", "/playground/stream", body)).status_code == 200
        [first] = playground_keys()
        api_keys.revoke(first)
        assert (await browser.send("POST", "/playground/stream", body)).status_code == 200
        assert len(set(playground_keys()) - {first}) == 1, "a revoked key is replaced"
        with services.database.write() as connection:
            table = schema.api_keys
            connection.execute(update(table).where(table.c.id == own.key.id).values(scopes=["tenant:read"]))
        assert (await browser.send("POST", "/playground/stream", body)).status_code == 403
    assert len(gateway.bodies) == 3


async def test_purge_pages_show_what_goes_and_purge(operator: Browser, console_side: AdminSide) -> None:
    services = console_side.services
    tenant = services.accounts.tenants.create("leaver")
    adapter = services.adapters.registry.create_adapter(tenant.id, "voice")
    add_ready_versions(services.database, adapter.id, 3)
    named, free = f"/adapters/{adapter.id}/versions/1/purge", f"/adapters/{adapter.id}/versions/3/purge"
    assert f"/adapters/{adapter.id}/purge" in (await operator.get(f"/adapters/{adapter.id}")).text
    assert "Nobody yet: the alias &#39;default&#39; names version 1" in (await operator.get(named)).text
    said = await operator.confirm(named)
    assert 'class="notice error"' in said
    assert "leaver/voice@3 is purged" in await operator.confirm(free)
    assert services.adapters.registry.get_version(adapter.id, 3) is None
    assert "leaver/voice is purged" in await operator.confirm(f"/adapters/{adapter.id}/purge")
    assert services.adapters.registry.get_adapter(adapter.id) is None
    assert "Purge…" not in (await operator.get("/tenants/leaver")).text
    assert "Nobody yet: the tenant is not suspended" in (await operator.get("/tenants/leaver/purge")).text
    await operator.confirm("/tenants/leaver/state")
    assert "/tenants/leaver/purge" in (await operator.get("/tenants/leaver")).text
    assert "leaver is purged" in await operator.confirm("/tenants/leaver/purge")
    assert services.accounts.tenants.get("leaver") is None
