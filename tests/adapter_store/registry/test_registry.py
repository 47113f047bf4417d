from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import select

from loramux.adapter_store.errors import (
    AdapterExists,
    InvalidName,
    TenantNotFound,
)
from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import keyset_page
from loramux.migrations.schema import adapters
from tests.adapter_store.registry.bare_versions import Versions


def test_adapter_is_found_by_id_and_name(registry: AdapterRegistry, make_tenant: Callable[[str], str]) -> None:
    acme, globex = make_tenant("acme"), make_tenant("globex")
    adapter = registry.create_adapter(acme, "support")
    assert adapter.tenant_slug == "acme"
    assert registry.get_adapter(adapter.id) == adapter
    assert registry.find_adapter(acme, "support") == adapter
    assert registry.find_adapter(globex, "support") is None
    assert registry.create_adapter(globex, "support").id != adapter.id


def test_adapter_needs_a_tenant_and_a_unique_name(registry: AdapterRegistry, make_tenant: Callable[[str], str]) -> None:
    acme = make_tenant("acme")
    registry.create_adapter(acme, "support")
    with pytest.raises(AdapterExists):
        registry.create_adapter(acme, "support")
    with pytest.raises(TenantNotFound):
        registry.create_adapter(new_id("ten"), "support")
    with pytest.raises(InvalidName) as refused:
        registry.create_adapter(acme, "demo-base")
    assert refused.value.code == "reserved_name"


@pytest.mark.parametrize("name", ["", "A", "-a", "a b", "a/b", "a:b", "a@1", "a" * 64, "ä", "a\0", "a\n", "\ud800"])
def test_malformed_name_is_refused_and_resolves_to_nothing(
    registry: AdapterRegistry, make_tenant: Callable[[str], str], name: str
) -> None:
    acme = make_tenant("acme")
    with pytest.raises(InvalidName) as refused:
        registry.create_adapter(acme, name)
    assert (refused.value.code, refused.value.param) == ("invalid_name", "name")
    assert registry.find_adapter(acme, name) is None
    assert registry.get_adapter(name) is None
    assert registry.resolve("acme", name) is None
    assert registry.resolve(name, "support") is None
    with pytest.raises(TenantNotFound):
        registry.create_adapter(name, "support")


def test_the_first_ready_version_becomes_the_default(
    registry: AdapterRegistry, versions: Versions, make_tenant: Callable[[str], str]
) -> None:
    acme = make_tenant("acme")
    adapter = registry.create_adapter(acme, "support")
    versions.add(adapter.id, "a", is_ready=False)
    assert registry.resolve("acme", "support") is None
    assert registry.list_models(acme) == []
    second = versions.add(adapter.id, "b")
    versions.add(adapter.id, "c")
    ref = registry.resolve("acme", "support")
    assert ref is not None
    assert (ref.tenant_id, ref.tenant_slug, ref.adapter_id, ref.adapter_name) == (acme, "acme", adapter.id, "support")
    assert (ref.version_id, ref.version, ref.digest, ref.max_rank) == (second.id, 2, "b" * 64, 8)
    assert registry.list_models(acme) == [ref]


def test_a_resolved_version_has_its_invocation_tokens(
    registry: AdapterRegistry, versions: Versions, make_tenant: Callable[[str], str]
) -> None:
    acme = make_tenant("acme")
    adapter = registry.create_adapter(acme, "support")
    versions.add(adapter.id, "a", tokens=(5, 6))
    versions.add(adapter.id, "b")
    found = [registry.resolve("acme", "support", **name) for name in ({}, {"version": 1}, {"version": 2})]
    assert [ref.invocation_tokens for ref in found if ref is not None] == [(5, 6), (5, 6), ()]
    assert [ref.invocation_tokens for ref in registry.list_models(acme)] == [(5, 6)]
    listed = [registry.get_version(adapter.id, number) for number in (1, 2)]
    assert [version.invocation_tokens for version in listed if version is not None] == [[5, 6], None]


