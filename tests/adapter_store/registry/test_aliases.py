from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import update

from loramux.adapter_store.errors import (
    AdapterNotFound,
    AliasChanged,
    AliasNotFound,
    InvalidAlias,
    InvalidName,
    NothingToRollBack,
    VersionInUse,
    VersionNotFound,
    VersionNotReady,
)
from loramux.adapter_store.formats.files.file_names import VOCABULARY_FILE
from loramux.adapter_store.formats.version_files.adapter_task import AdapterTask
from loramux.adapter_store.registry.aliases import MAX_TARGETS, MAX_WEIGHT, AdapterAliases
from loramux.adapter_store.registry.records import Adapter, CanaryRule
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import adapter_versions
from tests.adapter_store.registry.bare_versions import Versions
from tests.platform.ready_adapters import add_ready_adapter


@dataclass(frozen=True)
class Named:
    """An adapter with ready versions 1, 2 and 3, and a rejected version 4."""

    adapter: Adapter
    aliases: AdapterAliases
    registry: AdapterRegistry
    states: VersionStates

    def weights(self, name: str = "default") -> dict[int, int]:
        return {target.number: target.weight for target in self.aliases.get(self.adapter.id, name).targets}

    def drawn(self, num_texts: int, name: str | None = None) -> dict[str, int]:
        found = {}
        for number in range(num_texts):
            ref = self.registry.resolve("acme", "support", alias=name, sticky=f"user {number}")
            assert ref is not None
            found[f"user {number}"] = ref.version
        return found


@pytest.fixture
def named(
    database: Database, registry: AdapterRegistry, versions: Versions, make_tenant: Callable[[str], str]
) -> Named:
    adapter = registry.create_adapter(make_tenant("acme"), "support")
    for mark in "abc":
        versions.add(adapter.id, mark)
    versions.add(adapter.id, "d", is_ready=False)
    return Named(adapter, AdapterAliases(database), registry, VersionStates(database, registry))


def test_only_the_first_ready_version_becomes_the_default(named: Named) -> None:
    assert named.weights() == {1: 100}
    (change,) = named.aliases.history(named.adapter.id, "default", 10).data
    assert (change.action, change.actor, change.revision) == ("set", "system", 1)
    assert set(named.drawn(5).values()) == {1}


def test_alias_accepts_only_ready_versions(named: Named) -> None:
    adapter_id, aliases = named.adapter.id, named.aliases
    aliases.set(adapter_id, "stable", {1: 1})
    with pytest.raises(VersionNotReady):
        aliases.set(adapter_id, "default", {4: 1})
    with pytest.raises(VersionNotReady):
        aliases.set(adapter_id, "default", {2: 1, 4: 1})
    for number in (5, 0, -1, 2**40):
        with pytest.raises(VersionNotFound):
            aliases.set(adapter_id, "default", {number: 1})
    with pytest.raises(AdapterNotFound):
        aliases.set(new_id("ada"), "default", {1: 1})
    with pytest.raises(InvalidName):
        aliases.set(adapter_id, "not a name", {1: 1})
    for weights in ({}, dict.fromkeys(range(1, MAX_TARGETS + 2), 1), {1: 0}, {1: -1}, {1: MAX_WEIGHT + 1}):
        with pytest.raises(InvalidAlias):
            aliases.set(adapter_id, "default", weights)
    assert named.weights() == {1: 100}
    assert {name: alias.revision for name, alias in aliases.of([adapter_id])[adapter_id].items()} == {
        "default": 1,
        "stable": 1,
    }


def test_weights_split_requests_and_each_text_keeps_its_version(named: Named) -> None:
    named.aliases.set(named.adapter.id, "default", {1: 90, 3: 10})
    before = named.drawn(200)
    assert named.drawn(200) == before
    # Version 3 is expected 20 times, with a standard deviation of 4.2, and later 60 times, with one of 6.5.
    assert 1 <= Counter(before.values())[3] < 45
    assert set(before.values()) == {1, 3}
    named.aliases.set(named.adapter.id, "default", {1: 70, 3: 30})
    after = named.drawn(200)
    assert 25 < Counter(after.values())[3] < 100
    assert all(after[text] == 3 for text, version in before.items() if version == 3), (
        "a growing canary keeps its callers"
    )
    # Different aliases draw independently, so that the new version does not always go to the same callers.
    named.aliases.set(named.adapter.id, "beta", {1: 70, 3: 30})
    assert named.drawn(200, "beta") != after


