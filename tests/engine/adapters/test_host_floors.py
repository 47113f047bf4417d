from __future__ import annotations

from collections.abc import Collection

import pytest

from loramux.engine.adapters.host_floors import IDLE_S, MAX_MEMBERS, HostFloors
from loramux.engine.protocol.messages import Finished
from tests.adapter_store.tiers.lettered_adapters import adapter, content, filled
from tests.engine.simulated_engine import Clock, Simulation

TIER_BYTES = 100


class Tier:
    def __init__(self) -> None:
        self.groups: dict[str, tuple[set[str], int]] = {}
        self.num_calls = 0

    def protect(self, group: str, digests: Collection[str], floor_bytes: int) -> int:
        self.num_calls += 1
        others = sum(floor for name, (_, floor) in self.groups.items() if name != group)
        if others + floor_bytes > TIER_BYTES:
            return others + floor_bytes - TIER_BYTES
        self.groups[group] = set(digests), floor_bytes
        if not floor_bytes:
            del self.groups[group]
        return 0


@pytest.fixture
def tier() -> Tier:
    return Tier()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def floors(tier: Tier, clock: Clock) -> HostFloors:
    return HostFloors(tier.protect, clock)


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


def test_floors_of_idle_shares_make_room_for_others(tier: Tier, floors: HostFloors, clock: Clock) -> None:
    floors.note("idle", "a", 50)
    clock.now = 100.0
    floors.note("acme", "a", 50)
    clock.now = IDLE_S
    floors.note("umbrella", "b", 10)
    assert tier.groups == {"acme": ({"a"}, 50), "umbrella": ({"b"}, 10)}
    floors.note("umbrella", "b", 60)
    assert tier.groups == {"acme": ({"a"}, 50), "umbrella": ({"b"}, 10)}, "acme has not been idle for long enough"
    floors.note("idle", "a", 40)
    assert set(tier.groups) == {"acme", "umbrella", "idle"}


def test_idle_share_keeps_its_floor_while_there_is_room(tier: Tier, floors: HostFloors, clock: Clock) -> None:
    floors.note("idle", "a", 50)
    clock.now = 10 * IDLE_S
    floors.note("acme", "b", 50)
    assert set(tier.groups) == {"idle", "acme"}


def test_adapter_requested_while_the_floor_did_not_fit_is_protected_later(tier: Tier, floors: HostFloors) -> None:
    floors.note("acme", "a", 50)
    floors.note("umbrella", "b", 10)
    floors.note("umbrella", "c", 60)
    assert tier.groups["umbrella"] == ({"b"}, 10)
    floors.note("umbrella", "c", 10)
    assert tier.groups["umbrella"] == ({"b", "c"}, 10)


def test_floor_that_cannot_fit_removes_no_idle_floor(tier: Tier, floors: HostFloors, clock: Clock) -> None:
    floors.note("idle", "a", 30)
    floors.note("older", "a", 10)
    clock.now = 100.0
    floors.note("acme", "a", 50)
    clock.now = IDLE_S
    floors.note("umbrella", "b", 60)
    assert set(tier.groups) == {"idle", "older", "acme"}
    floors.note("umbrella", "b", 40)
    assert set(tier.groups) == {"older", "acme", "umbrella"}, "one idle floor was enough"


def test_floor_that_does_not_fit_is_logged_once(floors: HostFloors, capfd: pytest.CaptureFixture[str]) -> None:
    floors.note("acme", "a", 70)
    for digest in "ab":
        floors.note("umbrella", digest, 40)
    assert capfd.readouterr().err == (
        "the host memory floor of 40 bytes of the tenant umbrella does not fit beside the floors of other tenants: "
        "lower one of them or raise host_tier_bytes\n"
    )


def test_number_of_protected_adapters_per_share_is_limited(tier: Tier, floors: HostFloors) -> None:
    for number in range(MAX_MEMBERS + 2):
        floors.note("acme", str(number), 10)
    assert len(tier.groups["acme"][0]) == MAX_MEMBERS
    assert not {"0", "1"} & tier.groups["acme"][0]


def test_protected_adapter_survives_other_shares_adapters() -> None:
    tier = filled(40, "a", "b")
    floors = HostFloors(tier.protect, Clock())
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
