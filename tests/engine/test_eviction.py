"""What gives way first, under each policy."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from loramux.engine.eviction import EvictionPolicy, GreedyDual, LeastRecentlyUsed, Reclaimer
from loramux.engine.page_pool import PageOwner, PagePool


@dataclass(eq=False)
class Thing:
    """Something evictable that knows whether it was evicted."""

    key: str
    num_pages: int = 1
    cost: float = 1.0
    protected_from: int = 0
    pages: PagePool | None = None
    held: list[int] = field(default_factory=list)
    is_gone: bool = False

    def is_protected(self, rank: int) -> bool:
        return rank >= self.protected_from > 0

    def evict(self) -> None:
        self.is_gone = True
        if self.pages is not None:
            self.pages.free(self.held)


def anything(item: object) -> bool:
    return True


@pytest.fixture(params=[LeastRecentlyUsed, GreedyDual])
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    made: EvictionPolicy = request.param()
    return made


def test_what_has_been_idle_longest_goes_first(policy: EvictionPolicy) -> None:
    a, b, c = (Thing(name) for name in "abc")
    for thing in (a, b, c):
        policy.add(thing)
    policy.discard(a)
    policy.add(a)
    policy.discard(c)
    taken = [policy.take(anything) for _ in range(3)]
    # Both agree here: what was used twice is worth more, and it is the newest.
    assert taken == [b, a, None]


def test_what_is_not_allowed_stays_in_its_place(policy: EvictionPolicy) -> None:
    things = [Thing(str(number)) for number in range(5)]
    for thing in things:
        policy.add(thing)
    assert policy.take(lambda item: item in things[2:]) is things[2]
    assert [policy.take(anything) for _ in range(4)] == [things[0], things[1], things[3], things[4]]


def test_greedy_dual_keeps_what_is_dear_for_its_size_and_often_used() -> None:
    policy = GreedyDual()
    large, dear, often = Thing("large", num_pages=10), Thing("dear", cost=5.0), Thing("often")
    for thing in (often, large, dear):
        policy.add(thing)
    for _ in range(7):
        policy.discard(often)
        policy.add(often)
    assert [policy.take(anything) for _ in range(3)] == [large, dear, often]


def test_greedy_dual_forgets_old_glory() -> None:
    policy = GreedyDual()
    once_great = Thing("once great", cost=50.0)
    policy.add(once_great)
    for number in range(200):
        policy.add(Thing(str(number)))
        if policy.take(anything) is once_great:
            break
    else:
        pytest.fail("what is never used again must age")


def test_greedy_dual_remembers_what_was_evicted() -> None:
    policy = GreedyDual(memory=10)
    for _ in range(3):
        policy.add(Thing("popular"))
        assert policy.take(anything) is not None
    policy.add(Thing("popular"))
    policy.add(Thing("new"))
    taken = policy.take(anything)
    assert taken is not None
    assert taken.key == "new"


def test_room_is_made_up_to_what_is_protected(policy: EvictionPolicy) -> None:
    pages = PagePool(10)
    things = []
    for number in range(5):
        thing = Thing(str(number), num_pages=2, protected_from=3 if number == 1 else 0, pages=pages)
        thing.held = pages.alloc(2, PageOwner.ADAPTER)
        policy.add(thing)
        things.append(thing)
    reclaimer = Reclaimer(pages, policy)
    assert reclaimer.make_room(5, rank=4)
    assert [thing.is_gone for thing in things] == [True, False, True, True, False]
    assert not reclaimer.make_room(10, rank=4)
    assert not things[1].is_gone
    assert reclaimer.make_room(10, rank=2)
    pages.check_integrity()


def test_what_somebody_waits_for_gives_way_last(policy: EvictionPolicy) -> None:
    """Or it would have to be had again at once, at the cost of the next that somebody waits for."""
    pages = PagePool(8)
    things = [
        Thing(str(number), num_pages=2, protected_from=9 if number < 2 else 0, pages=pages) for number in range(4)
    ]
    for thing in things:
        thing.held = pages.alloc(2, PageOwner.ADAPTER)
        policy.add(thing)
    reclaimer = Reclaimer(pages, policy)
    assert reclaimer.make_room(4, rank=5)
    assert [thing.is_gone for thing in things] == [False, False, True, True]
    assert reclaimer.make_room(6, rank=5)
    assert things[0].is_gone


def test_nothing_is_evicted_for_room_that_cannot_be_made(policy: EvictionPolicy) -> None:
    pages = PagePool(10)
    things = [Thing(str(number), num_pages=2, protected_from=3 * (number == 0), pages=pages) for number in range(4)]
    for thing in things:
        thing.held = pages.alloc(2, PageOwner.ADAPTER)
        policy.add(thing)
    reclaimer = Reclaimer(pages, policy)
    reclaimer.num_protected = lambda rank: 2 if rank >= 3 else 0
    assert not reclaimer.make_room(9, rank=3)
    assert not reclaimer.make_room(11, rank=0)
    assert not any(thing.is_gone for thing in things)
    assert reclaimer.make_room(8, rank=3)
    assert [thing.is_gone for thing in things] == [False, True, True, True]


def test_greedy_dual_keeps_no_more_than_it_needs() -> None:
    policy, thing = GreedyDual(), Thing("busy")
    for _ in range(10_000):
        policy.add(thing)
        policy.discard(thing)
    assert len(policy._heap) < 2000


def test_a_random_life_takes_each_item_once(policy: EvictionPolicy) -> None:
    rng = random.Random(2)
    idle: list[Thing] = []
    for number in range(3000):
        match rng.randrange(3):
            case 0:
                thing = Thing(str(number % 50), num_pages=rng.randint(1, 9), cost=rng.random())
                policy.add(thing)
                idle.append(thing)
            case 1 if idle:
                thing = idle.pop(rng.randrange(len(idle)))
                policy.discard(thing)
            case 2:
                taken = policy.take(anything)
                assert (taken is None) == (not idle)
                if taken is not None:
                    idle = [thing for thing in idle if thing is not taken]
    while idle:
        taken = policy.take(anything)
        idle = [thing for thing in idle if thing is not taken]
    assert policy.take(anything) is None
