from __future__ import annotations

import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx
import pytest
from joserfc.jwk import ECKey
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from loramux.admin.console.app import create_console
from loramux.admin.console.oidc.attempt import ATTEMPT_S
from loramux.admin.console.oidc.provider import OPTIONAL_ENDPOINTS, REQUIRED_ENDPOINTS
from loramux.admin.console.oidc.role_confirmation import ASK_EVERY_S, CONFIRMED_S, UNCONFIRMED_S
from loramux.admin.console.sign_in.oidc_login import MAX_UNDER_WAY
from loramux.admin.rest.services import AdminServices
from loramux.admin.server.oidc_settings import OidcSettings, RoleRule, parse_rule
from loramux.admin.serving.app import create_admin_app
from loramux.platform.accounts.tenants import TenantChanges
from tests.admin.admin_side import AdminSide
from tests.admin.app_client import CONSOLE_HOST, client_of
from tests.admin.console.oidc.fake_provider import FakeProvider, fake_provider, shared_secret
from tests.admin.rest.adapters.ready_versions import add_ready_versions
from tests.ports import free_port

pytestmark = pytest.mark.anyio

RULES = ("ops=platform:admin", "viewers=platform:read", "acme devs=tenant:develop@acme")
SECRET = "a-client-secret-of-some-length"
CALLBACK = "/console/oidc/callback"


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeProvider]:
    with fake_provider() as made:
        yield made


@pytest.fixture(autouse=True)
def truthful(provider: FakeProvider) -> None:
    fresh = FakeProvider(url=provider.url, published=provider.published)
    provider.__dict__.update(fresh.__dict__)