def test_name_can_include_a_version(
    registry: AdapterRegistry, versions: Versions, make_tenant: Callable[[str], str]
) -> None:
    adapter = registry.create_adapter(make_tenant("acme"), "support")
    versions.add(adapter.id, "a", digest="ab" * 32)
    versions.add(adapter.id, "b", digest="ab" * 31 + "cd")
    versions.add(adapter.id, "c", digest="ab" * 32)
    versions.add(adapter.id, "d", is_ready=False)
    AdapterAliases(registry.database).set(adapter.id, "canary", {3: 1})

    def resolved(**which: object) -> int | None:
        ref = registry.resolve("acme", "support", **which)  # type: ignore[arg-type]
        return ref.version if ref else None

    assert resolved() == 1
    assert resolved(version=2) == 2
    assert resolved(version=4) is None, "rejected"
    assert resolved(version=5) is None
    assert resolved(version=10**30) is None
    assert resolved(version=0) is None
    assert resolved(alias="canary") == 3
    assert resolved(alias="nightly") is None
    assert resolved(digest_prefix="ab" * 31 + "cd") == 2
    assert resolved(digest_prefix="ab" * 32) == 3, "the newest of equal versions"
    assert resolved(digest_prefix="ab" * 6) is None, "two digests match"
    assert resolved(digest_prefix="ab" * 5) is None, "too short"
    assert resolved(digest_prefix="%" * 12) is None


def test_versions_are_counted_and_described(
    registry: AdapterRegistry, versions: Versions, make_tenant: Callable[[str], str]
) -> None:
    adapter = registry.create_adapter(make_tenant("acme"), "support")
    ready = versions.add(adapter.id, "a")
    rejected = versions.add(adapter.id, "b", is_ready=False)
    assert registry.get_version(adapter.id, 1) == ready
    assert (ready.state, ready.max_rank, ready.num_pages, ready.canonical_bytes) == ("ready", 8, 3, 1000)
    assert ready.ready_us is not None
    assert ready.ready_us >= ready.created_us
    assert (rejected.number, rejected.state, rejected.digest) == (2, "rejected", None)
    assert rejected.report["error"]["code"] == "not_finite"
    assert registry.get_version(adapter.id, 3) is None
    assert {version.number for version in registry.list_versions(adapter.id, 10).data} == {1, 2}


def test_lists_are_paginated_in_both_directions(registry: AdapterRegistry, make_tenant: Callable[[str], str]) -> None:
    acme, globex = make_tenant("acme"), make_tenant("globex")
    made = [registry.create_adapter(tenant, f"a{number}").id for number in range(5) for tenant in (acme, globex)]
    newest_first = sorted(made, reverse=True)
    assert [adapter.id for adapter in registry.list_adapters(None, 100).data] == newest_first
    own = [adapter.id for adapter in registry.list_adapters(acme, 100).data]
    assert len(own) == 5
    first = registry.list_adapters(acme, 2)
    assert ([adapter.id for adapter in first.data], first.has_more) == (own[:2], True)
    second = registry.list_adapters(acme, 2, after=own[1])
    assert ([adapter.id for adapter in second.data], second.has_more) == (own[2:4], True)
    last = registry.list_adapters(acme, 2, after=own[3])
    assert ([adapter.id for adapter in last.data], last.has_more) == (own[4:], False)
    back = registry.list_adapters(acme, 2, before=own[4])
    assert ([adapter.id for adapter in back.data], back.has_more) == (own[2:4], True)
    between = registry.list_adapters(acme, 5, after=own[0], before=own[3])
    assert ([adapter.id for adapter in between.data], between.has_more) == (own[1:3], False)
    assert registry.list_adapters(new_id("ten"), 5).data == ()


@pytest.mark.parametrize("position", ["a\0", "\ud800", "ä", "a\n"])
def test_page_position_must_be_text(database: Database, position: str) -> None:
    with database.read() as connection, pytest.raises(ValueError, match="identifiers"):
        keyset_page(connection, select(adapters), adapters.c.id, tuple, 1, position, None)
    with database.read() as connection, pytest.raises(ValueError, match="limit"):
        keyset_page(connection, select(adapters), adapters.c.id, tuple, 0, None, None)