def test_rollback_can_be_undone(named: Named) -> None:
    adapter_id, aliases = named.adapter.id, named.aliases
    for undo in (aliases.rollback, aliases.targets_at):
        with pytest.raises(NothingToRollBack, match="has not been moved yet"):
            undo(adapter_id, "default")
    aliases.set(adapter_id, "default", {1: 80, 2: 20}, actor="key_a")
    aliases.set(adapter_id, "default", {2: 1}, actor="key_a")
    assert aliases.rollback(adapter_id, "default", actor="key_b").revision == 4
    assert named.weights() == {1: 80, 2: 20}
    aliases.rollback(adapter_id, "default")
    assert named.weights() == {2: 1}, "the rollback of a rollback"
    aliases.rollback(adapter_id, "default", revision=1)
    assert named.weights() == {1: 100}
    for revision in (0, -1, 6, 7, 2**40):
        with pytest.raises(NothingToRollBack):
            aliases.rollback(adapter_id, "default", revision=revision)
    history = aliases.history(adapter_id, "default", 100).data
    assert [(change.revision, change.action, change.actor) for change in history] == [
        (6, "rollback", "system"),
        (5, "rollback", "system"),
        (4, "rollback", "key_b"),
        (3, "set", "key_a"),
        (2, "set", "key_a"),
        (1, "set", "system"),
    ]
    assert [(target.number, target.weight) for target in history[4].targets] == [(1, 80), (2, 20)]
    with pytest.raises(AliasNotFound):
        aliases.rollback(adapter_id, "nightly")


def test_rollback_passes_over_revisions_that_moved_nothing(named: Named) -> None:
    aliases, adapter_id = named.aliases, named.adapter.id
    aliases.set(adapter_id, "default", {1: 100}, overflow="base")
    for undo in (aliases.rollback, aliases.targets_at):
        with pytest.raises(NothingToRollBack, match="has not been moved yet"):
            undo(adapter_id, "default")
    aliases.set(adapter_id, "default", {1: 90, 2: 10}, canary=CanaryRule(max_error_rate=0.1))
    changed = aliases.set(adapter_id, "default", {1: 9, 2: 1}, canary=CanaryRule(max_error_rate=0.2))
    assert (changed.revision, changed.canary and changed.canary.versions) == (4, (2,))
    aliases.set(adapter_id, "default", {1: 9, 2: 1}, overflow=None)
    assert [target.number for target in aliases.targets_at(adapter_id, "default")] == [1]
    assert aliases.rollback(adapter_id, "default").revision == 6
    assert named.weights() == {1: 100}
    aliases.rollback(adapter_id, "default")
    assert named.weights() == {1: 9, 2: 1}, "the rollback of a rollback"
    aliases.set(adapter_id, "default", {1: 9, 2: 1}, share_base_cache=256)
    assert aliases.rollback(adapter_id, "default").share_base_cache is None
    assert named.weights() == {1: 9, 2: 1}, "sharing is restored on its own"


def test_rollback_to_an_unavailable_version_is_refused(named: Named) -> None:
    named.aliases.set(named.adapter.id, "default", {2: 1})
    named.states.archive(named.adapter.id, 1)
    with pytest.raises(VersionNotReady):
        named.aliases.rollback(named.adapter.id, "default")
    assert named.weights() == {2: 1}


def test_concurrent_alias_changes_cannot_overwrite_each_other(named: Named) -> None:
    adapter_id, outcomes = named.adapter.id, []
    named.aliases.set(adapter_id, "default", {2: 1})

    def move(number: int) -> None:
        try:
            if number:
                moved = named.aliases.set(adapter_id, "default", {number: 1}, expected_revision=2)
            else:
                moved = named.aliases.rollback(adapter_id, "default", expected_revision=2)
            outcomes.append(moved.revision)
        except AliasChanged:
            outcomes.append("changed")

    movers = [threading.Thread(target=move, args=(index % 3,)) for index in range(6)]
    for mover in movers:
        mover.start()
    for mover in movers:
        mover.join(30)
    assert sorted(map(str, outcomes)) == ["3", *["changed"] * 5]
    assert named.aliases.set(adapter_id, "new", {1: 1}, expected_revision=0).revision == 1
    with pytest.raises(AliasChanged):
        named.aliases.set(adapter_id, "new", {1: 1}, expected_revision=0)


def test_any_alias_but_the_default_can_be_removed(named: Named) -> None:
    adapter_id, aliases = named.adapter.id, named.aliases
    aliases.set(adapter_id, "canary", {2: 1})
    aliases.remove(adapter_id, "canary")
    for missing in ("canary", "not a name", "\0"):
        with pytest.raises(AliasNotFound):
            aliases.get(adapter_id, missing)
    with pytest.raises(AliasNotFound):
        aliases.remove(adapter_id, "canary")
    with pytest.raises(InvalidAlias):
        aliases.remove(adapter_id, "default")
    assert named.registry.resolve("acme", "support", alias="canary") is None


