from __future__ import annotations

import re

import pytest
from starlette.types import ASGIApp

from tests.admin.admin_side import AdminSide
from tests.admin.app_client import client_of
from tests.admin.console.signed_in_browser import Browser, first_match

pytestmark = pytest.mark.anyio
SECRET = r"(sk-lmx-[0-9A-Za-z]{16}-[0-9A-Za-z]{43})"


def once(page: str) -> str:
    return first_match(r'name="once" value="([^"]+)"', page)


async def test_rotation_sent_twice_keeps_the_secret_in_use(operator: Browser, console_side: AdminSide) -> None:
    services = console_side.services
    api_keys, tenant = services.accounts.api_keys, services.accounts.tenants.create("clicking")
    used = api_keys.create(tenant.id, "caller")
    path = f"/keys/{used.key.id}/rotate"
    fields = {"grace_s": "86400", "once": once((await operator.get(path)).text), "referer": path}
    new = first_match(SECRET, await operator.post(path, **fields))
    assert "notice" not in await operator.post(path, **fields)
    assert api_keys.authenticate(used.secret) is not None
    assert api_keys.authenticate(new) is not None


async def test_own_key_rotated_twice_by_one_form_keeps_the_session(
    console_app: ASGIApp, console_side: AdminSide
) -> None:
    own = console_side.services.accounts.api_keys.create(None, "own")
    async with client_of(console_app) as client:
        browser = Browser(client)
        await browser.sign_in(own.secret)
        path = f"/keys/{own.key.id}/rotate"
        fields = {"grace_s": "0", "once": once((await browser.get(path)).text), "referer": path}
        for _ in range(2):
            await browser.post(path, **fields)
        await browser.get("/keys")


async def test_key_form_sent_twice_makes_one_key(operator: Browser, console_side: AdminSide) -> None:
    tenant = console_side.services.accounts.tenants.create("doubling")
    referer = "/keys?tenant=doubling"
    fields = {"tenant": "doubling", "name": "one", "scope": "base", "once": once((await operator.get(referer)).text)}
    for _ in range(2):
        await operator.post("/keys", **fields, referer=referer)
    assert len(console_side.services.accounts.api_keys.list(tenant.id, 10).data) == 1


@pytest.mark.parametrize("tenant", [None, "unticked"], ids=["platform", "tenant"])
async def test_key_without_a_chosen_scope_is_refused(
    operator: Browser, console_side: AdminSide, tenant: str | None
) -> None:
    services = console_side.services
    owner = None if tenant is None else services.accounts.tenants.create(tenant).id
    before = len(services.accounts.api_keys.list(owner, 100).data)
    said = await operator.post("/keys", name="bare", **({} if tenant is None else {"tenant": tenant}))
    assert "the scopes of a" in said
    assert len(services.accounts.api_keys.list(owner, 100).data) == before


async def test_dialog_suggests_the_least_scope_of_a_platform_key(operator: Browser) -> None:
    ticked = re.findall(r'name="scope" value="([^"]+)" checked', (await operator.get("/keys")).text)
    assert ticked == ["platform:read"]


async def test_bar_names_the_role(console_app: ASGIApp, console_side: AdminSide) -> None:
    services = console_side.services
    tenant = services.accounts.tenants.create("roles")
    for scope, role in (("tenant:admin", "admin"), ("tenant:develop", "developer"), ("tenant:read", "viewer")):
        async with client_of(console_app) as client:
            browser = Browser(client)
            await browser.sign_in(services.accounts.api_keys.create(tenant.id, role, [scope]).secret)
            assert re.search(rf"roles\s*· {role}\s", (await browser.get("/")).text)
