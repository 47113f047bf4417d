from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import pytest

from loramux.adapter_store.tiers.staged_adapter import NotStaged, StagedAdapter
from loramux.engine.adapters.adapter_load import AdapterLoad, AdapterPhase
from loramux.engine.adapters.adapter_pool import AdapterPool, PoolDemand
from loramux.engine.pages.eviction import LeastRecentlyUsed
from loramux.engine.pages.page_pool import PageOwner, PagePool
from loramux.engine.protocol.messages import Abort
from tests.engine.simulated_device import SimulatedPages, simulated_adapters
from tests.engine.simulated_engine import Clock, Simulate, Simulation, finishes, stats_of
from tests.engine.watched_stager import WatchedStager

SIZES = {"a": 2, "b": 2, "c": 2, "large": 7}


class OneByOne(WatchedStager):
    """Finishes one request after each call of `finish_one`, in the order in which they were made."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__(simulated_adapters(sizes))
        self.finished: list[str] = []
        self._num_finishing = 0

    @property
    def requested(self) -> list[str]:
        return list(self._requested)

    def finish_one(self) -> None:
        self._num_finishing = 1

    def poll(self) -> list[StagedAdapter | NotStaged]:
        finished, self._requested = self._requested[: self._num_finishing], self._requested[self._num_finishing :]
        self._num_finishing = 0
        self.finished += finished
        return [self._staged(digest) for digest in finished]


class Slow(WatchedStager):
    """Stages each adapter after as many polls as its latency. Those in `kept` are in host memory."""

    def __init__(self, sizes: dict[str, int], latencies: dict[str, int], kept: Collection[str] = ()) -> None:
        super().__init__(simulated_adapters(sizes))
        self.counts: Counter[str] = Counter()
        self._latencies = latencies
        self._kept = kept
        self._left: dict[str, int] = {}

    @property
    def requested(self) -> list[str]:
        return list(self._left)

    def takes(self, digest: str) -> bool:
        return digest in self._kept or len(self._left) < self.max_requests

    def request(self, digest: str) -> None:
        assert digest not in self._left
        self.counts[digest] += 1
        self._left[digest] = 0 if digest in self._kept else self._latencies[digest]

    def cancel(self, digest: str) -> None:
        del self._left[digest]

    def pass_time(self) -> None:
        self._left = {digest: left - 1 for digest, left in self._left.items()}

    def poll(self) -> list[StagedAdapter | NotStaged]:
        finished = [digest for digest, left in self._left.items() if left <= 0]
        for digest in finished:
            del self._left[digest]
        return [self._staged(digest) for digest in finished]


class Bench:
    def __init__(
        self,
        num_slots: int = 3,
        sizes: dict[str, int] = SIZES,
        num_pages: int = 8,
        stager: WatchedStager | None = None,
    ) -> None:
        self.pages = PagePool(num_pages)
        self.stager = WatchedStager(simulated_adapters(sizes)) if stager is None else stager
        self.adapter_pages = SimulatedPages()
        self.clock = Clock()
        self.residency: list[tuple[str, bool]] = []
        self.pool = AdapterPool(
            self.pages,
            num_slots,
            self.stager,
            self.adapter_pages,
            self.adapter_pages,
            LeastRecentlyUsed(),
            self.clock,
            on_residency=lambda digest, is_resident: self.residency.append((digest, is_resident)),
        )

    def ask(self, *digests: str, **demand: int) -> list[AdapterLoad]:
        for digest in digests:
            self.pool.prefetch(digest)
        settled = self.pool.poll(PoolDemand({digest: position for position, digest in enumerate(digests)}, **demand))
        self.pages.check_integrity()
        return settled

    def bring(self, *digests: str) -> list[AdapterLoad]:
        self.ask(*digests)
        self.ask(*digests)
        self.ask()
        return [self.find(digest) for digest in digests]

    def find(self, digest: str) -> AdapterLoad:
        load = self.pool.find(digest)
        assert load is not None
        return load

    @property
    def phases(self) -> dict[str, AdapterPhase]:
        return {load.digest: load.phase for load in self.pool.loads()}


def test_an_adapter_is_fetched_then_copied_then_resident() -> None:
    bench = Bench()
    load = bench.pool.prefetch("a")
    assert load.phase is AdapterPhase.REQUESTED
    assert bench.ask("a") == []
    assert (load.phase, len(load.pages), bench.pages.num_owned(PageOwner.ADAPTER)) == (AdapterPhase.COPYING, 2, 2)
    assert bench.pool.is_copying
    assert bench.ask("a") == [load]
    assert (load.phase, bench.adapter_pages.digest_of_slot(load.slot)) == (AdapterPhase.RESIDENT, "a")
    assert not bench.pool.is_copying
    assert (bench.pool.num_loads, bench.residency) == (1, [("a", True)])


def test_known_adapter_is_not_fetched_again() -> None:
    bench = Bench()
    (load,) = bench.bring("a")
    assert bench.pool.prefetch("a") is load
    assert bench.stager.num_requests == 1


def test_failed_load_reports_its_reason_and_is_removed() -> None:
    bench = Bench()
    (failed,) = bench.ask("missing")
    assert failed.failure == "the store has no such adapter"
    assert bench.pool.find("missing") is None
    assert bench.pages.num_free == 8


def test_adapter_without_waiters_is_not_copied() -> None:
    bench = Bench()
    bench.pool.prefetch("a")
    bench.ask()
    assert bench.phases == {}
    assert bench.pages.num_free == 8


@pytest.mark.parametrize(
    ("size", "pinned", "room"),
    [(9, (), "the whole page pool has only 8"), (7, ("a",), "the unpinned part of the page pool has only 6")],
    ids=["beyond the pool", "beyond what pins leave"],
)
def test_an_adapter_that_can_never_fit_is_refused(size: int, pinned: tuple[str, ...], room: str) -> None:
    bench = Bench(sizes={"a": 2, "huge": size})
    for load in bench.bring(*pinned):
        bench.pool.pin(load)
    (failed,) = bench.ask("huge")
    assert failed.failure == f"the adapter takes {size} pages, but {room}"
    assert list(bench.phases) == list(pinned)


def test_an_adapter_in_use_keeps_its_slot_and_pages() -> None:
    bench = Bench(num_slots=1)
    (used,) = bench.bring("a")
    assert bench.pool.acquire(used) == used.slot
    for _ in range(3):
        bench.ask("b")
    assert bench.phases == {"a": AdapterPhase.RESIDENT, "b": AdapterPhase.STAGED}
    bench.pool.release(used.slot)
    bench.ask("b")
    assert bench.phases == {"b": AdapterPhase.COPYING}
    assert (bench.pool.num_evictions, bench.residency) == (1, [("a", True), ("a", False)])


def test_adapter_is_evictable_only_after_all_uses_are_released() -> None:
    bench = Bench(num_slots=1)
    (load,) = bench.bring("a")
    bench.pool.acquire(load)
    bench.pool.acquire(load)
    bench.pool.release(0)
    assert not bench.pool.unload("a")
    bench.pool.release(load.slot)
    assert bench.pool.unload("a")
    with pytest.raises(KeyError):
        bench.pool.release(load.slot)


def test_a_use_is_released_only_once() -> None:
    bench = Bench()
    (load,) = bench.bring("a")
    with pytest.raises(KeyError):
        bench.pool.release(load.slot)


def test_an_adapter_is_used_only_while_it_is_resident() -> None:
    bench = Bench()
    load = bench.pool.prefetch("a")
    with pytest.raises(AssertionError):
        bench.pool.acquire(load)


def test_idle_time_counts_from_the_last_use() -> None:
    bench = Bench()
    (load,) = bench.bring("a")
    bench.pool.acquire(load)
    bench.clock.now = 5.0
    assert bench.pool.idle_s(load) == 0.0
    bench.pool.release(load.slot)
    bench.clock.now = 8.0
    assert bench.pool.idle_s(load) == 3.0


def test_adapters_without_waiters_are_evicted_first() -> None:
    bench = Bench(num_slots=2)
    bench.bring("b", "a")
    bench.ask("c", "b")
    assert set(bench.phases) == {"b", "c"}, "a was used last, but b is waited for"


def test_adapter_evicts_only_adapters_of_later_queue_positions() -> None:
    bench = Bench(num_slots=1)
    bench.bring("a")
    bench.ask("a", "b")
    bench.ask("a", "b")
    assert bench.phases == {"a": AdapterPhase.RESIDENT, "b": AdapterPhase.STAGED}
    bench.ask("b", "a")
    assert bench.phases["b"] is AdapterPhase.COPYING


def test_fetched_adapters_get_pages_in_queue_order() -> None:
    bench = Bench(num_slots=1)
    bench.pool.prefetch("b")
    bench.ask("a", "b")
    assert bench.phases == {"b": AdapterPhase.STAGED, "a": AdapterPhase.COPYING}


def test_adapters_that_wait_for_a_slot_hold_a_limited_amount_of_host_memory() -> None:
    names = [f"cold{number}" for number in range(20)]
    bench = Bench(num_slots=1, sizes=dict.fromkeys(("used", *names), 2))
    stager = bench.stager
    stager.max_bytes = 2 * 2
    bench.pool.acquire(*bench.bring("used"))
    for order in (names, names, [names[-1], *names[:-1]]):
        bench.ask(*order)
        assert stager.num_held <= 2
        staged = [digest for digest, phase in bench.phases.items() if phase is AdapterPhase.STAGED]
        assert set(staged) == set(order[:2]), "the first adapters in queue order are kept"
    bench.pool.release(0)
    while order:
        bench.ask(*order)
        assert stager.num_held <= 2
        assert bench.phases[order[0]] in (AdapterPhase.COPYING, AdapterPhase.RESIDENT)
        if bench.phases[order[0]] is AdapterPhase.RESIDENT:
            order = order[1:]
    assert stager.num_requests <= len(names) + 3


def test_adapter_larger_than_the_limit_of_host_memory_is_loaded_alone() -> None:
    bench = Bench()
    bench.stager.max_bytes = 1
    bench.bring("c")
    bench.ask("a", "b")
    assert bench.phases == {"c": AdapterPhase.RESIDENT, "a": AdapterPhase.COPYING, "b": AdapterPhase.REQUESTED}
    bench.ask("a", "b")
    assert bench.phases["b"] is AdapterPhase.COPYING


def test_first_adapter_stays_in_host_memory_beside_a_copy() -> None:
    bench = Bench()
    bench.stager.max_bytes = 8
    bench.adapter_pages.is_holding = True
    bench.ask("a")
    for _ in range(3):
        bench.ask("large")
        assert bench.phases == {"a": AdapterPhase.COPYING, "large": AdapterPhase.STAGED}
    assert bench.stager.num_requests == 2


@pytest.mark.parametrize("seed", range(5))
def test_first_adapter_is_loaded_once_whatever_the_sizes_and_latencies(seed: int) -> None:
    rng = random.Random(seed)
    others = [f"other{number}" for number in range(500)]
    sizes = {"first": 7, **{name: rng.randint(1, 3) for name in others}}
    stager = Slow(sizes, {"first": rng.randint(4, 8), **{name: rng.randint(1, 4) for name in others}})
    stager.max_requests, stager.max_bytes = 8, 8
    bench = Bench(num_slots=30, num_pages=60, stager=stager)

    def serve(*first: str) -> None:
        """Ask for the first adapters, and for 20 others that are not resident."""
        stager.pass_time()
        if rng.random() < 0.3:
            bench.adapter_pages.let_go()
        bench.adapter_pages.is_holding = True
        waiting = [name for name in others if bench.phases.get(name) is not AdapterPhase.RESIDENT]
        bench.ask(*first, *waiting[:20])

    for _ in range(10):
        serve()
    for _ in range(100):
        serve("first")
    assert bench.find("first").phase is AdapterPhase.RESIDENT
    assert stager.counts["first"] == 1


def test_adapter_whose_size_is_known_is_requested_again_only_if_it_fits() -> None:
    bench = Bench(num_slots=1)
    bench.stager.max_bytes = 7
    bench.pool.acquire(*bench.bring("a"))
    bench.ask("b", "large", "c")
    assert bench.stager.num_requests == 4, "all seemed to be as large as a"
    bench.ask("b", "c", "large")
    for _ in range(3):
        bench.ask("b", "c", "large")
        assert bench.phases["large"] is AdapterPhase.REQUESTED
    assert bench.stager.num_requests == 5, "c is requested again, large is not"
    bench.ask("large")
    assert bench.phases["large"] is AdapterPhase.STAGED


def test_adapter_in_host_memory_does_not_wait_for_those_being_loaded() -> None:
    stager = Slow(dict.fromkeys("abcd", 1), dict.fromkeys("abc", 2), kept="d")
    stager.max_requests = 1
    bench = Bench(num_slots=4, stager=stager)
    bench.ask("a", "b", "c", "d")
    assert stager.requested == ["a"]
    assert bench.phases["d"] is AdapterPhase.COPYING


def test_load_beyond_host_memory_is_cancelled_for_an_earlier_one() -> None:
    bench = Bench(num_slots=4, sizes=dict.fromkeys("abcd", 2), stager=OneByOne(dict.fromkeys("abcd", 2)))
    stager = bench.stager
    assert isinstance(stager, OneByOne)
    stager.max_requests, stager.max_bytes = 2, 4
    bench.ask("a")
    stager.finish_one()
    bench.ask("a")
    bench.ask("b", "c")
    bench.ask("b", "c")
    assert stager.requested == ["b", "c"]
    bench.ask("d", "b", "c")
    assert stager.requested == ["b", "d"]
    assert bench.phases["c"] is AdapterPhase.REQUESTED


def test_adapters_are_loaded_in_queue_order_whenever_they_were_requested() -> None:
    names = [f"early{number}" for number in range(40)]
    stager = OneByOne(dict.fromkeys((*names, "urgent"), 1))
    stager.max_requests = 2
    bench = Bench(num_slots=41, num_pages=41, stager=stager)
    bench.ask(*names)
    while len(stager.finished) < 41:
        stager.finish_one()
        bench.ask("urgent", *names)
        assert len(stager.requested) <= 2
    assert stager.finished == [*names[:2], "urgent", *names[2:]]


def test_unwanted_request_is_cancelled_for_a_wanted_one() -> None:
    stager = OneByOne(dict.fromkeys("abcd", 1))
    stager.max_requests = 2
    bench = Bench(num_slots=4, stager=stager)
    bench.ask("a", "b")
    bench.ask("b")
    assert stager.requested == ["a", "b"], "the order may bring it back"
    bench.ask("c", "b", "d")
    assert stager.requested == ["b", "c"]
    bench.ask("c", "b")
    assert set(bench.phases) == {"b", "c"}


def test_adapters_in_host_memory_do_not_wait_for_each_other() -> None:
    bench = Bench()
    bench.stager.max_requests = 1
    bench.ask("a", "b", "c")
    assert bench.phases == dict.fromkeys("abc", AdapterPhase.COPYING)


def test_adapter_without_room_blocks_later_adapters() -> None:
    bench = Bench()
    bench.pool.acquire(*bench.bring("a"))
    bench.ask("a", "large", "b")
    assert bench.phases == {"a": AdapterPhase.RESIDENT, "large": AdapterPhase.STAGED, "b": AdapterPhase.STAGED}
    assert [bench.pool.num_pages_wanted(position) for position in (0, 1, 2)] == [0, 7, 7]
    assert [bench.pool.can_spare(1, position) for position in (0, 1, 2)] == [True, False, False]


@pytest.mark.parametrize(("short_position", "is_placed"), [(0, False), (1, True)])
def test_adapter_takes_no_pages_needed_by_an_earlier_sequence(short_position: int, is_placed: bool) -> None:
    bench = Bench()
    bench.ask("missing", "a", short_position=short_position)
    assert (bench.find("a").phase is AdapterPhase.COPYING) == is_placed


@pytest.mark.parametrize(("num_growing", "is_placed"), [(6, True), (7, False)])
def test_prefetched_adapter_leaves_room_for_running_sequences(num_growing: int, is_placed: bool) -> None:
    bench = Bench()
    bench.ask("a", num_free_sequence_slots=0, num_growing=num_growing)
    assert (bench.find("a").phase is AdapterPhase.COPYING) == is_placed


def test_idle_adapter_is_unloaded_immediately() -> None:
    bench = Bench()
    bench.bring("a")
    assert bench.pool.unload("a")
    assert bench.pool.unload("a"), "an absent adapter counts as unloaded"
    assert (bench.pages.num_free, bench.residency[-1]) == (8, ("a", False))


@pytest.mark.parametrize("num_polls", [0, 1], ids=["fetching", "placing"])
def test_unloading_a_loading_adapter_abandons_the_load(num_polls: int) -> None:
    bench = Bench(num_slots=1)
    bench.pool.acquire(*bench.bring("a"))
    bench.pool.prefetch("b")
    for _ in range(num_polls):
        bench.ask("b")
    assert bench.phases["b"] is [AdapterPhase.REQUESTED, AdapterPhase.STAGED][num_polls]
    assert bench.pool.unload("b")
    bench.ask()
    assert bench.phases == {"a": AdapterPhase.RESIDENT}


def test_an_adapter_that_is_being_copied_is_not_unloaded() -> None:
    bench = Bench()
    bench.ask("a")
    assert not bench.pool.unload("a")
    assert bench.ask("a") == [bench.find("a")]


def test_retired_adapter_is_freed_after_its_last_use_beside_a_new_copy() -> None:
    bench = Bench()
    used, _ = bench.bring("a", "b")
    bench.pool.acquire(used)
    for digest in ("a", "b", "unknown"):
        bench.pool.retire(digest)
    assert bench.phases == {}
    assert ("a", False) in bench.residency, "no new sequence starts with it"
    assert bench.pages.num_free == 6, "b was idle"
    assert bench.pool.has_retired("a")
    (other,) = bench.bring("a")
    assert other.slot != used.slot
    bench.pool.release(used.slot)
    assert bench.phases == {"a": AdapterPhase.RESIDENT}, "the new copy stays"
    assert bench.residency[-1] == ("a", True)
    assert bench.pages.num_free == 6


def test_a_pinned_adapter_stays_until_it_is_unpinned() -> None:
    bench = Bench(num_slots=1)
    (pinned,) = bench.bring("a")
    bench.pool.pin(pinned)
    assert bench.pool.num_pinned_pages == 2
    for _ in range(3):
        bench.ask("b")
    assert bench.phases["b"] is AdapterPhase.STAGED
    bench.pool.unpin("a")
    bench.ask("b")
    assert (bench.phases, bench.pool.num_pinned_pages) == ({"b": AdapterPhase.COPYING}, 0)


def test_pages_beside_pins_count_the_sequences_own_adapter_once() -> None:
    bench = Bench()
    bench.pool.pin(bench.bring("a")[0])
    assert bench.pool.num_pages_beside(None, 0) == 2
    assert bench.pool.num_pages_beside("b", 3) == 5
    assert bench.pool.num_pages_beside("a", 2) == 2


def test_one_fetch_serves_all_waiting_sequences(simulation: Simulation) -> None:
    for i in range(6):
        simulation.add(f"s{i}", digest="a")
    simulation.run()
    assert simulation.stager.num_requests == 1


def test_more_adapters_than_slots_all_run(simulate: Simulate, simulation: Simulation) -> None:
    names = {f"adapter{i}": 1 + i % 3 for i in range(9)}
    small = simulate(num_slots=2, adapters=names)
    adds = [small.add(f"s{i}", digest=name) for i, name in enumerate(names)]
    small.run()
    for add in adds:
        assert small.tokens[add.sequence_id] == small.expected(add)
    assert stats_of(small).num_adapter_evictions == len(names) - 2


def test_the_least_recently_used_idle_adapter_is_evicted(simulate: Simulate) -> None:
    simulation = simulate(num_pages=8, adapters={"a": 2, "b": 2, "c": 2, "d": 3})
    for digest in ("a", "b", "c", "a"):
        simulation.add(f"first-{digest}-{len(simulation.finished)}", digest=digest, max_tokens=1)
        simulation.run()
    simulation.add("d", digest="d", max_tokens=1)
    simulation.run()
    assert [load.digest for load in simulation.adapters.loads()] == ["a", "c", "d"]


def test_an_in_flight_adapter_is_never_evicted(simulate: Simulate) -> None:
    simulation = simulate(num_pages=12, num_slots=2, adapters={"a": 3, "b": 3, "c": 3})
    long = simulation.add("long", digest="a", max_tokens=40)
    for i in range(10):
        simulation.add(f"b{i}", digest="b", max_tokens=2)
        simulation.add(f"c{i}", digest="c", max_tokens=2)
    simulation.run()
    assert simulation.tokens["long"] == simulation.expected(long)


def test_a_failed_adapter_is_tried_again(simulation: Simulation) -> None:
    for _ in range(2):
        simulation.add("x", digest="missing")
        simulation.run()
    assert simulation.stager.num_requests == 2


@pytest.mark.parametrize(
    ("num_pages", "sizes", "num_requests"),
    [(10, {"a": 6, "b": 6}, 2), (20, dict.fromkeys("abcde", 6), 10), (11, {"a": 9, "b": 2, "c": 9}, 6)],
    ids=["two that exclude each other", "five of which three fit", "large and small"],
)
def test_adapters_that_do_not_fit_together_take_turns(
    simulate: Simulate, num_pages: int, sizes: dict[str, int], num_requests: int
) -> None:
    simulation = simulate(num_pages=num_pages, adapters=sizes)
    names = list(sizes)
    adds = [simulation.add(f"s{i}", digest=names[i % len(names)], max_tokens=3) for i in range(num_requests)]
    simulation.run(max_steps=500)
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
    # An older request's KV cache may evict an adapter once, but not repeatedly.
    assert stats_of(simulation).num_adapter_loads <= 2 * num_requests


def test_old_request_is_not_overtaken_forever(simulate: Simulate) -> None:
    simulation = simulate(num_pages=12, adapters={"large": 10, "small": 1})
    for i in range(4):
        simulation.add(f"early{i}", digest="small", max_tokens=8)
    simulation.step()
    simulation.add("old", digest="large", max_tokens=2)
    for i in range(100):
        simulation.add(f"late{i}", digest="small", max_tokens=8)
        simulation.step()
        if "old" in simulation.finished:
            break
    assert simulation.finished["old"].reason == "length"
    simulation.run()


def test_later_adapters_take_no_pages_from_the_first_sequence(simulate: Simulate) -> None:
    simulation = simulate(num_pages=8, max_batch_tokens=128, adapters={"b": 2, "c": 2})
    simulation.add("b", digest="b", max_tokens=2)
    simulation.step()
    head = simulation.add("head", num_prompt=110, max_tokens=2, priority=-1)
    simulation.add("c", digest="c", max_tokens=2)
    assert finishes(simulation, 100)
    assert simulation.tokens["head"] == simulation.expected(head)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_continuous_traffic_does_not_starve_an_adapter_without_a_slot(simulate: Simulate, num_slots: int) -> None:
    names = [f"stream{i}" for i in range(num_slots)]
    simulation = simulate(num_pages=200, num_slots=num_slots, adapters={**dict.fromkeys(names, 1), "late": 1})
    for turn in range(400):
        for name in names:
            if turn % 4 == 0:
                simulation.add(f"{name}-{turn}", digest=name, max_tokens=8, share_key="streams")
        if turn == 10:
            simulation.add("late", digest="late", max_tokens=2, share_key="late")
        simulation.step()
        if "late" in simulation.finished:
            break
    assert simulation.finished["late"].reason == "length"


def test_adapters_without_waiters_are_released(simulate: Simulate) -> None:
    names = {f"a{i}": 2 for i in range(50)}
    simulation = simulate(num_pages=70, num_slots=1, adapters={**names, "busy": 1})
    simulation.add("busy", num_prompt=5, max_tokens=400, digest="busy")
    simulation.step()
    simulation.step()
    for name in names:
        simulation.add(name, digest=name)
        simulation.step()
        simulation.engine.abort(b"gateway", Abort(sequence_id=name))
    simulation.step()
    assert [load.digest for load in simulation.adapters.loads()] == ["busy"]
    simulation.run()


@pytest.mark.parametrize("shares", [1, 5], ids=["one account", "five accounts"])
def test_long_queue_needs_about_one_load_per_request(simulate: Simulate, shares: int) -> None:
    """`order` leaves out some waiting requests with resident adapters. They must not cause extra loads."""
    popular = [f"popular{number}" for number in range(5)]
    rare = [f"rare{number}" for number in range(20)]
    simulation = simulate(num_pages=200, num_slots=6, max_sequences=4, adapters=dict.fromkeys([*popular, *rare], 1))
    rng = random.Random(7)
    adds = [
        simulation.add(
            str(number),
            max_tokens=8,
            digest=rng.choice(popular) if rng.random() < 0.7 else rng.choice(rare),
            share_key=str(number % shares),
        )
        for number in range(100)
    ]
    simulation.run()
    assert all(simulation.tokens[add.sequence_id] == simulation.expected(add) for add in adds)
    assert stats_of(simulation).num_adapter_loads <= len(adds)