def test_alias_removal_with_a_stale_revision_is_refused(named: Named) -> None:
    adapter_id, aliases = named.adapter.id, named.aliases
    aliases.set(adapter_id, "canary", {2: 1})
    aliases.set(adapter_id, "canary", {3: 1})
    for stale in (0, 1, 3):
        with pytest.raises(AliasChanged):
            aliases.remove(adapter_id, "canary", stale)
    assert named.weights("canary") == {3: 1}
    aliases.remove(adapter_id, "canary", 2)
    with pytest.raises(AliasNotFound):
        aliases.remove(adapter_id, "canary", 2)


def test_recreated_alias_continues_the_revision_numbers(named: Named) -> None:
    adapter_id, aliases = named.adapter.id, named.aliases
    aliases.set(adapter_id, "canary", {1: 1})
    aliases.set(adapter_id, "canary", {2: 1})
    aliases.remove(adapter_id, "canary", 2)
    assert aliases.set(adapter_id, "canary", {3: 1}, expected_revision=0).revision == 3
    for seen in (1, 2):
        with pytest.raises(AliasChanged):
            aliases.set(adapter_id, "canary", {1: 1}, expected_revision=seen)
        with pytest.raises(AliasChanged):
            aliases.remove(adapter_id, "canary", seen)
    assert [change.revision for change in aliases.history(adapter_id, "canary", 10).data] == [3, 2]
    back = aliases.rollback(adapter_id, "canary")
    assert (back.revision, [target.number for target in back.targets]) == (4, [2])
    aliases.remove(adapter_id, "canary")
    assert aliases.set(adapter_id, "canary", {1: 1}).revision == 5


def test_concurrent_alias_change_and_removal_refuse_one(named: Named) -> None:
    adapter_id, aliases, outcomes = named.adapter.id, named.aliases, []
    aliases.set(adapter_id, "canary", {2: 1})
    together = threading.Barrier(2)

    def change(is_moving: bool) -> None:
        together.wait(30)
        try:
            if is_moving:
                aliases.set(adapter_id, "canary", {3: 1}, expected_revision=1)
            else:
                aliases.remove(adapter_id, "canary", 1)
            outcomes.append("moved" if is_moving else "removed")
        except AliasChanged:
            outcomes.append("changed")

    changers = [threading.Thread(target=change, args=(is_moving,)) for is_moving in (True, False)]
    for changer in changers:
        changer.start()
    for changer in changers:
        changer.join(30)
    left = aliases.of([adapter_id])[adapter_id].get("canary")
    assert sorted(outcomes) == (["changed", "moved"] if left else ["changed", "removed"])


def test_archived_version_is_not_served_until_restored(named: Named) -> None:
    adapter_id, states = named.adapter.id, named.states
    with pytest.raises(VersionInUse):
        states.archive(adapter_id, 1)
    assert states.archive(adapter_id, 2).state == "archived"
    assert states.archive(adapter_id, 2).state == "archived", "repeating it changes nothing"
    assert named.registry.resolve("acme", "support", version=2) is None
    assert states.unserved_digests(adapter_id, 2) == ["b" * 64]
    assert states.restore(adapter_id, 2, ("archived",)).state == "ready"
    assert states.unserved_digests(adapter_id) == []
    with pytest.raises(VersionNotReady):
        states.archive(adapter_id, 4)
    with pytest.raises(VersionNotReady):
        states.restore(adapter_id, 4, ("archived", "quarantined"))
    for number in (0, 9, 2**40):
        with pytest.raises(VersionNotFound):
            states.archive(adapter_id, number)


def test_aliases_drop_a_quarantined_version(named: Named) -> None:
    adapter_id, states = named.adapter.id, named.states
    named.aliases.set(adapter_id, "default", {1: 50, 2: 50})
    assert set(named.drawn(60).values()) == {1, 2}
    states.quarantine(adapter_id, 2)
    assert set(named.drawn(60).values()) == {1}
    with pytest.raises(VersionNotReady):
        states.restore(adapter_id, 2, ("archived",))
    states.quarantine(adapter_id, 1)
    assert named.registry.resolve("acme", "support") is None, "only the version that the alias names is served"
    states.restore(adapter_id, 2, ("archived", "quarantined"))
    assert set(named.drawn(10).values()) == {2}