def settings_of(issuer: str, **changes: Any) -> OidcSettings:
    made = OidcSettings(
        issuer=issuer,
        client_id="loramux",
        client_secret=SECRET,
        scopes="openid profile",
        roles_claim="groups",
        rules=tuple(parse_rule(rule) for rule in RULES),
        redirect_url=None,
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def app(console_side: AdminSide, provider: FakeProvider) -> ASGIApp:
    return create_admin_app(replace(console_side.services, oidc=settings_of(provider.url)))


@pytest.fixture
async def browser(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


def console_of(services: AdminServices, settings: OidcSettings, rest: ASGIApp) -> ASGIApp:
    return Starlette(routes=[Mount("/console", create_console(replace(services, oidc=settings), rest))])


async def begin(browser: httpx.AsyncClient, provider: FakeProvider, next_path: str = "") -> dict[str, str]:
    """Follow the redirect to the provider. Return the query parameters that the provider received."""
    response = await browser.get("/console/oidc/login", params={"next": next_path} if next_path else {})
    assert response.status_code == 303, response.text
    asked = {name: values[0] for name, values in parse_qs(urlsplit(response.headers["location"]).query).items()}
    provider.nonce = asked["nonce"]
    return asked


def under_way(browser: httpx.AsyncClient) -> dict[str, str]:
    """The cookies of sign-ins that the browser has not finished."""
    return {name: value for name, value in browser.cookies.items() if name.startswith("loramux_oidc")}


async def sign_in(browser: httpx.AsyncClient, provider: FakeProvider, **claims: Any) -> httpx.Response:
    asked = await begin(browser, provider)
    provider.claims |= claims
    return await browser.get(CALLBACK, params={"code": "a-code", "state": asked["state"]})


async def test_person_with_a_role_signs_in_and_out(browser: httpx.AsyncClient, provider: FakeProvider) -> None:
    assert "/console/oidc/login" in (await browser.get("/console/login")).text
    asked = await begin(browser, provider, "/keys")
    assert asked["response_type"] == "code"
    assert asked["code_challenge_method"] == "S256"
    assert asked["redirect_uri"] == f"{CONSOLE_HOST}{CALLBACK}"
    assert not {"code_verifier", "client_secret"} & asked.keys()
    response = await browser.get(CALLBACK, params={"code": "a-code", "state": asked["state"]})
    assert (response.status_code, response.headers["location"]) == (303, "/console/keys")
    (told,) = provider.received
    assert (told["code"], told["redirect_uri"]) == ("a-code", asked["redirect_uri"])
    assert len(told["code_verifier"]) >= 43
    page = await browser.get("/console/keys")
    assert page.status_code == 200
    assert "id_token" not in page.text
    csrf = re.search(r'name="csrf-token" content="([^"]+)"', page.text)[1]  # type: ignore[index]
    out = await browser.post("/console/logout", data={"csrf": csrf})
    assert f'href="{provider.url}/end?id_token_hint=' in out.text
    assert (await browser.get("/console/keys")).status_code == 303


@pytest.mark.parametrize(
    ("groups", "status", "scopes"),
    [
        pytest.param(["ops"], 303, {"platform:admin", "platform:read"}, id="administrator"),
        pytest.param("viewers", 303, {"platform:read"}, id="one group as a string"),
        pytest.param(["viewers", "ops"], 303, {"platform:admin", "platform:read"}, id="the first rule decides"),
        pytest.param(["acme devs"], 303, {"tenant:develop", "tenant:read"}, id="a tenant's"),
        pytest.param(["others"], 403, None, id="no role"),
        pytest.param([], 403, None, id="no group"),
        pytest.param(None, 403, None, id="no claim"),
        pytest.param({"ops": 1}, 403, None, id="an object"),
        pytest.param([["ops"], 5], 403, None, id="a list of anything"),
    ],
)
async def test_roles_are_read_from_the_claim(
    browser: httpx.AsyncClient, provider: FakeProvider, console_side: AdminSide, groups: Any, status: int, scopes: Any
) -> None:
    if console_side.services.accounts.tenants.get("acme") is None:
        console_side.services.accounts.tenants.create("acme")
    provider.about = {"sub": "alice", "groups": groups}
    assert (await sign_in(browser, provider)).status_code == status
    assert ("loramux_console" in browser.cookies) == (scopes is not None)


async def test_tenant_member_sees_only_that_tenant_until_it_is_suspended(
    provider: FakeProvider, console_side: AdminSide, console_app: ASGIApp
) -> None:
    tenant = console_side.services.accounts.tenants.create("suspendable")
    rules = (RoleRule("devs", "tenant:admin", "suspendable"),)
    app = console_of(console_side.services, settings_of(provider.url, rules=rules), console_app)
    async with client_of(app) as browser:
        provider.about["groups"] = ["devs"]
        assert (await sign_in(browser, provider)).status_code == 303
        assert (await browser.get("/console/keys")).status_code == 200
        assert (await browser.get("/console/tenants")).status_code in (303, 403)
        console_side.services.accounts.tenants.update(tenant.id, TenantChanges(state="suspended"), lambda _: None)
        assert (await browser.get("/console/keys")).headers["location"].startswith("/console/login")


async def test_tenant_member_is_told_that_an_eval_needs_a_key(
    provider: FakeProvider, console_side: AdminSide, console_app: ASGIApp
) -> None:
    services = console_side.services
    tenant = services.accounts.tenants.create("grading")
    adapter = services.adapters.registry.create_adapter(tenant.id, "voice")
    add_ready_versions(services.database, adapter.id, 1)
    rules = (RoleRule("devs", "tenant:develop", "grading"),)
    async with client_of(console_of(services, settings_of(provider.url, rules=rules), console_app)) as browser:
        provider.about["groups"] = ["devs"]
        await sign_in(browser, provider)
        page = (await browser.get(f"/console/adapters/{adapter.id}/evals")).text
    assert "Sign in with a key" in page
    assert "<textarea" not in page


ANOTHER_KEY = ECKey.generate_key("P-256", {"kid": "one"})
LIES: dict[str, dict[str, Any]] = {
    "another nonce": {"claims": {"nonce": "another"}},
    "no nonce": {"claims": {"nonce": None}},
    "another issuer": {"claims": {"iss": "https://evil.example"}},
    "another audience": {"claims": {"aud": "somebody-else"}},
    "two audiences without azp": {"claims": {"aud": ["loramux", "somebody-else"]}},
    "another authorised party": {"claims": {"azp": "somebody-else"}},
    "expired": {"claims": {"exp": 1_600_000_000, "iat": 1_599_999_000}},
    "no expiry": {"claims": {"exp": None}},
    "no subject": {"claims": {"sub": None}},
    "another key": {"key": ANOTHER_KEY},
    "signed with the client's secret": {"key": shared_secret(), "header": {"alg": "HS256"}},
    "not signed": {"header": {"alg": "none"}},
    "userinfo of somebody else": {"about": {"sub": "mallory", "groups": ["ops"]}},
    "userinfo of nobody": {"about": {"groups": ["ops"]}},
    "userinfo that is a list": {"about": ["ops"]},
}


@pytest.mark.parametrize("lie", LIES)
async def test_invalid_provider_response_opens_no_session(
    browser: httpx.AsyncClient, provider: FakeProvider, lie: str
) -> None:
    provider.__dict__.update(LIES[lie])
    response = await sign_in(browser, provider)
    assert response.status_code == 403
    assert "loramux_console" not in browser.cookies
    assert "evil" not in response.text


async def test_code_is_bound_to_one_sign_in_in_one_browser(browser: httpx.AsyncClient, provider: FakeProvider) -> None:
    asked = await begin(browser, provider)
    good = {"code": "a-code", "state": asked["state"]}
    ((name, cookie),) = under_way(browser).items()
    browser.cookies.clear()
    assert (await browser.get(CALLBACK, params=good)).status_code == 403, "a link from another browser is refused"
    for forged in (cookie + "A", cookie.replace(".", ".1", 1), cookie[:-4], "x" * 43, ""):
        browser.cookies.clear()
        browser.cookies.set(name, forged, domain=urlsplit(CONSOLE_HOST).hostname or "")
        assert (await browser.get(CALLBACK, params=good)).status_code == 403, "a sign-in that was never started"
    assert provider.received == []
    browser.cookies.clear()
    asked = await begin(browser, provider)
    for fault in ({"state": "another"}, {"iss": "https://evil.example"}):
        wrong = {"code": "a-code", "state": asked["state"], **fault}
        assert (await browser.get(CALLBACK, params=wrong)).status_code == 403
    asked = await begin(browser, provider)
    refused = await browser.get(CALLBACK, params={"state": asked["state"], "error": "<script>alert(1)</script>"})
    assert refused.status_code == 403
    assert "alert(1)" not in refused.text
    assert (await browser.get(CALLBACK)).status_code == 403
    assert provider.received == []


async def test_each_tab_can_finish_its_own_sign_in(browser: httpx.AsyncClient, provider: FakeProvider) -> None:
    tabs = [(path, await begin(browser, provider, path)) for path in ("/keys", "/usage", "/jobs")]
    for path, asked in (tabs[1], tabs[0], tabs[2]):
        provider.nonce = asked["nonce"]
        response = await browser.get(CALLBACK, params={"code": "a-code", "state": asked["state"]})
        assert (response.status_code, response.headers["location"]) == (303, f"/console{path}")
        assert (await browser.get(f"/console{path}")).status_code == 200
    assert under_way(browser) == {}
    again = await browser.get(CALLBACK, params={"code": "a-code", "state": asked["state"]})
    assert (again.status_code, "Start again" in again.text) == (403, True)
    assert (await browser.get("/console/keys")).status_code == 200, "reloading the callback does not sign out"


async def test_pending_sign_ins_per_browser_are_limited(browser: httpx.AsyncClient, provider: FakeProvider) -> None:
    browser.cookies.set("loramux_oidc_nobody", "began this", domain=urlsplit(CONSOLE_HOST).hostname or "")
    begun = [await begin(browser, provider) for _ in range(MAX_UNDER_WAY + 3)]
    assert len(under_way(browser)) == MAX_UNDER_WAY
    response = await browser.get(CALLBACK, params={"code": "a-code", "state": begun[-1]["state"]})
    assert response.status_code == 303


@pytest.mark.parametrize("wanted", ["https://evil.example", "//evil.example", "/\\evil.example", "javascript:1"])
async def test_redirect_after_sign_in_stays_in_the_console(
    browser: httpx.AsyncClient, provider: FakeProvider, wanted: str
) -> None:
    asked = await begin(browser, provider, wanted)
    response = await browser.get(CALLBACK, params={"code": "a-code", "state": asked["state"]})
    assert response.headers["location"] == "/console/"


class Hours:
    def __init__(self, side: AdminSide, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed_s = 0.0
        database = side.services.database
        truth = database.now_us
        monkeypatch.setattr(database, "now_us", lambda *arguments: truth(*arguments) + int(self.passed_s * 1e6))


async def test_slow_sign_in_expires(
    browser: httpx.AsyncClient, provider: FakeProvider, console_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = Hours(console_side, monkeypatch)
    for waited, status in ((ATTEMPT_S - 5, 303), (ATTEMPT_S + 1, 403)):
        asked = await begin(browser, provider)
        hours.passed_s += waited
        response = await browser.get(CALLBACK, params={"code": "a-code", "state": asked["state"]})
        assert response.status_code == status


async def test_any_server_can_finish_a_sign_in(
    app: ASGIApp, provider: FakeProvider, console_side: AdminSide, console_app: ASGIApp
) -> None:
    other = console_of(console_side.services, settings_of(provider.url), console_app)
    async with client_of(app) as browser, client_of(other) as balanced:
        asked = await begin(browser, provider, "/keys")
        balanced.cookies = browser.cookies
        response = await balanced.get(CALLBACK, params={"code": "a-code", "state": asked["state"]})
        assert (response.status_code, response.headers["location"]) == (303, "/console/keys")
        browser.cookies = balanced.cookies
        assert (await browser.get("/console/keys")).status_code == 200


async def test_revoked_role_is_lost_within_minutes(
    browser: httpx.AsyncClient, provider: FakeProvider, console_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = Hours(console_side, monkeypatch)
    await sign_in(browser, provider)
    assert "New tenant" in (await browser.get("/console/tenants")).text
    provider.about = {"sub": "alice", "groups": ["viewers"]}
    hours.passed_s += CONFIRMED_S + 1
    page = await browser.get("/console/tenants")
    assert page.status_code == 200
    assert "New tenant" not in page.text
    provider.about = {"sub": "alice", "groups": []}
    hours.passed_s += CONFIRMED_S + 1
    assert (await browser.get("/console/tenants")).headers["location"].startswith("/console/login")


async def test_confirmation_dated_in_the_future_is_renewed(
    browser: httpx.AsyncClient, provider: FakeProvider, console_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = Hours(console_side, monkeypatch)
    await sign_in(browser, provider)
    hours.passed_s -= 45
    assert (await browser.get("/console/keys")).headers["location"].startswith("/console/oidc/login")


async def test_expired_access_token_is_renewed(
    browser: httpx.AsyncClient, provider: FakeProvider, console_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = Hours(console_side, monkeypatch)
    provider.refresh_token = "refresh-1"
    await sign_in(browser, provider)
    for number in (1, 2):
        provider.refused_tokens.add(provider.access_token)
        provider.access_token, provider.refresh_token = f"opaque-{number}", f"refresh-{number + 1}"
        hours.passed_s += CONFIRMED_S + 1
        assert (await browser.get("/console/keys")).status_code == 200
        assert provider.received[-1]["grant_type"] == "refresh_token"
        assert provider.received[-1]["refresh_token"] == f"refresh-{number}", "the session keeps the newest token"


@pytest.mark.parametrize("silence", ["no groups in userinfo", "no userinfo", "an access token that is over"])
async def test_session_without_userinfo_is_confirmed_by_signing_in_again(
    provider: FakeProvider,
    console_side: AdminSide,
    console_app: ASGIApp,
    monkeypatch: pytest.MonkeyPatch,
    silence: str,
) -> None:
    hours = Hours(console_side, monkeypatch)
    if silence == "no userinfo":
        provider.metadata = {"userinfo_endpoint": None}
    async with client_of(console_of(console_side.services, settings_of(provider.url), console_app)) as browser:
        if silence != "an access token that is over":
            provider.about = {"sub": "alice"}
        assert (await sign_in(browser, provider, groups=["ops"])).status_code == 303
        csrf = re.search(r'name="csrf-token" content="([^"]+)"', (await browser.get("/console/keys")).text)
        assert csrf
        if silence == "an access token that is over":
            provider.refused_tokens.add(provider.access_token)
        hours.passed_s += CONFIRMED_S + 1
        for _ in range(2):
            away = await browser.get("/console/usage?days=7")
            assert away.headers["location"] == "/console/oidc/login?next=%2Fusage%3Fdays%3D7"
        posted = await browser.post("/console/tenants", data={"csrf": csrf[1], "slug": "never"})
        assert posted.headers["location"].startswith("/console/oidc/login")
        sent = await browser.post("/console/playground/stream", headers={"x-csrf-token": csrf[1]})
        assert sent.status_code == 401
        provider.refused_tokens.clear()
        asked = await begin(browser, provider, "/usage?days=7")
        back = await browser.get(CALLBACK, params={"code": "a-code", "state": asked["state"]})
        assert back.headers["location"] == "/console/usage?days=7"
        assert (await browser.get("/console/usage?days=7")).status_code == 200


async def test_session_survives_provider_outage_only_for_a_while(
    browser: httpx.AsyncClient, provider: FakeProvider, console_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = Hours(console_side, monkeypatch)
    await sign_in(browser, provider)
    provider.is_broken = True
    hours.passed_s += CONFIRMED_S + 1
    num_asked = provider.num_asked
    for _ in range(3):
        assert (await browser.get("/console/keys")).status_code == 200
    assert provider.num_asked == num_asked + 1, "not on every request"
    hours.passed_s += ASK_EVERY_S + 1
    assert (await browser.get("/console/keys")).status_code == 200
    assert provider.num_asked == num_asked + 2
    hours.passed_s += UNCONFIRMED_S
    assert "/oidc/login" in (await browser.get("/console/keys")).headers["location"]


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param({"issuer": "https://evil.example"}, id="another issuer"),
        *(
            pytest.param({name: "http://evil.example/there"}, id=f"{name} without TLS")
            for name in (*REQUIRED_ENDPOINTS, *OPTIONAL_ENDPOINTS)
        ),
        pytest.param({"jwks_uri": 7}, id="invalid endpoint"),
        pytest.param({"jwks_uri": "https://[evil"}, id="malformed endpoint"),
    ],
)
async def test_provider_with_wrong_metadata_is_not_used(
    console_side: AdminSide, console_app: ASGIApp, provider: FakeProvider, metadata: dict[str, Any]
) -> None:
    provider.metadata = metadata
    async with client_of(console_of(console_side.services, settings_of(provider.url), console_app)) as browser:
        assert (await browser.get("/console/oidc/login")).status_code == 503


@pytest.mark.parametrize(
    "path", ["/.well-known/openid-configuration", "/jwks_uri", "/token_endpoint", "/userinfo_endpoint"]
)
async def test_no_redirect_of_the_provider_is_followed(
    console_side: AdminSide, console_app: ASGIApp, provider: FakeProvider, path: str
) -> None:
    provider.moved = path
    async with client_of(console_of(console_side.services, settings_of(provider.url), console_app)) as browser:
        response = await browser.get("/console/oidc/login")
        if response.status_code == 303:
            response = await sign_in(browser, provider)
        assert response.status_code in (403, 503)
    assert provider.num_followed == 0


async def test_provider_outage_is_reported_and_keys_still_work(console_side: AdminSide, console_app: ASGIApp) -> None:
    settings = settings_of("http://127.0.0.1:9")
    async with client_of(console_of(console_side.services, settings, console_app)) as browser:
        response = await browser.get("/console/oidc/login")
        assert response.status_code == 503
        assert "sign in with a key" in response.text


async def test_provider_failure_during_sign_in_is_reported(browser: httpx.AsyncClient, provider: FakeProvider) -> None:
    asked = await begin(browser, provider)
    provider.is_broken = True
    response = await browser.get(CALLBACK, params={"code": "a-code", "state": asked["state"]})
    assert response.status_code == 503
    assert "cannot be reached" in response.text


@pytest.mark.parametrize("rule", ["ops", "=platform:admin", "ops=root", "ops=tenant:admin", "ops=platform:read@acme"])
def test_invalid_role_rule_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="is not a role"):
        parse_rule(rule)


NODE_MODULES = os.environ.get("LORAMUX_TEST_OIDC", "")


@pytest.fixture
def real_provider() -> Iterator[str]:
    port = free_port()
    script = Path(__file__).parent / "real_provider.js"
    command = ["node", str(script), str(port), f"{CONSOLE_HOST}{CALLBACK}"]
    environment = {**os.environ, "NODE_PATH": str(Path(NODE_MODULES).absolute())}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "listening"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.campaign
@pytest.mark.skipif(not NODE_MODULES, reason="run make test-oidc to install the provider")
@pytest.mark.parametrize(
    ("person", "status"), [("alice+ops", 200), ("bob+viewers", 200), ("carol+nobody", 403)], ids=str
)
async def test_sign_in_with_a_real_provider(
    real_provider: str, console_side: AdminSide, person: str, status: int
) -> None:
    app = create_admin_app(replace(console_side.services, oidc=settings_of(real_provider)))
    async with client_of(app) as browser, httpx.AsyncClient(trust_env=False) as outside:
        location = (await browser.get("/console/oidc/login")).headers["location"]
        back = await at_provider(outside, location, person)
        response = await browser.get(back)
        if status != 200:
            assert response.status_code == status
            assert "no role" in response.text
            return
        assert (response.status_code, response.headers["location"]) == (303, "/console/")
        page = await browser.get("/console/")
        assert page.status_code == 200
        csrf = re.search(r'name="csrf-token" content="([^"]+)"', page.text)[1]  # type: ignore[index]
        out = await browser.post("/console/logout", data={"csrf": csrf})
        link = re.search(r'href="(http://127[^"]+)"', out.text)[1].replace("&amp;", "&")  # type: ignore[index]
        assert (await outside.get(link)).status_code == 200, "the provider accepts the sign-out"
        assert (await browser.get(back)).status_code == 403, "the callback cannot be replayed"


async def at_provider(outside: httpx.AsyncClient, location: str, person: str) -> str:
    """Sign in at the provider with name, password and consent, and return the URL that the provider redirects to."""
    for _ in range(12):
        if location.startswith(CONSOLE_HOST):
            return location
        response = await outside.get(location)
        if response.status_code == 200:
            action = re.search(r'action="([^"]+)"', response.text)[1]  # type: ignore[index]
            prompt = re.search(r'name="prompt" value="(\w+)"', response.text)[1]  # type: ignore[index]
            form = {"prompt": prompt, "login": person, "password": "any"}
            response = await outside.post(urljoin(location, action), data=form)
        assert response.status_code in (302, 303), response.text
        location = urljoin(location, response.headers["location"])
    raise AssertionError("the provider did not redirect back")
