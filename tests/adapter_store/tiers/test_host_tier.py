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
    assert tier.protect("umbrella", {"b"}, 11) == 1
    with pytest.raises(ValueError, match="negative"):
        tier.protect("umbrella", {"b"}, -1)
    assert tier.protect("acme", {"a"}, 40) == 0


def test_evictions_do_not_look_at_every_protected_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    num_floors, tier = 500, HostTier(501)
    for number in range(num_floors):
        tier.protect(str(number), {str(number)}, 1)
        tier.add(adapter(str(number), 1), 0)
    looked_at = []
    is_protected = HostTier._is_protected
    monkeypatch.setattr(HostTier, "_is_protected", lambda tier, entry: looked_at.append(1) or is_protected(tier, entry))
    for number in range(100):
        tier.add(adapter(f"other{number}", 1), 0)
    assert tier.num_evictions == 99
    assert all(str(number) in tier for number in range(num_floors))
    assert len(looked_at) <= num_floors + 2 * 100


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_respect_limit_leases_and_floors(seed: int) -> None:
    """Compare the tier with a model that recomputes all sums after each operation."""
    rng = random.Random(seed)
    sizes = {chr(97 + number): rng.randint(1, 12) for number in range(20)}
    tier, leases = HostTier(60), dict.fromkeys(sizes, 0)
    groups = {"x": (set("abcdef"), 15), "y": (set("efghij"), 20)}
    for name, (members, floor) in groups.items():
        tier.protect(name, members, floor)
    # Least recently used first.
    model: list[str] = []

    def is_protected(digest: str) -> bool:
        of_digest = [(members, floor) for members, floor in groups.values() if digest in members]
        return any(sum(sizes[one] for one in members & {*model} - {digest}) < floor for members, floor in of_digest)

    for _ in range(1000):
        digest = rng.choice(list(sizes))
        present = {one for one in sizes if one in tier}
        before = {name: sum(sizes[one] for one in members & present) for name, (members, _) in groups.items()}
        if rng.random() < 0.05:
            name, floor = rng.choice("xy"), rng.choice([0, 10, 20])
            groups[name] = set(rng.sample(list(sizes), 6)), floor
            before.pop(name)
            tier.protect(name, *groups[name])
        elif rng.random() < 0.4 and leases[digest]:
            tier.release(digest)
            leases[digest] -= 1
        elif digest in tier:
            assert tier.lease(digest) is not None
            leases[digest] += 1
            model.append(model.pop(model.index(digest)))
        else:
            leases[digest] = rng.randint(0, 1)
            tier.add(adapter(digest, sizes[digest]), leases[digest])
            model.append(digest)
        while sum(sizes[one] for one in model) > 60:
            unleased = [one for one in model if not leases[one]]
            victim = next((one for one in unleased if not is_protected(one)), next(iter(unleased), None))
            if victim is None:
                break
            model.remove(victim)
        present = {one for one in sizes if one in tier}
        assert present == {*model}
        assert [one.digest for one in tier.contents().adapters] == model[::-1]
        held = sum(sizes[one] for one, count in leases.items() if count)
        assert tier.used_bytes == sum(sizes[one] for one in present)
        assert all(one in tier for one, count in leases.items() if count)
        protected = {one for members, _ in groups.values() for one in members}
        assert tier.used_bytes <= max(60, held)
        if any(not leases[one] for one in present - protected):
            # No adapter outside the groups was left to evict.
            for name, num_before in before.items():
                members, floor = groups[name]
                assert sum(sizes[one] for one in members & present) >= min(floor, num_before)


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
