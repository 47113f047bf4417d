"""What keeps the console its owner's: sessions, cookies, tokens, headers, throttling, and where it leads."""

from __future__ import annotations

import re

import httpx
import pytest
from sqlalchemy import update
from starlette.types import ASGIApp

from loramux.admin.app import create_admin_app
from loramux.admin.console.login_throttle import BURST, REFILL_S, LoginThrottle
from loramux.admin.console.sessions import IDLE_S, LIFETIME_S, RECHECK_S, ConsoleSessions
from loramux.migrations import schema
from loramux.platform.principals import Principal
from tests.admin.conftest import ADMIN_KEY, AdminSide, client_of

pytestmark = pytest.mark.anyio
SESSION = "loramux_console"


async def login_token(browser: httpx.AsyncClient, path: str = "/console/login") -> str:
    response = await browser.get(path)
    return re.search(r'name="csrf" value="([^"]+)"', response.text)[1]  # type: ignore[index]


async def sign_in(browser: httpx.AsyncClient, key: str = ADMIN_KEY, root: str = "", **fields: str) -> httpx.Response:
    token = await login_token(browser, f"{root}/console/login")
    return await browser.post(f"{root}/console/login", data={"csrf": token, "key": key, **fields})


async def csrf_of(browser: httpx.AsyncClient) -> str:
    page = await browser.get("/console/")
    return re.search(r'name="csrf-token" content="([^"]+)"', page.text)[1]  # type: ignore[index]


async def is_signed_in(browser: httpx.AsyncClient) -> bool:
    return (await browser.get("/console/")).status_code == 200


async def test_root_leads_to_the_console_and_the_console_to_the_login(browser: httpx.AsyncClient) -> None:
    assert (await browser.get("/")).headers["location"] == "/console/"
    assert (await browser.get("/console")).headers["location"] == "/console/"
    assert (await browser.get("/console/")).headers["location"] == "/console/login"


async def test_a_key_opens_a_session_and_signing_out_ends_it(browser: httpx.AsyncClient) -> None:
    response = await sign_in(browser)
    assert (response.status_code, response.headers["location"]) == (303, "/console/")
    assert await is_signed_in(browser)
    cookie = browser.cookies[SESSION]
    await browser.post("/console/logout", data={"csrf": await csrf_of(browser)})
    browser.cookies.set(SESSION, cookie, domain="admin.example")
    assert not await is_signed_in(browser)


async def test_a_wrong_key_opens_nothing(browser: httpx.AsyncClient) -> None:
    response = await sign_in(browser, "x" * 40)
    assert response.status_code == 401
    assert "x" * 40 not in response.text
    assert SESSION not in browser.cookies


async def test_a_key_that_only_infers_is_refused(browser: httpx.AsyncClient, console_side: AdminSide) -> None:
    tenant = console_side.services.tenants.create("infers")
    key = console_side.services.api_keys.create(tenant.id, "infers")
    assert (await sign_in(browser, key.secret)).status_code == 403


@pytest.mark.parametrize(
    ("base_url", "name", "is_secure"),
    [
        pytest.param("http://admin.example", SESSION, False, id="http"),
        pytest.param("https://admin.example", f"__Host-{SESSION}", True, id="https"),
    ],
)
async def test_cookie_flags(console_app: ASGIApp, base_url: str, name: str, is_secure: bool) -> None:
    async with client_of(console_app, base_url) as browser:
        set_cookie = (await sign_in(browser)).headers.get_list("set-cookie")[0]
    flags = {part.strip().lower() for part in set_cookie.split(";")[1:]}
    assert set_cookie.startswith(f"{name}=")
    assert {"httponly", "path=/", "samesite=lax"} <= flags
    assert ("secure" in flags) == is_secure
    assert not any(flag.startswith("domain") for flag in flags)


async def test_a_session_that_was_planted_is_not_taken_over(browser: httpx.AsyncClient) -> None:
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
async def test_a_form_without_its_token_changes_nothing(browser: httpx.AsyncClient, token: str | None) -> None:
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
async def test_a_form_of_another_site_changes_nothing(browser: httpx.AsyncClient, headers: dict[str, str]) -> None:
    await sign_in(browser)
    response = await browser.post("/console/logout", data={"csrf": await csrf_of(browser)}, headers=headers)
    assert response.status_code == 403
    assert await is_signed_in(browser)


async def test_nobody_can_be_signed_in_by_another_site(browser: httpx.AsyncClient) -> None:
    for data in ({"key": ADMIN_KEY}, {"key": ADMIN_KEY, "csrf": "guess"}):
        assert (await browser.post("/console/login", data=data)).status_code == 403
    token = await login_token(browser)
    browser.cookies.clear()
    assert (await browser.post("/console/login", data={"key": ADMIN_KEY, "csrf": token})).status_code == 403


