from __future__ import annotations

import re
from typing import Any

import pytest
from sqlalchemy import select, update

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.keys import KeyChanges
from loramux.platform.accounts.principals import Principal
from loramux.platform.accounts.tenants import Tenant
from loramux.platform.errors import Conflict, InvalidRequest, NotFound

ADMIN_KEY = "an admin key of 32 characters or more"


def test_a_key_has_the_documented_form_and_its_secret_is_not_stored(clocked: Database, acme: Tenant) -> None:
    created = ApiKeys(clocked).create(acme.id, "ci")
    assert re.fullmatch(r"sk-lmx-[0-9A-Za-z]{16}-[0-9A-Za-z]{43}", created.secret)
    assert created.key.scopes == {"adapters", "base"}
    with clocked.read() as connection:
        row = connection.execute(select(schema.api_keys)).one()
    assert created.secret[-43:] not in repr(row)


def test_a_key_authenticates_its_tenant(clocked: Database, acme: Tenant) -> None:
    keys = ApiKeys(clocked)
    created = keys.create(acme.id, "ci", scopes=["base"])
    principal = Principal(created.key.id, acme.id, "acme", frozenset({"base"}))
    assert keys.authenticate(created.secret) == principal
    assert keys.authenticate(created.secret) == principal


@pytest.mark.parametrize(
    "spoil",
    [
        lambda secret: "",
        lambda secret: secret[:-1],
        lambda secret: secret + "x",
        lambda secret: secret[:-1] + ("a" if secret[-1] != "a" else "b"),
        lambda secret: secret.replace("sk-lmx-", "sk-lmx-0", 1),
        lambda secret: secret + "\n",
        lambda secret: "sk-" + "\x00" * 60,
        lambda secret: "\ud800" * 40,
    ],
    ids=["empty", "short", "long", "another secret", "another id", "newline", "NUL", "surrogates"],
)
def test_wrong_keys_are_rejected(clocked: Database, acme: Tenant, spoil: Any) -> None:
    keys = ApiKeys(clocked, ADMIN_KEY)
    assert keys.authenticate(spoil(keys.create(acme.id, "ci").secret)) is None


def test_revoked_key_stops_at_once_here_and_within_five_seconds_elsewhere(
    clocked: Database, acme: Tenant, clock: Any
) -> None:
    here, elsewhere = ApiKeys(clocked), ApiKeys(clocked)
    created = here.create(acme.id, "ci")
    assert here.authenticate(created.secret)
    assert elsewhere.authenticate(created.secret)
    revoked = here.revoke(created.key.id)
    assert revoked is not None
    assert revoked.revoked_us == clock.now_us
    assert here.authenticate(created.secret) is None
    clock.advance(5)
    assert elsewhere.authenticate(created.secret) is None
    again = here.revoke(created.key.id)
    assert again == revoked
    assert here.revoke("key_none") is None


def test_expired_key_is_rejected_even_if_cached(clocked: Database, acme: Tenant, clock: Any) -> None:
    keys = ApiKeys(clocked)
    created = keys.create(acme.id, "ci", expires_us=clock.now_us + 2_000_000)
    assert keys.authenticate(created.secret)
    clock.advance(2)
    assert keys.authenticate(created.secret) is None


def test_suspended_tenants_key_is_rejected_within_five_seconds(clocked: Database, acme: Tenant, clock: Any) -> None:
    keys = ApiKeys(clocked)
    created = keys.create(acme.id, "ci")
    assert keys.authenticate(created.secret)
    with clocked.write() as connection:
        connection.execute(update(schema.tenants).values(state="suspended"))
    clock.advance(5)
    assert keys.authenticate(created.secret) is None


def test_operator_key_is_an_administrator_without_a_tenant(clocked: Database) -> None:
    keys = ApiKeys(clocked, ADMIN_KEY)
    principal = keys.authenticate(ADMIN_KEY)
    assert principal is not None
    assert principal.is_platform_admin
    assert principal.tenant_id is None
    assert keys.authenticate(ADMIN_KEY + "x") is None
    with pytest.raises(ValueError, match="32 characters"):
        ApiKeys(clocked, "short")


def test_has_platform_admin_requires_a_usable_admin_key(clocked: Database, acme: Tenant, clock: Any) -> None:
    keys = ApiKeys(clocked)
    keys.create(acme.id, "a tenant's")
    keys.create(None, "a reader's", scopes=["platform:read"])
    assert not keys.has_platform_admin()
    created = keys.create(None, "root", expires_us=clock.now_us + 1_000_000)
    assert keys.has_platform_admin()
    clock.advance(1)
    assert not keys.has_platform_admin()
    assert ApiKeys(clocked, ADMIN_KEY).has_platform_admin()
    assert created.key.tenant_id is None


def test_last_admin_key_is_kept_unless_the_operator_has_a_key(clocked: Database, acme: Tenant) -> None:
    keys = ApiKeys(clocked)
    first, second = keys.create(None, "root").key, keys.create(None, "root too").key
    assert keys.revoke(first.id) is not None
    with pytest.raises(Conflict) as caught:
        keys.revoke(second.id)
    assert caught.value.code == "last_admin_key"
    with pytest.raises(Conflict) as caught:
        keys.update(second.id, KeyChanges(scopes=("platform:read",)), lambda key: None)
    assert caught.value.code == "last_admin_key"
    assert keys.revoke(first.id) is not None
    assert keys.has_platform_admin()
    revoked = ApiKeys(clocked, ADMIN_KEY).revoke(second.id)
    assert revoked is not None
    assert revoked.revoked_us is not None


