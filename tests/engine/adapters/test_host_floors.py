from __future__ import annotations

from collections.abc import Collection

import pytest

from loramux.engine.adapters.host_floors import MAX_MEMBERS, HostFloors
from loramux.engine.protocol.messages import Finished
from tests.adapter_store.tiers.lettered_adapters import adapter, content, filled
from tests.engine.simulated_engine import Simulation

TIER_BYTES = 100


class Tier:
    def __init__(self) -> None:
        self.groups: dict[str, tuple[set[str], int]] = {}
        self.num_calls = 0

    def protect(self, group: str, digests: Collection[str], floor_bytes: int) -> None:
        self.num_calls += 1
        others = sum(floor for name, (_, floor) in self.groups.items() if name != group)
        if others + floor_bytes > TIER_BYTES:
            raise ValueError
        self.groups[group] = set(digests), floor_bytes
        if not floor_bytes:
            del self.groups[group]


@pytest.fixture
def tier() -> Tier:
    return Tier()


@pytest.fixture
def floors(tier: Tier) -> HostFloors:
    return HostFloors(tier.protect)


def test_requested_adapters_of_a_share_are_protected(tier: Tier, floors: HostFloors) -> None:
    for digest in "aba":
        floors.note("acme", digest, 40)
    floors.note("umbrella", "b", 60)
    assert tier.groups == {"acme": ({"a", "b"}, 40), "umbrella": ({"b"}, 60)}
    assert tier.num_calls == 3, "protected adapters are not reported again"


def test_next_request_changes_or_removes_the_floor(tier: Tier, floors: HostFloors) -> None:
    floors.note("acme", "a", 40)
    floors.note("acme", "a", 50)
    assert tier.groups == {"acme": ({"a"}, 50)}
    floors.note("acme", "a", 0)
    floors.note("acme", "a", 0)
    assert (tier.groups, tier.num_calls) == ({}, 3)


def test_oversized_floor_waits_without_affecting_others(tier: Tier, floors: HostFloors) -> None:
    floors.note("acme", "a", 70)
    floors.note("umbrella", "b", 40)
    assert tier.groups == {"acme": ({"a"}, 70)}
    floors.note("acme", "a", 60)
    floors.note("umbrella", "b", 40)
    assert tier.groups == {"acme": ({"a"}, 60), "umbrella": ({"b"}, 40)}


def test_number_of_protected_adapters_per_share_is_limited(tier: Tier, floors: HostFloors) -> None:
    for number in range(MAX_MEMBERS + 2):
        floors.note("acme", str(number), 10)
    assert len(tier.groups["acme"][0]) == MAX_MEMBERS
    assert not {"0", "1"} & tier.groups["acme"][0]


def test_protected_adapter_survives_other_shares_adapters() -> None:
    tier = filled(40, "a", "b")
    floors = HostFloors(tier.protect)
    floors.note("acme", "a", 10)
    for digest in "cdefg":
        tier.add(adapter(digest), 0)
    assert content(tier) == "aefg"
    floors.note("acme", "a", 0)
    tier.add(adapter("h"), 0)
    assert content(tier) == "efgh"


def test_a_negative_floor_is_refused(simulation: Simulation) -> None:
    simulation.add("one", digest="a", host_floor_bytes=-1)
    simulation.run()
    finished = simulation.finished["one"]
    assert isinstance(finished, Finished)
    assert finished.code == "invalid_request"
