from __future__ import annotations

from typing import Any

import pytest

from loramux.migrations.database import Database
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.errors import Conflict, InvalidRequest


def test_a_tenant_is_found_by_id_and_by_slug(clocked: Database) -> None:
    tenants = Tenants(clocked)
    made = tenants.create("acme", "Acme, Inc.")
    assert made.id.startswith("ten_")
    assert tenants.get(made.id) == made
    assert tenants.get("acme") == made
    assert tenants.get("other") is None


def test_slug_that_looks_like_an_id_does_not_shadow_the_id(clocked: Database) -> None:
    tenants = Tenants(clocked)
    first = tenants.create("first")
    impostor = tenants.create(first.id)
    assert tenants.get(first.id) == first
    assert tenants.get(impostor.id) == impostor


@pytest.mark.parametrize(
    "slug",
    ["", "Acme", "-a", ".a", "a b", "a/b", "a@1", "a:b", "é", "a" * 64, "a\n", "a\x00"],
    ids=repr,
)
def test_a_bad_slug_is_refused(clocked: Database, slug: str) -> None:
    tenants = Tenants(clocked)
    with pytest.raises(InvalidRequest) as caught:
        tenants.create(slug)
    assert (caught.value.code, caught.value.param) == ("invalid_slug", "slug")
    assert tenants.get(slug) is None


@pytest.mark.parametrize("shown", ["", "x" * 201, "a\x00b"], ids=["empty", "long", "NUL"])
def test_a_bad_display_name_is_refused(clocked: Database, shown: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Tenants(clocked).create("acme", shown)
    assert caught.value.param == "display_name"


def test_a_taken_slug_is_a_conflict(clocked: Database) -> None:
    tenants = Tenants(clocked)
    tenants.create("acme")
    with pytest.raises(Conflict) as caught:
        tenants.create("acme")
    assert (caught.value.status, caught.value.code) == (409, "tenant_exists")


def test_tenants_are_listed_newest_first_in_pages(clocked: Database) -> None:
    tenants = Tenants(clocked)
    made = sorted((tenants.create(slug).id for slug in ("a", "b", "c")), reverse=True)
    first = tenants.list(limit=2)
    assert [tenant.id for tenant in first.data] == made[:2]
    assert first.has_more
    rest = tenants.list(limit=2, after=made[1])
    assert [tenant.id for tenant in rest.data] == made[2:]
    assert not rest.has_more


def test_isolation_keys_are_stable_and_differ_between_tenants(clocked: Database) -> None:
    tenants = Tenants(clocked)
    acme, other = tenants.create("acme"), tenants.create("other")
    assert tenants.share(acme.id) == tenants.share(acme.id)
    assert tenants.share(acme.id).isolation_key != tenants.share(other.id).isolation_key
    assert tenants.share(acme.id).weight == 1


def test_share_that_was_read_before_a_change_is_not_used_even_if_it_is_stored_afterwards(clocked: Database) -> None:
    tenants = Tenants(clocked)
    acme = tenants.create("acme")

    class ChangedMeanwhile(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            tenants.forget_recent()
            super().__setitem__(key, value)

    tenants._shares = ChangedMeanwhile()
    share = tenants.share(acme.id)
    tenants.confirm_recent(clocked.now_us())
    assert tenants.recent_share(acme.id) is None
    tenants._shares = {}
    assert tenants.share(acme.id) == tenants.recent_share(acme.id) == share