@pytest.mark.parametrize("path", ["/console/login", "/console/", "/console/nothing", "/console/static/console.js"])
async def test_every_answer_has_the_headers(browser: httpx.AsyncClient, path: str) -> None:
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
async def test_login_leads_nowhere_else(browser: httpx.AsyncClient, wanted: str) -> None:
    response = await sign_in(browser, next=wanted)
    assert response.headers["location"] == "/console/"


async def test_login_leads_on_to_the_page_that_was_wanted(browser: httpx.AsyncClient) -> None:
    wanted = await browser.get("/console/live/overview?a=7")
    assert wanted.headers["location"] == "/console/login?next=%2Flive%2Foverview%3Fa%3D7"
    response = await sign_in(browser, next="/live/overview?a=7")
    assert response.headers["location"] == "/console/live/overview?a=7"


async def test_below_a_root_path_every_link_stays_below_it(console_side: AdminSide) -> None:
    async with client_of(create_admin_app(console_side.services, "/ops")) as browser:
        # Once as a proxy that takes the prefix off asks, and once as one that leaves it.
        assert (await browser.get("/")).headers["location"] == "/ops/console/"
        assert (await browser.get("/ops/console/")).headers["location"] == "/ops/console/login"
        assert (await sign_in(browser, root="/ops")).headers["location"] == "/ops/console/"
        page = (await browser.get("/console/")).text
        links = re.findall(r'(?:href|src|action|sse-connect)="(/[^"]*)"', page)
        assert len(links) > 5
        assert all(link.startswith("/ops/console") for link in links)
        assert (await browser.get("/ops/admin/v1/tenants")).status_code == 401


async def test_wrong_keys_are_throttled(console_side: AdminSide) -> None:
    async with client_of(create_admin_app(console_side.services)) as browser:
        statuses = [(await sign_in(browser, f"{n}" * 40)).status_code for n in range(BURST + 1)]
        # The right key has to wait as well, or guesses would not be slowed down.
        refused = await sign_in(browser)
    assert statuses == [401] * BURST + [429]
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) <= REFILL_S


def test_throttle_counts_by_address_and_forgets() -> None:
    now = 100.0
    throttle = LoginThrottle(lambda: now)
    for _ in range(BURST):
        assert throttle.wait_s("192.0.2.1") == 0
        throttle.note_failure("192.0.2.1")
    assert throttle.wait_s("192.0.2.1") == REFILL_S
    assert throttle.wait_s("192.0.2.2") == 0
    now += REFILL_S
    assert throttle.wait_s("192.0.2.1") == 0
    for host in range(BURST):
        throttle.note_failure(f"2001:db8::{host}")
    assert throttle.wait_s("2001:db8::ffff") > 0
    assert throttle.wait_s("2001:db8:0:1::1") == 0


def test_sessions_end_by_age_by_idleness_and_with_their_rights() -> None:
    now = 0.0
    rights: list[Principal | None] = [Principal("key_1", None, None, frozenset({"platform:admin"}))]
    sessions = ConsoleSessions(lambda: now)
    first, second, third = (sessions.open(rights[0], lambda: rights[0])[0] for _ in range(3))  # type: ignore[arg-type]
    while now < LIFETIME_S - IDLE_S / 2:
        now += IDLE_S / 2
        assert sessions.find(first) is not None
        assert sessions.find(second, is_use=False) is not None or now >= IDLE_S
    assert sessions.find(second) is None
    now = LIFETIME_S
    assert sessions.find(first) is None
    assert sessions.find(third) is None
    fourth, _ = sessions.open(rights[0], lambda: rights[0])  # type: ignore[arg-type]
    rights[0] = None
    now += RECHECK_S
    assert sessions.recent(fourth) is None
    assert sessions.find(fourth) is None


async def test_a_revoked_key_ends_its_sessions(
    browser: httpx.AsyncClient, console_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loramux.admin.console.sessions.RECHECK_S", 0.0)
    key = console_side.services.api_keys.create(None, "second")
    await sign_in(browser, key.secret)
    assert await is_signed_in(browser)
    console_side.services.api_keys.revoke(key.key.id)
    assert not await is_signed_in(browser)


async def test_a_suspended_tenant_ends_its_sessions(
    browser: httpx.AsyncClient, console_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loramux.admin.console.sessions.RECHECK_S", 0.0)
    tenant = console_side.services.tenants.create("acme")
    key = console_side.services.api_keys.create(tenant.id, "admin", ["tenant:admin"])
    await sign_in(browser, key.secret)
    assert await is_signed_in(browser)
    with console_side.services.database.write() as connection:
        connection.execute(update(schema.tenants).where(schema.tenants.c.id == tenant.id).values(state="suspended"))
    assert not await is_signed_in(browser)


async def test_a_key_is_no_session_and_a_session_no_key(browser: httpx.AsyncClient) -> None:
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