def test_disabled_adapter_is_not_served_but_keeps_its_versions(
    named: Named, versions: Versions, make_tenant: Callable[[str], str]
) -> None:
    states, registry = named.states, named.registry
    assert states.unserved_digests(named.adapter.id) == []
    disabled = states.set_disabled(named.adapter.id, True)
    assert disabled.disabled_us is not None
    assert states.set_disabled(named.adapter.id, True).disabled_us == disabled.disabled_us
    for which in ({}, {"version": 2}, {"digest_prefix": "a" * 64}, {"alias": "default"}):
        assert registry.resolve("acme", "support", **which) is None  # type: ignore[arg-type]
    assert registry.list_models(named.adapter.tenant_id) == []
    # A digest that another adapter also serves stays loaded.
    twin = registry.create_adapter(make_tenant("globex"), "twin")
    versions.add(twin.id, "a")
    assert states.unserved_digests(named.adapter.id) == ["b" * 64, "c" * 64]
    assert states.set_disabled(named.adapter.id, False).disabled_us is None
    assert named.weights() == {1: 100}
    assert set(named.drawn(3).values()) == {1}
    with pytest.raises(AdapterNotFound):
        states.set_disabled(new_id("ada"), True)


def test_overflow_stays_until_it_is_changed(named: Named) -> None:
    aliases, adapter_id = named.aliases, named.adapter.id
    assert aliases.set(adapter_id, "default", {1: 1}, overflow="base").overflow == "base"
    assert aliases.set(adapter_id, "default", {2: 1}).overflow == "base"
    assert aliases.advance(adapter_id, "default", 3, {2})[0].overflow == "base"
    assert aliases.rollback(adapter_id, "default").overflow == "base"
    assert aliases.get(adapter_id, "default").overflow == "base"
    assert aliases.set(adapter_id, "default", {2: 1}, overflow=None).overflow is None


def test_sharing_the_bases_cache_stays_until_it_is_changed(named: Named) -> None:
    aliases, adapter_id = named.aliases, named.adapter.id

    def shared(**name: object) -> int | None:
        ref = named.registry.resolve("acme", "support", **name)  # type: ignore[arg-type]
        assert ref is not None
        return ref.share_base_cache

    assert shared() is None
    assert aliases.set(adapter_id, "default", {1: 1}, share_base_cache=256).share_base_cache == 256
    assert aliases.set(adapter_id, "default", {1: 1, 2: 1}, overflow="base").share_base_cache == 256
    assert (shared(), shared(alias="default"), shared(sticky="another user")) == (256, 256, 256)
    assert aliases.set(adapter_id, "beta", {1: 1}).share_base_cache is None
    assert (shared(alias="beta"), shared(version=1), shared(digest_prefix="a" * 64)) == (None, None, None)
    assert aliases.advance(adapter_id, "default", 3, {1, 2})[0].share_base_cache == 256
    assert aliases.rollback(adapter_id, "default").share_base_cache == 256
    # A rollback restores the option with the versions that had it.
    assert aliases.rollback(adapter_id, "default", revision=1).share_base_cache is None
    assert shared() is None
    assert [change.share_base_cache for change in aliases.history(adapter_id, "default", 2).data] == [None, 256]
    assert aliases.rollback(adapter_id, "default").share_base_cache == 256
    assert aliases.get(adapter_id, "default").share_base_cache == 256
    assert aliases.set(adapter_id, "default", {2: 1}, share_base_cache=None).share_base_cache is None
    assert shared() is None


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ({"invocation_tokens": [5]}, "activated adapter"),
        ({"task": AdapterTask("embedding")}, "not for generation"),
        ({"files": {VOCABULARY_FILE: b"{}"}}, "adds tokens"),
    ],
    ids=["activated", "embeddings", "added tokens"],
)
def test_versions_whose_prompts_the_base_cannot_compute_are_refused(
    database: Database, make_tenant: Callable[[str], str], version: dict[str, Any], why: str
) -> None:
    aliases = AdapterAliases(database)
    adapter_id = add_ready_adapter(database, make_tenant("acme"), "support", ["a" * 64], **version)
    with pytest.raises(InvalidAlias, match=f"version 1 .*{why}") as refused:
        aliases.set(adapter_id, "default", {1: 1}, share_base_cache=256)
    assert (refused.value.code, refused.value.param) == ("invalid_share_base_cache", "share_base_cache")
    assert aliases.get(adapter_id, "default").share_base_cache is None


def test_an_alias_names_its_versions_that_ignore_the_option(
    database: Database, make_tenant: Callable[[str], str]
) -> None:
    aliases = AdapterAliases(database)
    adapter_id = add_ready_adapter(database, make_tenant("acme"), "support", ["a" * 64, "b" * 64])
    assert aliases.set(adapter_id, "default", {1: 1}, share_base_cache=256).not_sharing == ()
    with database.write() as connection:
        second = adapter_versions.c.number == 2
        connection.execute(update(adapter_versions).where(second).values(invocation_tokens=[5]))
    moved = aliases.set(adapter_id, "default", {1: 1, 2: 1})
    assert moved.not_sharing == aliases.get(adapter_id, "default").not_sharing == (2,)
    assert aliases.set(adapter_id, "default", {2: 1}, share_base_cache=None).not_sharing == ()
