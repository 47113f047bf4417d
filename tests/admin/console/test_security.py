from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from sqlalchemy import delete, update
from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from loramux.admin.console.app import create_console
from loramux.admin.console.sessions.login_throttle import BURST, REFILL_S
from loramux.admin.rest.services import AdminServices
from loramux.admin.serving.app import create_admin_app
from loramux.migrations import schema
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.keys import KeyChanges
from tests.admin.admin_side import ADMIN_KEY, AdminSide
from tests.admin.app_client import client_of
from tests.admin.console.signed_in_browser import login_token, sign_in
from tests.admin.running_server import RunningServer

pytestmark = pytest.mark.anyio
SESSION = "loramux_console"


async def csrf_of(browser: httpx.AsyncClient) -> str:
    page = await browser.get("/console/")
    return re.search(r'name="csrf-token" content="([^"]+)"', page.text)[1]  # type: ignore[index]


async def is_signed_in(browser: httpx.AsyncClient) -> bool:
    return (await browser.get("/console/")).status_code == 200


async def test_root_redirects_to_the_console_and_the_console_to_login(browser: httpx.AsyncClient) -> None:
    assert (await browser.get("/")).headers["location"] == "/console/"
    assert (await browser.get("/console")).headers["location"] == "/console/"
    assert (await browser.get("/console/")).headers["location"] == "/console/login"


async def test_key_opens_a_session_and_signing_out_ends_it(browser: httpx.AsyncClient) -> None:
    response = await sign_in(browser)
    assert (response.status_code, response.headers["location"]) == (303, "/console/")
    assert await is_signed_in(browser)
    cookie = browser.cookies[SESSION]
    await browser.post("/console/logout", data={"csrf": await csrf_of(browser)})
    browser.cookies.set(SESSION, cookie, domain="admin.example")
    assert not await is_signed_in(browser)


async def test_wrong_key_opens_no_session(browser: httpx.AsyncClient) -> None:
    response = await sign_in(browser, "x" * 40)
    assert response.status_code == 401
    assert "x" * 40 not in response.text
    assert SESSION not in browser.cookies


async def test_inference_key_is_refused(browser: httpx.AsyncClient, console_side: AdminSide) -> None:
    tenant = console_side.services.accounts.tenants.create("infers")
    key = console_side.services.accounts.api_keys.create(tenant.id, "infers")
    assert (await sign_in(browser, key.secret)).status_code == 403


@pytest.mark.parametrize(
    ("base_url", "name", "is_secure"),
    [
        pytest.param("http://admin.example", SESSION, False, id="http"),
        pytest.param("https://admin.example", f"__Host-{SESSION}", True, id="https"),
    ],
)
async def test_session_cookie_is_limited_to_its_host_and_to_tls(
    console_app: ASGIApp, base_url: str, name: str, is_secure: bool
) -> None:
    async with client_of(console_app, base_url) as browser:
        set_cookie = (await sign_in(browser)).headers.get_list("set-cookie")[0]
    flags = {part.strip().lower() for part in set_cookie.split(";")[1:]}
    assert set_cookie.startswith(f"{name}=")
    assert {"httponly", "path=/", "samesite=lax"} <= flags
    assert ("secure" in flags) == is_secure
    assert not any(flag.startswith("domain") for flag in flags)


async def test_planted_session_cookie_is_not_adopted(browser: httpx.AsyncClient) -> None:
    browser.cookies.set(SESSION, "planted", domain="admin.example")
    await sign_in(browser)
    values = [cookie.value for cookie in browser.cookies.jar if cookie.name == SESSION]
    assert "planted" not in values[-1:]
    browser.cookies.clear()
    browser.cookies.set(SESSION, "planted", domain="admin.example")
    assert not await is_signed_in(browser)


