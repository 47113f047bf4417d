from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from starlette.types import ASGIApp

from loramux.adapter_store.registry.records import CanaryRule, RequiredEval
from tests.admin.admin_side import AdminSide
from tests.admin.app_client import client_of
from tests.admin.console.signed_in_browser import Browser, first_match
from tests.admin.finished_evals import CONTENT, SHA256, add_finished_eval
from tests.admin.rest.adapters.ready_versions import add_ready_versions

pytestmark = pytest.mark.anyio

LINES = CONTENT.decode().replace("\n", "\r\n")


@dataclass
class Tab:
    browser: Browser
    side: AdminSide
    adapter_id: str

    @property
    def here(self) -> str:
        return f"/adapters/{self.adapter_id}"

    async def text(self, path: str = "") -> str:
        return (await self.browser.get(self.here + path)).text


@pytest.fixture
async def tab(console_side: AdminSide, console_app: ASGIApp, request: pytest.FixtureRequest) -> AsyncIterator[Tab]:
    services = console_side.services
    slug = f"t-{abs(hash(request.node.name))}"
    adapter = services.adapters.registry.create_adapter(services.accounts.tenants.create(slug).id, "support")
    add_ready_versions(services.database, adapter.id, 2)
    async with client_of(console_app) as client:
        browser = Browser(client)
        await browser.sign_in("a-key-of-more-than-thirty-two-characters")
        yield Tab(browser, console_side, adapter.id)


async def test_eval_is_started_and_cancelled(tab: Tab) -> None:
    assert "No evals yet" in await tab.text("/evals")
    fields = {"version": "2", "compare": "1", "name": "tests.jsonl", "lines": LINES, "judge": ""}
    assert "The eval is queued." in await tab.browser.post(f"{tab.here}/evals", **fields)
    [found] = tab.side.services.adapters.evals.list(tab.adapter_id, 2, 10).data
    assert (found.sha256, found.compared, found.api_key_id) == (SHA256, 1, None)
    page = await tab.text(f"/evals/{found.id}")
    assert "0 of 8 answers" in page
    assert 'hx-trigger="every 2s"' in page
    assert "cancelled" in await tab.browser.post(f"{tab.here}/evals/{found.id}/cancel")
    assert "hx-trigger" not in (await tab.text(f"/evals/{found.id}")).partition('id="eval"')[2]


@pytest.mark.parametrize(
    ("lines", "judge", "said"),
    [
        ("nonsense", "", "Line 1: "),
        ('{"prompt": "p", "judge": "?"}', "", "Lines of the file need a judge"),
        ('{"prompt": "p", "judge": "?"}', "other/absent", "does not exist"),
    ],
)
async def test_bad_file_is_refused_with_its_line(tab: Tab, lines: str, judge: str, said: str) -> None:
    fields = {"version": "1", "compare": "2", "lines": lines, "judge": judge, "csrf": tab.browser.csrf}
    response = await tab.browser.client.post(f"/console{tab.here}/evals", data=fields)
    assert response.status_code in (400, 404)
    assert 'class="notice error"' in response.text
    assert said in response.text
    kept = html.unescape(response.text)
    assert f">{lines}</textarea>" in kept, "the text is not lost"
    assert re.search(r'name="compare"[^>]* value="2"', kept)
    assert f'value="{judge}"' in kept


