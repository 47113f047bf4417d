from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from loramux.engine.pages.eviction import POLICIES, EvictionPolicy, GreedyDual, LeastRecentlyUsed, Reclaimer, new_policy
from loramux.engine.pages.page_pool import PageOwner, PagePool
from loramux.engine.protocol.errors import ConfigNotUsable


@dataclass(eq=False)
class Thing:
    key: str
    num_pages: int = 1
    cost: float = 1.0
    has_slot: bool = False
    position: int | None = None
    pages: PagePool | None = None
    held: list[int] = field(default_factory=list)
    is_gone: bool = False

    @property
    def is_waited_for(self) -> bool:
        return self.position is not None

    def evict(self) -> None:
        self.is_gone = True
        if self.pages is not None:
            self.pages.free(self.held)


def anything(item: object) -> bool:
    return True


EXTENSION = os.environ.get("LORAMUX_TEST_EVICTION_POLICY")
"""The name of an extension's policy. It replaces the policies of loramux."""

TESTED: dict[str, Callable[[], EvictionPolicy]] = (
    POLICIES if EXTENSION is None else {"extension": partial(new_policy, EXTENSION)}
)


@pytest.fixture(params=TESTED.values(), ids=TESTED.keys())
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    made: EvictionPolicy = request.param()
    return made


def test_longest_idle_item_is_evicted_first(policy: EvictionPolicy) -> None:
    a, b, c = (Thing(name) for name in "abc")
    for thing in (a, b, c):
        policy.add(thing)
    policy.discard(a)
    policy.add(a)
    policy.discard(c)
    taken = [policy.take(anything) for _ in range(3)]
    # All policies agree: `a` was used twice, and most recently.
    assert taken == [b, a, None]


def test_disallowed_items_keep_their_position(policy: EvictionPolicy) -> None:
    things = [Thing(str(number)) for number in range(5)]
    for thing in things:
        policy.add(thing)
    assert policy.take(lambda item: item in things[2:]) is things[2]
    assert [policy.take(anything) for _ in range(4)] == [things[0], things[1], things[3], things[4]]


def test_greedy_dual_keeps_costly_and_frequently_used_items() -> None:
    policy = GreedyDual()
    large, dear, often = Thing("large", num_pages=10), Thing("dear", cost=5.0), Thing("often")
    for thing in (often, large, dear):
        policy.add(thing)
    for _ in range(7):
        policy.discard(often)
        policy.add(often)
    assert [policy.take(anything) for _ in range(3)] == [large, dear, often]


def test_greedy_dual_ages_unused_items() -> None:
    policy = GreedyDual()
    once_great = Thing("once great", cost=50.0)
    policy.add(once_great)
    for number in range(200):
        policy.add(Thing(str(number)))
        if policy.take(anything) is once_great:
            break
    else:
        pytest.fail("an unused item must age")


def test_greedy_dual_remembers_evicted_items() -> None:
    policy = GreedyDual(memory=10)
    for _ in range(3):
        policy.add(Thing("popular"))
        assert policy.take(anything) is not None
    policy.add(Thing("popular"))
    policy.add(Thing("new"))
    taken = policy.take(anything)
    assert taken is not None
    assert taken.key == "new"


def test_policies_have_names() -> None:
    assert [type(new_policy(name)) for name in ("lru", "greedy_dual")] == [LeastRecentlyUsed, GreedyDual]
    with pytest.raises(ConfigNotUsable, match="no installed distribution offers the eviction policy 'fifo'"):
        new_policy("fifo")


class Waiters:
    def __init__(self, things: list[Thing]) -> None:
        self._things = things

    def num_pages_before(self, position: int) -> int:
        return sum(thing.num_pages for thing, of in self._idle() if of < position)

    def last_after(self, position: int) -> Thing | None:
        later = [(of, thing) for thing, of in self._idle() if of > position]
        return max(later, key=lambda one: one[0])[1] if later else None

    def _idle(self) -> Iterator[tuple[Thing, int]]:
        return ((thing, thing.position) for thing in self._things if thing.position is not None and not thing.is_gone)


def filled(policy: EvictionPolicy, positions: list[int | None]) -> tuple[Reclaimer, list[Thing]]:
    """A full pool of ten pages, two per owner. `positions` are the queue positions of the requests that wait for an
    owner.
    """
    pages, things = PagePool(10), []
    for number, position in enumerate(positions):
        thing = Thing(str(number), num_pages=2, has_slot=True, position=position, pages=pages)
        thing.held = pages.alloc(2, PageOwner.ADAPTER)
        policy.add(thing)
        things.append(thing)
    return Reclaimer(pages, policy, Waiters(things)), things


def test_items_with_waiters_are_evicted_last_and_latest_position_first(policy: EvictionPolicy) -> None:
    """Evicting an adapter that a sequence waits for forces an immediate reload."""
    reclaimer, things = filled(policy, [1, 7, 6, None, None])
    assert reclaimer.make_room(4, position=5)
    assert [thing.is_gone for thing in things] == [False, False, False, True, True]
    assert reclaimer.make_room(6, position=5)
    assert [thing.is_gone for thing in things] == [False, True, False, True, True]


def test_items_awaited_at_earlier_positions_are_not_evicted(policy: EvictionPolicy) -> None:
    reclaimer, things = filled(policy, [3, None, None, None, 5])
    assert not reclaimer.can_make_room(9, position=4)
    assert not reclaimer.make_room(9, position=4)
    assert not reclaimer.make_room(11, position=0)
    assert not any(thing.is_gone for thing in things)
    assert reclaimer.make_room(8, position=4)
    assert [thing.is_gone for thing in things] == [False, True, True, True, True]
    assert reclaimer.make_room(10, position=2)


def test_slot_search_skips_prefixes(policy: EvictionPolicy) -> None:
    prefixes, adapters = [Thing(f"p{number}") for number in range(9)], [Thing("a", has_slot=True), Thing("b")]
    asked: list[object] = []
    for thing in prefixes + adapters:
        policy.add(thing)

    def ask(item: object) -> bool:
        asked.append(item)
        return True

    assert policy.take(ask, slots_only=True) is adapters[0]
    assert asked == adapters[:1]
    assert policy.take(ask, slots_only=True) is None
    assert [policy.take(anything) for _ in range(10)] == [*prefixes, adapters[1]]


def test_greedy_dual_heap_stays_small() -> None:
    policy, thing = GreedyDual(), Thing("busy")
    for _ in range(10_000):
        policy.add(thing)
        policy.discard(thing)
    assert len(policy._heaps[False]) < 2000


def test_random_operations_take_each_item_once(policy: EvictionPolicy) -> None:
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