def test_old_secret_works_until_the_grace_period_ends(clocked: Database, acme: Tenant, clock: Any) -> None:
    keys = ApiKeys(clocked)
    created = keys.create(acme.id, "ci")
    assert keys.authenticate(created.secret) is not None
    rotated = keys.rotate(created.key.id, 60_000_000)
    assert rotated is not None
    principals = [keys.authenticate(secret) for secret in (created.secret, rotated.secret)]
    assert [principal and principal.key_id for principal in principals] == [created.key.id, created.key.id]
    clock.advance(59)
    assert keys.authenticate(created.secret) is not None
    clock.advance(1)
    assert keys.authenticate(created.secret) is None
    assert keys.authenticate(rotated.secret) is not None
    at_once = keys.rotate(created.key.id, 0)
    assert at_once is not None
    assert keys.authenticate(rotated.secret) is None
    assert keys.authenticate(at_once.secret) is not None
    keys.revoke(created.key.id)
    with pytest.raises(Conflict) as caught:
        keys.rotate(created.key.id, 0)
    assert caught.value.code == "api_key_revoked"


def test_clock_jumps_do_not_extend_the_grace_period(clocked: Database, acme: Tenant, clock: Any) -> None:
    keys = ApiKeys(clocked)
    early, created = keys.create(acme.id, "early"), keys.create(acme.id, "ci")
    keys.rotate(early.key.id, 60_000_000)
    clock.advance(7 * 86_400)
    assert keys.rotate(created.key.id, 60_000_000) is not None
    clock.advance(-7 * 86_400)
    assert keys.restart_grace_periods() == 1
    assert keys.restart_grace_periods() == 0
    clock.advance(59)
    assert [keys.authenticate(key.secret) is not None for key in (early, created)] == [True, True]
    clock.advance(1)
    assert [keys.authenticate(key.secret) is not None for key in (early, created)] == [False, False]
    clock.advance(7 * 86_400 - 30)
    assert keys.authenticate(created.secret) is None, "it does not come back"


def test_rotation_whose_answer_was_lost_is_repeated_without_ending_the_grace_period(
    clocked: Database, acme: Tenant, clock: Any
) -> None:
    keys = ApiKeys(clocked)
    created = keys.create(acme.id, "ci")
    with pytest.raises(Conflict, match="not rotated within the last hour") as caught:
        keys.rotate(created.key.id, 60_000_000, keep_previous=True)
    assert caught.value.code == "no_previous_secret"
    lost = keys.rotate(created.key.id, 60_000_000)
    clock.advance(30)
    again = keys.rotate(created.key.id, 3600_000_000, keep_previous=True)
    assert lost is not None
    assert again is not None
    assert again.key.previous_until_us == lost.key.previous_until_us
    accepted = [keys.authenticate(secret) is not None for secret in (created.secret, lost.secret, again.secret)]
    assert accepted == [True, False, True]
    clock.advance(30)
    assert [keys.authenticate(secret) is not None for secret in (created.secret, again.secret)] == [False, True]
    with pytest.raises(Conflict, match="still valid") as caught:
        keys.rotate(created.key.id, 60_000_000, keep_previous=True)
    assert caught.value.code == "no_previous_secret"


def test_a_secret_in_use_is_not_replaced_as_lost(clocked: Database, acme: Tenant, clock: Any) -> None:
    """The rotation whose answer is missing never happened: the last one was a day ago."""
    keys = ApiKeys(clocked)
    created = keys.create(acme.id, "ci")
    used = keys.rotate(created.key.id, 7 * 86_400_000_000)
    assert used is not None
    clock.advance(86_400)
    with pytest.raises(Conflict, match="not rotated within the last hour") as caught:
        keys.rotate(created.key.id, 60_000_000, keep_previous=True)
    assert caught.value.code == "no_previous_secret"
    assert [keys.authenticate(secret) is not None for secret in (created.secret, used.secret)] == [True, True]


def test_second_rotation_ends_the_first_grace_period(clocked: Database, acme: Tenant) -> None:
    keys = ApiKeys(clocked)
    created = keys.create(acme.id, "ci")
    second, third = (keys.rotate(created.key.id, 60_000_000) for _ in range(2))
    assert second is not None
    assert third is not None
    opens = [keys.authenticate(secret) is not None for secret in (created.secret, second.secret, third.secret)]
    assert opens == [False, True, True]


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"name": "a\x00"}, "name"),
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "scopes": ["platform:admin"]}, "scopes"),
        ({"name": "x", "scopes": ["base", "everything"]}, "scopes"),
        ({"name": "x", "expires_us": 1}, "expires"),
    ],
    ids=["no name", "long name", "NUL", "no scope", "platform scope", "unknown scope", "in the past"],
)
def test_invalid_key_error_names_the_field(
    clocked: Database, acme: Tenant, arguments: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ApiKeys(clocked).create(acme.id, **arguments)
    assert caught.value.param == param


def test_a_key_of_an_unknown_tenant_is_refused(clocked: Database) -> None:
    with pytest.raises(NotFound):
        ApiKeys(clocked).create("ten_none", "ci")


def test_keys_are_listed_by_owner(clocked: Database, acme: Tenant) -> None:
    keys = ApiKeys(clocked)
    own, platform = keys.create(acme.id, "ci").key, keys.create(None, "root").key
    assert keys.list(acme.id, limit=10).data == (own,)
    assert keys.list(None, limit=10).data == (platform,)
    assert keys.get(own.id) == own