async def test_sixty_kilobytes_fit_into_the_form(tab: Tab) -> None:
    line = '{"prompt": "' + 20 * "你好" + '", "contains": "\\""}'
    lines = "\r\n".join([line] * (60_000 // len(f"{line}\r\n".encode())))
    assert "The eval is queued." in await tab.browser.post(f"{tab.here}/evals", version="1", compare="", lines=lines)
    [queued] = tab.side.services.adapters.evals.list(tab.adapter_id, 1, 10).data
    tab.side.services.adapters.evals.cancel(queued.id)
    fields = {"csrf": tab.browser.csrf, "lines": "x" * 200_000}
    headers = {"referer": f"http://admin.example/console{tab.here}/evals"}
    response = await tab.browser.client.post(f"/console{tab.here}/evals", data=fields, headers=headers)
    assert response.headers["location"] == f"/console{tab.here}/evals"
    assert "must not exceed" in await tab.text("/evals")


async def test_form_sent_twice_starts_one_eval(tab: Tab) -> None:
    once = first_match(r'name="once" value="([^"]+)"', await tab.text("/evals"))
    for _ in range(2):
        await tab.browser.post(f"{tab.here}/evals", version="2", compare="", lines=LINES, once=once)
    [found] = tab.side.services.adapters.evals.list(tab.adapter_id, 2, 10).data
    tab.side.services.adapters.evals.cancel(found.id)
    fields = {"csrf": tab.browser.csrf, "compare": "", "lines": LINES, "once": once, "version": "1"}
    changed = await tab.browser.client.post(f"/console{tab.here}/evals", data=fields)
    assert (changed.status_code, "This form was already sent" in changed.text) == (409, True)
    assert f'name="once" value="{once}"' in changed.text, "the form that is shown again is the same form"


async def test_running_eval_stays_on_its_page(tab: Tab) -> None:
    await tab.browser.post(f"{tab.here}/evals", version="2", compare="", lines=LINES)
    [found] = tab.side.services.adapters.evals.list(tab.adapter_id, 2, 10).data
    page = await tab.text(f"/evals/{found.id}?after_line=50")
    assert f'hx-get="/console{tab.here}/evals/{found.id}?after_line=50"' in page
    assert '<button id="cancel-eval"' in page
    tab.side.services.adapters.evals.cancel(found.id)


async def test_answers_are_side_by_side_and_escaped(tab: Tab) -> None:
    eval_id = add_finished_eval(tab.side.services.database, tab.adapter_id, 2, passed=4, compared=1, others=1)
    page = await tab.text(f"/evals/{eval_id}")
    assert "1.000, 4 of 4 passed" in page
    assert "0.250, 1 of 4 passed" in page
    assert page.count("&lt;b&gt;no&lt;/b&gt;") == 3
    assert "<b>no</b>" not in page
    assert '<th scope="col">Version 2</th><th scope="col">Version 1</th>' in page
    assert f"/evals/{eval_id}" in await tab.text("/evals")
    assert f'/evals/{eval_id}" title="tests.jsonl">1.000</a>' in await tab.text()


async def test_alias_shows_its_demand_and_its_canary(tab: Tab) -> None:
    add_finished_eval(tab.side.services.database, tab.adapter_id, 2, passed=3, judge="the-base")
    aliases = tab.side.services.adapters.aliases
    demand = RequiredEval(SHA256, "tests.jsonl", 750_000, "the-base")
    path = f"{tab.here}/move?alias=default&version=1&weight_1=90&version=2&weight_2=10&max_error_percent=5"
    aliases.set(tab.adapter_id, "default", {1: 100}, required_eval=demand)
    assert "demands 0.750 in tests.jsonl, judged by the-base" in await tab.text()
    page = (await tab.browser.get(path)).text
    assert "more than 5 % of a version&#39;s requests fail" in page
    await tab.browser.confirm(path)
    moved = aliases.get(tab.adapter_id, "default")
    assert moved.required_eval == demand
    assert moved.canary == CanaryRule(max_error_rate=0.05, versions=(2,))
    assert "watched" in await tab.text()
    verdict = "version 2: 9 of 9 requests failed"
    aliases.fail_canary(tab.adapter_id, "default", moved.revision, [2], verdict)
    shown = await tab.text()
    assert "rolled back" in shown
    assert "version 2: 9 of 9 requests failed" in shown
    refused = (await tab.browser.get(path.replace("percent=5", "percent=lots"))).text
    assert "A bound must be a number such as 2.5." in refused


async def test_viewer_sees_scores_but_no_form(tab: Tab, console_app: ASGIApp) -> None:
    eval_id = add_finished_eval(tab.side.services.database, tab.adapter_id, 1, passed=2)
    services = tab.side.services
    owner = services.adapters.registry.get_adapter(tab.adapter_id)
    assert owner is not None
    key = services.accounts.api_keys.create(owner.tenant_id, "viewer", ["tenant:read"])
    async with client_of(console_app) as client:
        viewer = Browser(client)
        await viewer.sign_in(key.secret)
        assert "Run an eval" not in (await viewer.get(f"{tab.here}/evals")).text
        assert "0.500, 2 of 4 passed" in (await viewer.get(f"{tab.here}/evals/{eval_id}")).text
        foreign = services.adapters.registry.create_adapter(services.accounts.tenants.create("strange").id, "other")
        await viewer.get(f"/adapters/{foreign.id}/evals", status=404)


async def test_alias_form_sets_and_removes_an_overflow(tab: Tab) -> None:
    aliases, served = tab.side.services.adapters.aliases, tab.side.services.engine.self_check.served_name
    path = f"{tab.here}/move?alias=default&version=1&weight_1=100"
    aliases.set(tab.adapter_id, "default", {1: 100})
    page = (await tab.browser.get(f"{path}&overflow={served}")).text
    assert "Overflows to" in page
    await tab.browser.confirm(f"{path}&overflow={served}")
    assert aliases.get(tab.adapter_id, "default").overflow == served
    assert f"overflows to {served}" in await tab.text()
    assert f'value="{served}"' in await tab.text("/move?alias=default")
    assert "already points there" in (await tab.browser.get(path)).text, "the field is not in the address"
    await tab.browser.confirm(f"{tab.here}/move?alias=default&version=2&weight_2=1")
    assert aliases.get(tab.adapter_id, "default").overflow == served
    await tab.browser.confirm(f"{tab.here}/move?alias=default&version=2&weight_2=1&overflow=")
    assert aliases.get(tab.adapter_id, "default").overflow is None


async def test_alias_form_shares_the_bases_cache(tab: Tab) -> None:
    aliases = tab.side.services.adapters.aliases
    path = f"{tab.here}/move?alias=default&version=1&weight_1=100"
    aliases.set(tab.adapter_id, "default", {1: 100}, overflow="base")
    page = (await tab.browser.get(f"{path}&share_base_cache=256")).text
    assert "only the last 256 tokens of a prompt, approximately" in page
    assert "Overflows to" not in page
    await tab.browser.confirm(f"{path}&share_base_cache=256")
    moved = aliases.get(tab.adapter_id, "default")
    assert (moved.share_base_cache, moved.overflow) == (256, "base")
    assert "shares the base's cache" in await tab.text()
    assert 'value="256"' in await tab.text("/move?alias=default")
    rollback = await tab.text("/aliases/default/rollback")
    assert "v1</span></strong>, sharing all but the last 256 tokens</p>" in rollback
    fields = {name: first_match(f'name="{name}" value="([^"]*)"', rollback) for name in ("seen", "revision")}
    await tab.browser.post(f"{tab.here}/aliases/default/rollback", **fields)
    assert aliases.get(tab.adapter_id, "default").share_base_cache is None
    await tab.browser.confirm(f"{path}&share_base_cache=256")
    await tab.browser.confirm(f"{path}&share_base_cache=")
    assert aliases.get(tab.adapter_id, "default").share_base_cache is None
    refused = (await tab.browser.get(f"{path}&share_base_cache=some")).text
    assert "number of tokens" in refused


async def test_undo_of_a_deletion_restores_the_options(tab: Tab) -> None:
    aliases, served = tab.side.services.adapters.aliases, tab.side.services.engine.self_check.served_name
    aliases.set(tab.adapter_id, "beta", {1: 100}, overflow=served, share_base_cache=256)
    said = await tab.browser.confirm(f"{tab.here}/aliases/beta/delete")
    await tab.browser.confirm(html.unescape(first_match(r'<a href="/console([^"]+)">Undo', said)))
    again = aliases.get(tab.adapter_id, "beta")
    assert (again.overflow, again.share_base_cache) == (served, 256)


async def test_divergence_of_a_shared_cache_is_measured_and_shown(tab: Tab) -> None:
    fields = {"version": "2", "compare": "", "name": "tests.jsonl", "lines": LINES, "share_base_cache": "256"}
    assert "The eval is queued." in await tab.browser.post(f"{tab.here}/evals", **fields)
    [queued] = tab.side.services.adapters.evals.list(tab.adapter_id, 2, 10).data
    assert queued.share_base_cache == 256
    assert "0 of 8 answers" in await tab.text(f"/evals/{queued.id}")
    assert "sharing all but the last 256 tokens" in await tab.text("/evals")
    await tab.browser.post(f"{tab.here}/evals/{queued.id}/cancel")
    database = tab.side.services.database
    eval_id = add_finished_eval(database, tab.adapter_id, 2, passed=4, others=1, share_base_cache=256)
    page = await tab.text(f"/evals/{eval_id}")
    assert '<th scope="col">Version 2</th><th scope="col">Version 2, sharing</th>' in page
    assert page.count("&lt;b&gt;no&lt;/b&gt;") == 3
    assert "0.2500 nats per token, measured on 4 of 4 lines" in page
    assert "0.2500 nats per token" in await tab.text("/evals")
