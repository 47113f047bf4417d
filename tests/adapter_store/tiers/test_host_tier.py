from __future__ import annotations

import random

import pytest

from loramux.adapter_store.tiers.host_tier import HostTier
from tests.adapter_store.tiers.lettered_adapters import adapter, content, filled


def test_least_recently_used_unleased_adapter_is_evicted_first() -> None:
    tier = filled(30, "a", "b", "c")
    assert tier.lease("a") is not None
    tier.add(adapter("d"), 0)
    assert content(tier) == "acd"
    tier.add(adapter("e", 20), 1)
    assert (content(tier), tier.used_bytes) == ("ae", 30)
    tier.add(adapter("f", 10), 1)
    assert (content(tier), tier.used_bytes) == ("aef", 40), "above the limit, but all are leased"
    tier.release("a")
    assert (content(tier), tier.used_bytes, tier.num_evictions) == ("ef", 30, 4)


def test_adapters_are_evicted_before_memory_is_allocated() -> None:
    tier = filled(30, "a", "b", "c")
    tier.reserve(20)
    assert content(tier) == "c"
    tier.reserve(0)
    tier.add(adapter("d", 20), 0)
    assert content(tier) == "cd"


def test_floor_protects_a_groups_bytes_from_other_adapters() -> None:
    tier = filled(40, "a", "b", "c")
    tier.protect("acme", {"a", "b", "c"}, 20)
    for digest in "defg":
        tier.add(adapter(digest), 0)
    assert content(tier) == "bcfg", "above its floor, the group's least recently used adapter is evicted first"
    tier.protect("acme", {"a", "b", "c"}, 0)
    tier.add(adapter("h"), 0)
    assert content(tier) == "cfgh"


def test_floor_covers_later_adapters_and_adapters_in_two_groups() -> None:
    tier = filled(40)
    tier.protect("acme", {"a"}, 10)
    tier.protect("umbrella", {"a", "b"}, 20)
    for digest in "abcdefgh":
        tier.add(adapter(digest), 0)
    assert content(tier) == "abgh"
    tier.protect("umbrella", (), 0)
    tier.add(adapter("c"), 0)
    assert content(tier) == "acgh", "adapters protected by the other group stay"


def test_tier_limit_takes_precedence_over_floors() -> None:
    tier = filled(40, "a", "b", "c", "d")
    tier.protect("acme", {"a", "b", "c", "d"}, 40)
    tier.add(adapter("e"), 1)
    assert (content(tier), tier.used_bytes) == ("bcde", 40)


def test_floors_that_do_not_fit_together_are_refused() -> None:
    tier = filled(40, "a")
    tier.protect("acme", {"a"}, 30)
    with pytest.raises(ValueError, match="do not fit"):
        tier.protect("umbrella", {"b"}, 11)
    with pytest.raises(ValueError, match="do not fit"):
        tier.protect("umbrella", {"b"}, -1)
    tier.protect("acme", {"a"}, 40)


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_respect_limit_leases_and_floors(seed: int) -> None:
    """Compare the tier with a model that recomputes all sums after each operation."""
    rng = random.Random(seed)
    sizes = {chr(97 + number): rng.randint(1, 12) for number in range(20)}
    tier, leases = HostTier(60), dict.fromkeys(sizes, 0)
    groups = {"x": (set("abcdef"), 15), "y": (set("efghij"), 20)}
    for name, (members, floor) in groups.items():
        tier.protect(name, members, floor)
    for _ in range(2000):
        digest = rng.choice(list(sizes))
        present = {one for one in sizes if one in tier}
        before = {name: sum(sizes[one] for one in members & present) for name, (members, _) in groups.items()}
        if rng.random() < 0.4 and leases[digest]:
            tier.release(digest)
            leases[digest] -= 1
        elif digest in tier:
            assert tier.lease(digest) is not None
            leases[digest] += 1
        else:
            leases[digest] = rng.randint(0, 1)
            tier.add(adapter(digest, sizes[digest]), leases[digest])
        present = {one for one in sizes if one in tier}
        held = sum(sizes[one] for one, count in leases.items() if count)
        assert tier.used_bytes == sum(sizes[one] for one in present)
        assert all(one in tier for one, count in leases.items() if count)
        protected = {one for members, _ in groups.values() for one in members}
        assert tier.used_bytes <= max(60, held)
        if any(not leases[one] for one in present - protected):
            # No adapter outside the groups was left to evict.
            for name, (members, floor) in groups.items():
                assert sum(sizes[one] for one in members & present) >= min(floor, before[name])


def test_forgotten_adapter_leaves_its_floor_and_its_bytes_to_others() -> None:
    tier = filled(40, "a", "b", "c")
    tier.protect("acme", {"a", "b"}, 20)
    assert tier.lease("a") is not None
    for digest in ("a", "b", "z"):
        tier.forget(digest)
    assert (content(tier), tier.used_bytes, tier.num_evictions) == ("ac", 20, 0), "a leased adapter stays"
    tier.release("a")
    tier.forget("a")
    tier.add(adapter("d", 30), 0)
    assert (content(tier), tier.used_bytes) == ("cd", 40)
