from __future__ import annotations

import threading

import httpx
import pytest
from sqlalchemy import update

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.key_authentication import KeyAuthentication, open_key_authentication
from loramux.platform.accounts.tenants import Tenant
from loramux.platform.errors import Unavailable
from tests.platform.clocked_databases import FakeClock
from tests.platform.gateways import Gateway

ADMIN_KEY = "an admin key of 32 characters or more"


class Tokens:
    """Resolves tokens with a dictionary, and counts the calls."""

    def __init__(self, **known: object) -> None:
        self.known = known
        self.asked: list[str] = []

    def key_id(self, token: str) -> str | None:
        self.asked.append(token)
        found = self.known.get(token)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[return-value]


def test_token_acts_as_its_key(clocked: Database, acme: Tenant) -> None:
    key = ApiKeys(clocked).create(acme.id, "ci", scopes=["base"]).key
    tokens = Tokens(badge=key.id)
    assert isinstance(tokens, KeyAuthentication)
    keys = ApiKeys(clocked, None, tokens)
    principal = keys.authenticate_bearer("badge")
    assert principal is not None
    assert (principal.key_id, principal.tenant_id, principal.scopes) == (key.id, acme.id, frozenset({"base"}))
    assert keys.recent("badge") == principal
    assert keys.authenticate_bearer("another") is None
    assert keys.authenticate("badge-2") is None, "only bearer tokens are resolved"
    assert ApiKeys(clocked).authenticate_bearer("badge") is None, "without an extension, tokens are unknown"


def test_api_keys_never_reach_the_extension(clocked: Database, acme: Tenant) -> None:
    created = ApiKeys(clocked).create(acme.id, "ci")
    tokens = Tokens()
    keys = ApiKeys(clocked, ADMIN_KEY, tokens)
    assert keys.authenticate_bearer(created.secret) is not None
    assert keys.authenticate_bearer(ADMIN_KEY) is not None
    assert keys.authenticate_bearer(created.secret[:-1]) is None
    assert keys.authenticate_bearer("sk-lmx-anything") is None
    assert tokens.asked == []


def test_token_of_a_key_that_cannot_be_used_is_refused(clocked: Database, acme: Tenant, clock: FakeClock) -> None:
    creator = ApiKeys(clocked)
    revoked, other = creator.create(acme.id, "revoked").key, creator.create(acme.id, "other").key
    expiring = creator.create(acme.id, "expiring", expires_us=clocked.now_us() + 1_000_000).key
    tokens = Tokens(revoked=revoked.id, expiring=expiring.id, other=other.id, gone="key_gone", operator="operator")
    keys = ApiKeys(clocked, ADMIN_KEY, tokens)
    assert keys.authenticate_bearer("expiring") is not None
    assert keys.authenticate_bearer("revoked") is not None
    keys.revoke(revoked.id)
    clock.advance(1)
    assert [keys.authenticate_bearer(token) for token in ("revoked", "expiring", "gone", "operator")] == [None] * 4
    with clocked.write() as connection:
        connection.execute(update(schema.tenants).values(state="suspended"))
    assert keys.authenticate_bearer("other") is None


def test_accepted_token_is_cached_for_five_seconds(clocked: Database, acme: Tenant, clock: FakeClock) -> None:
    key = ApiKeys(clocked).create(acme.id, "ci").key
    tokens = Tokens(badge=key.id)
    keys = ApiKeys(clocked, None, tokens)
    for _ in range(3):
        assert keys.authenticate_bearer("badge") is not None
    assert keys.recent("badge") is not None
    assert tokens.asked == ["badge"]
    tokens.known.clear()
    clock.advance(5)
    assert keys.recent("badge") is None
    assert keys.authenticate_bearer("badge") is None


@pytest.mark.parametrize("answer", [OSError("down"), 7, b"key_1"], ids=["an error", "a number", "bytes"])
def test_failing_extension_gives_a_503(clocked: Database, answer: object) -> None:
    keys = ApiKeys(clocked, None, Tokens(badge=answer))
    with pytest.raises(Unavailable, match="the token cannot be checked now") as refused:
        keys.authenticate_bearer("badge")
    assert (refused.value.code, refused.value.retry_after_s) == ("authentication_unavailable", 5.0)


def test_token_is_resolved_on_the_callers_thread(clocked: Database) -> None:
    threads: list[int] = []

    class Noted(Tokens):
        def key_id(self, token: str) -> str | None:
            threads.append(threading.get_ident())
            return None

    ApiKeys(clocked, None, Noted()).authenticate_bearer("badge")
    assert threads == [threading.get_ident()]


def test_without_a_name_there_is_no_extension() -> None:
    assert open_key_authentication(None) is None


@pytest.mark.anyio
async def test_requests_with_tokens_run_and_are_billed_to_the_key(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    api_keys = gateway.services.callers.api_keys
    key = api_keys.create(gateway.tenant.id, "badges").key
    monkeypatch.setattr(api_keys, "_tokens", Tokens(badge=key.id, broken=OSError("down")))

    async def complete(token: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        return await gateway.http.post(
            "/v1/completions", json={"model": "base", "prompt": "Hello", "max_tokens": 1}, headers=headers
        )

    assert (await complete("badge")).status_code == 200
    assert [event.api_key_id for event in gateway.usage()] == [key.id]
    assert (await complete("unknown")).status_code == 401
    failed = await complete("broken")
    assert (failed.status_code, failed.headers["retry-after"]) == (503, "5")
    assert failed.json()["error"]["code"] == "authentication_unavailable"