async def test_signing_in_again_ends_the_old_session(browser: httpx.AsyncClient, console_app: ASGIApp) -> None:
    await sign_in(browser)
    old = browser.cookies[SESSION]
    async with client_of(console_app) as other:
        login = await login_token(other)
        other.cookies.set(SESSION, old, domain="admin.example")
        await other.post("/console/login", data={"csrf": login, "key": ADMIN_KEY})
        assert other.cookies[SESSION] != old
    assert not await is_signed_in(browser)


@pytest.mark.parametrize("token", [None, "", "guess"], ids=["none", "empty", "wrong"])
async def test_form_without_csrf_token_changes_nothing(browser: httpx.AsyncClient, token: str | None) -> None:
    await sign_in(browser)
    response = await browser.post("/console/logout", data={} if token is None else {"csrf": token})
    assert response.status_code == 403
    assert await is_signed_in(browser)


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"sec-fetch-site": "cross-site"}, id="cross-site"),
        pytest.param({"sec-fetch-site": "same-site"}, id="a sibling domain"),
        pytest.param({"origin": "https://evil.example"}, id="another origin"),
        pytest.param({"origin": "null"}, id="no origin"),
    ],
)
async def test_form_from_another_site_changes_nothing(browser: httpx.AsyncClient, headers: dict[str, str]) -> None:
    await sign_in(browser)
    response = await browser.post("/console/logout", data={"csrf": await csrf_of(browser)}, headers=headers)
    assert response.status_code == 403
    assert await is_signed_in(browser)


async def test_script_is_refused_in_json(
    browser: httpx.AsyncClient, console_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object, **__: object) -> None:
        raise OperationalError("select", {}, Exception("down"))

    await sign_in(browser)
    refused = await browser.post("/console/playground/stream", headers={"x-csrf-token": "old"})
    assert refused.status_code == 403
    assert "not from your session" in refused.json()["error"]["message"]
    monkeypatch.setattr(type(console_side.services.database), "read", down)
    refused = await browser.post("/console/playground/stream")
    assert refused.status_code == 503
    assert "the database cannot be reached" in refused.json()["error"]["message"]


async def test_login_form_requires_the_browsers_own_csrf_token(browser: httpx.AsyncClient) -> None:
    for data in ({"key": ADMIN_KEY}, {"key": ADMIN_KEY, "csrf": "guess"}):
        assert (await browser.post("/console/login", data=data)).status_code == 403
    token = await login_token(browser)
    browser.cookies.clear()
    assert (await browser.post("/console/login", data={"key": ADMIN_KEY, "csrf": token})).status_code == 403


@pytest.mark.parametrize("path", ["/console/login", "/console/", "/console/nothing", "/console/static/console.js"])
async def test_every_response_forbids_foreign_scripts_frames_and_sniffing(
    browser: httpx.AsyncClient, path: str
) -> None:
    headers = (await browser.get(path)).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cache-control"]


@pytest.mark.parametrize(
    "wanted",
    ["https://evil.example", "//evil.example", "/\\evil.example", "\\\\evil", "javascript:alert(1)", "/\r\nx: y", ""],
)
async def test_login_redirect_stays_in_the_console(browser: httpx.AsyncClient, wanted: str) -> None:
    response = await sign_in(browser, next=wanted)
    assert response.headers["location"] == "/console/"


async def test_login_redirects_to_the_requested_page(browser: httpx.AsyncClient) -> None:
    wanted = await browser.get("/console/live/overview?a=7")
    assert wanted.headers["location"] == "/console/login?next=%2Flive%2Foverview%3Fa%3D7"
    response = await sign_in(browser, next="/live/overview?a=7")
    assert response.headers["location"] == "/console/live/overview?a=7"


async def test_links_stay_under_the_root_path(console_side: AdminSide) -> None:
    async with client_of(create_admin_app(console_side.services, "/ops")) as browser:
        # The app must work behind a proxy that strips the prefix and behind one that keeps it.
        assert (await browser.get("/")).headers["location"] == "/ops/console/"
        assert (await browser.get("/ops/console/")).headers["location"] == "/ops/console/login"
        assert (await sign_in(browser, root="/ops")).headers["location"] == "/ops/console/"
        page = (await browser.get("/console/")).text
        links = re.findall(r'(?:href|src|action|sse-connect)="(/[^"]*)"', page)
        assert len(links) > 5
        assert all(link.startswith("/ops/console") for link in links)
        assert (await browser.get("/ops/admin/v1/tenants")).status_code == 401


def forgive_all(side: AdminSide) -> None:
    with side.services.database.write() as connection:
        connection.execute(delete(schema.login_failures))


async def test_wrong_keys_are_throttled(browser: httpx.AsyncClient, console_side: AdminSide) -> None:
    forgive_all(console_side)
    statuses = [(await sign_in(browser, f"{n}" * 40)).status_code for n in range(BURST + 1)]
    # The correct key is throttled too, because throttling must slow down guessing.
    refused = await sign_in(browser)
    forgive_all(console_side)
    assert statuses == [401] * BURST + [429]
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) <= REFILL_S


async def test_forged_address_does_not_bypass_the_throttle(
    admin_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    async with httpx.AsyncClient(base_url=admin_server.url, trust_env=False) as browser:
        statuses = []
        for attempt in range(BURST + 1):
            browser.headers["x-forwarded-for"] = f"198.51.100.{attempt}"
            statuses.append((await sign_in(browser, f"{attempt}" * 40)).status_code)
    assert statuses == [401] * BURST + [429]


class Balancer:
    """A load balancer in front of two servers on one database. `at` selects the server."""

    def __init__(self, *servers: ASGIApp) -> None:
        self._servers = servers
        self.at = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._servers[self.at](scope, receive, send)


def another_server(services: AdminServices, rest: ASGIApp) -> ASGIApp:
    """The console of a second server. Both consoles can call the same REST routes, because the routes are stateless."""
    return Starlette(routes=[Mount("/console", create_console(services, rest))])


@pytest.fixture
def balancer(console_side: AdminSide, console_app: ASGIApp) -> Balancer:
    return Balancer(console_app, another_server(console_side.services, console_app))


@pytest.fixture
async def balanced(balancer: Balancer) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(balancer) as client:
        yield client


async def test_servers_on_one_database_share_sessions(balancer: Balancer, balanced: httpx.AsyncClient) -> None:
    # Each server accepts forms, sessions, tokens and messages from the other.
    token = await login_token(balanced)
    balancer.at = 1
    assert (await balanced.post("/console/login", data={"csrf": token, "key": ADMIN_KEY})).status_code == 303
    balancer.at = 0
    csrf = await csrf_of(balanced)
    balancer.at = 1
    made = await balanced.post("/console/tenants", data={"csrf": csrf, "slug": "shared"})
    assert made.headers["location"] == "/console/tenants/shared"
    balancer.at = 0
    assert "Created the tenant shared" in (await balanced.get("/console/tenants/shared")).text
    balancer.at = 1
    assert "Created the tenant shared" not in (await balanced.get("/console/tenants/shared")).text
    cookie = balanced.cookies[SESSION]
    await balanced.post("/console/logout", data={"csrf": csrf})
    balanced.cookies.set(SESSION, cookie, domain="admin.example")
    for balancer.at in (0, 1):
        assert not await is_signed_in(balanced)


async def test_wrong_keys_are_counted_across_servers(balancer: Balancer, console_side: AdminSide) -> None:
    forgive_all(console_side)
    async with client_of(balancer) as browser:
        statuses = []
        for attempt in range(BURST + 2):
            balancer.at = attempt % 2
            statuses.append((await sign_in(browser, f"{attempt}" * 40)).status_code)
    forgive_all(console_side)
    assert statuses == [401] * BURST + [429] * 2


async def test_changed_rights_apply_immediately_on_every_server(
    balancer: Balancer, balanced: httpx.AsyncClient, console_side: AdminSide
) -> None:
    keys = console_side.services.accounts.api_keys
    key = keys.create(None, "lowered")
    await sign_in(balanced, key.secret)
    balancer.at = 1
    assert "New tenant" in (await balanced.get("/console/tenants")).text
    keys.update(key.key.id, KeyChanges(scopes=frozenset({"platform:read"})), lambda _: None)
    assert "New tenant" not in (await balanced.get("/console/tenants")).text
    keys.revoke(key.key.id)
    for balancer.at in (0, 1):
        assert not await is_signed_in(balanced)


async def test_session_ends_when_its_secret_expires(browser: httpx.AsyncClient, console_side: AdminSide) -> None:
    keys = console_side.services.accounts.api_keys
    key = keys.create(None, "rotated")
    await sign_in(browser, key.secret)
    keys.rotate(key.key.id, 60_000_000)
    assert await is_signed_in(browser), "the session lasts as long as the old secret"
    keys.rotate(key.key.id, 0)
    assert not await is_signed_in(browser)


async def test_rotating_the_sessions_own_key_shows_the_new_secret(
    browser: httpx.AsyncClient, console_side: AdminSide
) -> None:
    key = console_side.services.accounts.api_keys.create(None, "own")
    await sign_in(browser, key.secret)
    form = {"csrf": await csrf_of(browser), "grace_s": "0"}
    await browser.post(f"/console/keys/{key.key.id}/rotate", data=form)
    page = await browser.get("/console/keys")
    assert page.status_code == 200
    assert "Copy its secret now" in page.text


async def test_new_operator_key_ends_sessions_of_the_old_one(
    browser: httpx.AsyncClient, console_side: AdminSide, console_app: ASGIApp
) -> None:
    await sign_in(browser)
    services = console_side.services
    keys = ApiKeys(services.database, "another key " * 4)
    services = replace(services, accounts=replace(services.accounts, api_keys=keys))
    async with client_of(another_server(services, console_app)) as after_restart:
        after_restart.cookies = browser.cookies
        assert not await is_signed_in(after_restart)


async def test_revoking_a_key_ends_its_sessions(browser: httpx.AsyncClient, console_side: AdminSide) -> None:
    key = console_side.services.accounts.api_keys.create(None, "second")
    await sign_in(browser, key.secret)
    assert await is_signed_in(browser)
    console_side.services.accounts.api_keys.revoke(key.key.id)
    assert not await is_signed_in(browser)


async def test_suspending_a_tenant_ends_its_sessions(browser: httpx.AsyncClient, console_side: AdminSide) -> None:
    tenant = console_side.services.accounts.tenants.create("acme")
    key = console_side.services.accounts.api_keys.create(tenant.id, "admin", ["tenant:admin"])
    await sign_in(browser, key.secret)
    assert await is_signed_in(browser)
    csrf = await csrf_of(browser)
    with console_side.services.database.write() as connection:
        connection.execute(update(schema.tenants).where(schema.tenants.c.id == tenant.id).values(state="suspended"))
    refused = await browser.post("/console/keys", data={"csrf": csrf, "name": "left open"})
    assert refused.headers["location"] == "/console/login", "a form opened earlier has no effect"
    sent = await browser.post("/console/playground/stream", headers={"x-csrf-token": csrf})
    assert sent.status_code == 401
    assert "sign in again" in sent.json()["error"]["message"]
    assert not await is_signed_in(browser)


async def test_keys_do_not_open_pages_and_sessions_do_not_authorize_rest(browser: httpx.AsyncClient) -> None:
    bearer = {"authorization": f"Bearer {ADMIN_KEY}"}
    assert (await browser.get("/console/", headers=bearer)).status_code == 303
    await sign_in(browser)
    assert (await browser.get("/admin/v1/tenants")).status_code == 401


async def test_a_long_or_broken_form_is_refused(browser: httpx.AsyncClient) -> None:
    await sign_in(browser)
    for content, status in ((b"a=" + b"x" * 70_000, 413), (b"\xff\xfe", 400), (b"&".join([b"a=1"] * 300), 400)):
        response = await browser.post("/console/logout", content=content)
        assert response.status_code in (303, 400, 403, status), content[:10]
        assert await is_signed_in(browser)
