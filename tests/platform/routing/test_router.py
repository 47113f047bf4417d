from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.platform.routing.rendezvous import RendezvousOrder
from loramux.platform.routing.router import LOAD_BOUND, MAX_PREFETCHES, Router
from loramux.platform.routing.views import NoReplica, ReplicaView, digest_prefix
from tests.platform.routing.replica_views import Clock, ask, digest_of, reported_at, view

IDS = tuple(f"replica-{number}" for number in range(20))


def router(views: Sequence[ReplicaView], seed: int = 1, clock: Clock | None = None) -> Router:
    made = Router(clock=clock or Clock(), random=Random(seed))
    made.update(views)
    return made


def homes(name: str, ids: Sequence[str] = IDS) -> tuple[str, ...]:
    return RendezvousOrder(ids).order(digest_prefix(digest_of(name)))


def test_request_goes_to_the_holder() -> None:
    for holder in IDS:
        made = router([view(one, load=0.3, holds=["x"] if one == holder else []) for one in IDS])
        assert {made.choose(ask("x")) for _ in range(20)} == {holder}


def test_cold_adapter_is_placed_on_the_emptier_of_two_homes() -> None:
    first, second, *_ = homes("x")
    full = [f"y{number}" for number in range(30)]
    made = router([view(one, holds=full if one == first else full[:15]) for one in IDS])
    assert made.choose(ask("x")) == second
    # The next request goes to the same replica, although no report shows the adapter there yet.
    assert made.choose(ask("x")) == second
    assert made.prefetches() == []


def test_all_gateways_place_a_cold_adapter_on_the_same_replica() -> None:
    views = [view(one, load=0.5) for one in IDS]
    assert len({router(views, seed).choose(ask("x")) for seed in range(16)}) == 1


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.booleans(), st.booleans(), st.floats(0, 1)), min_size=1, max_size=8),
    st.lists(st.sampled_from(["x", "y", None]), max_size=20),
)
def test_draining_replica_receives_nothing(
    states: list[tuple[float, bool, bool, float]], names: list[str | None]
) -> None:
    views = [
        view(IDS[number], load=load, is_draining=is_draining, holds=["x"] * holds, pages_free_fraction=free)
        for number, (load, is_draining, holds, free) in enumerate(states)
    ]
    serving = {one.id for one in views if not one.is_draining}
    made = router(views)
    for name in names:
        if not serving:
            with pytest.raises(NoReplica):
                made.choose(ask(name))
            continue
        chosen = made.choose(ask(name))
        assert chosen in serving
        made.note_started(chosen, ask(name))
    made.update(views)
    assert {one.replica_id for one in made.prefetches()} <= serving


def test_home_that_begins_to_drain_loads_nothing() -> None:
    home, other, third, *_, last = homes("x")
    made = router([view(one, holds=["x"] * (one == last)) for one in IDS])
    assert made.choose(ask("x")) == last
    made.update([view(one, holds=["x"] * (one == last), is_draining=one in (home, other)) for one in IDS])
    assert made.prefetches() == []
    assert made.choose(ask("x")) == last
    assert [prefetch.replica_id for prefetch in made.prefetches()] == [third]


def test_no_replica_is_known() -> None:
    with pytest.raises(NoReplica):
        router([]).choose(ask("x"))


@pytest.mark.parametrize("capacity", [1, 100, 1 << 31], ids=["tiny", "usual", "huge"])
@pytest.mark.parametrize("num_sequences", [0, 1 << 31], ids=["idle", "overloaded"])
def test_false_report_does_not_change_how_other_replicas_are_used(capacity: int, num_sequences: int) -> None:
    """A liar that reports any load and every adapter must not stop others from spilling or make them copy adapters."""
    names = [f"adapter{number}" for number in range(40)]
    honest = [view(one, load=2.0 if one == IDS[0] else 0.3, holds=names) for one in IDS[:5]]
    liar = replace(view("liar", holds=names), capacity=capacity, num_running=num_sequences, num_waiting=num_sequences)
    made = router([*honest, liar])
    chosen = Counter[str]()
    for name in names * 5:
        chosen[made.choose(ask(name))] += 1
    assert not chosen[IDS[0]], "the overloaded replica's requests spill"
    assert all(chosen[one] for one in IDS[1:5])
    assert chosen["liar"] == 0 if num_sequences else chosen["liar"] < 150
    assert made.prefetches() == []


def test_only_the_adapters_of_a_leaving_replica_move() -> None:
    names = [f"adapter{number}" for number in range(300)]
    placing = router([view(one, load=0.5) for one in IDS])
    place = {name: placing.choose(ask(name)) for name in names}
    left = [view(one, load=0.5, holds=[name for name in names if place[name] == one]) for one in IDS[1:]]
    made = router(left)
    chosen = {name: made.choose(ask(name)) for name in names}
    assert all(chosen[name] == place[name] for name in names if place[name] != IDS[0])
    # The adapters of the replica that left are spread over many other replicas.
    assert len({chosen[name] for name in names if place[name] == IDS[0]}) > 5


def test_copies_grow_with_demand_and_decay() -> None:
    clock = Clock()
    views = [view(one, load=0.5, holds=["x"] if one == homes("x")[0] else []) for one in IDS]
    made = router(views, clock=clock)
    holders = {homes("x")[0]}
    sizes = []
    for since_s in range(12):
        for _ in range(10):
            request = ask("x")
            made.note_started(made.choose(request), request)
        made.update(reported_at([view(one, load=0.5, holds=["x"] * (one in holders)) for one in IDS], since_s))
        holders |= {one.replica_id for one in made.prefetches()}
        sizes.append(len(holders))
    assert sizes == sorted(sizes)
    assert sizes[-1] >= 8
    assert holders == set(homes("x")[: len(holders)])
    for _ in range(120):
        for replica_id in IDS:
            made.note_ended(replica_id, ask("x"))
    clock.now_s += 600
    made.update(reported_at([view(one, load=0.5, holds=["x"] * (one in holders)) for one in IDS], 99))
    for _ in range(200):
        made.note_started(made.choose(ask("y")), ask("y"))
    assert {made.choose(ask("x")) for _ in range(50)} <= set(homes("x")[:2])


def test_request_spills_from_an_overloaded_home_only() -> None:
    home = homes("x")[0]

    def chosen(load_of_home: float, load: float) -> set[str]:
        views = [view(one, load=load_of_home if one == home else load, holds=["x"] * (one == home)) for one in IDS]
        return {router(views, seed).choose(ask("x")) for seed in range(20)}

    assert chosen(0.9 * LOAD_BOUND * 0.5, 0.5) == {home}
    assert home not in chosen(2.0, 0.5)
    # If all replicas are overloaded, no request moves.
    assert chosen(2.0, 1.9) == {home}
    # An idle fleet does not spill at the first request.
    assert chosen(0.4, 0.0) == {home}


def test_overloaded_home_spills_to_a_copy_elsewhere_first() -> None:
    home, *_, last = homes("x")
    views = [view(one, load=2.0 if one == home else 0.5, holds=["x"] * (one in (home, last))) for one in IDS]
    assert {router(views, seed).choose(ask("x")) for seed in range(20)} == {last}


def test_idle_fleet_keeps_requests_at_home() -> None:
    home, *_, last = homes("x")
    views = [view(one, load=0.4 if one == home else 0.0, holds=["x"] * (one in (home, last))) for one in IDS]
    assert {router(views, seed).choose(ask("x")) for seed in range(20)} == {home}


def test_pool_without_free_pages_is_avoided() -> None:
    first, second, *_ = homes("x")
    views = [view(one, load=0.5, holds=["x"], pages_free_fraction=0.0 if one == first else 0.5) for one in IDS]
    assert {router(views, seed).choose(ask("x")) for seed in range(20)} == {second}


def test_new_replica_is_filled_in_the_background() -> None:
    names = [f"adapter{number}" for number in range(600)]
    held: dict[str, set[str]] = {one: set() for one in IDS}
    made = router([view(one, load=0.5) for one in IDS[:-1]])
    for name in names:
        held[made.choose(ask(name))].add(name)
    newcomer = IDS[-1]
    for since_s in range(1, 30):
        made.update([view(one, load=0.5, holds=held[one], since_s=since_s) for one in IDS])
        for name in names:
            assert name in held[made.choose(ask(name))], "no request waits for the newcomer"
        prefetches = made.prefetches()
        assert len(prefetches) <= MAX_PREFETCHES
        for prefetch in prefetches:
            assert prefetch.replica_id == newcomer
            held[newcomer] |= {name for name in names if digest_of(name) == prefetch.digest}
    # Its share is 600 / 20 adapters, give or take three standard deviations.
    assert 14 <= len(held[newcomer]) <= 46


def test_new_replica_is_not_flooded_by_gateways_with_the_same_old_views() -> None:
    views = [view(one, load=0.8 if one != IDS[-1] else 0.0) for one in IDS]
    counts: Counter[str] = Counter()
    for seed in range(16):
        made = router(views, seed)
        for _ in range(25):
            chosen = made.choose(ask(None))
            made.note_started(chosen, ask(None))
            counts[chosen] += 1
    mean = 16 * 25 / len(IDS)
    assert mean < counts[IDS[-1]] < 3 * mean


def test_copies_share_requests_although_one_looks_idle_to_all_gateways() -> None:
    copies = homes("x")[:8]
    views = [view(one, load=0.5 if one != copies[0] else 0.4, holds=["x"] * (one in copies)) for one in IDS]
    counts: Counter[str] = Counter()
    for seed in range(16):
        made = router(views, seed)
        for _ in range(40):
            chosen = made.choose(ask("x"))
            made.note_started(chosen, ask("x"))
            counts[chosen] += 1
    assert max(counts.values()) < 0.5 * 16 * 40


def test_local_engine_wins_at_equal_load() -> None:
    made = router([view(one, load=0.5, is_local=one == IDS[3]) for one in IDS])
    assert {made.choose(ask(None)) for _ in range(20)} == {IDS[3]}
    made = router([view(one, load=0.7 if one == IDS[3] else 0.5, is_local=one == IDS[3]) for one in IDS])
    assert IDS[3] not in {made.choose(ask(None)) for _ in range(20)}


@pytest.mark.parametrize("name", ["x", None])
def test_cached_prefix_wins_unless_its_replica_is_much_busier(name: str | None) -> None:
    cached = homes("x")[1]

    def chosen(load: float) -> set[str]:
        views = [view(one, load=load if one == cached else 0.3, holds=["x"]) for one in IDS]
        made = router(views)
        made.note_started(cached, ask(name, prefix=b"conversation"))
        made.note_ended(cached, ask(name, prefix=b"conversation"))
        return {made.choose(ask(name, prefix=b"conversation")) for _ in range(20)}

    assert chosen(0.5) == {cached}
    assert cached not in chosen(1.2)


def test_cached_prefix_does_not_attract_requests_to_a_replica_without_the_adapter() -> None:
    home, other, *_ = homes("x")
    made = router([view(one, load=0.3, holds=["x"] * (one == home)) for one in IDS])
    made.note_started(other, ask("x", prefix=b"conversation"))
    assert made.choose(ask("x", prefix=b"conversation")) == home


def test_share_beyond_its_part_of_a_full_fleet_stays_on_its_copies() -> None:
    home = homes("x")[0]

    def chosen(load: float, share: str) -> set[str]:
        views = [view(one, load=3.0 if one == home else load, holds=["x"] * (one == home)) for one in IDS]
        made = router(views)
        for _ in range(30):
            made.note_started(IDS[0], ask("y", share="flood"))
        for _ in range(3):
            made.note_started(IDS[1], ask("y", share="polite"))
        return {made.choose(ask("x", share=share)) for _ in range(20)}

    assert chosen(1.0, "flood") == {home}
    assert home not in chosen(1.0, "polite")
    # While slots are free, nobody is held back.
    assert home not in chosen(0.8, "flood")


@pytest.mark.parametrize(("weight", "grows"), [(1, False), (4, True)])
def test_share_beyond_its_part_of_a_full_fleet_gets_no_more_copies(weight: int, grows: bool) -> None:
    made = router([view(one, load=1.0, holds=["x"] * (one == homes("x")[0])) for one in IDS])
    for _ in range(30):
        made.note_started(IDS[0], ask("x", share="one", weight=weight))
    for _ in range(20):
        made.note_started(IDS[1], ask("y", share="other"))
    assert made.choose(ask("x", share="one", weight=weight)) == homes("x")[0]
    assert bool(made.prefetches()) == grows


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.lists(st.floats(-1e5, 1e5), max_size=10))
def test_choices_do_not_depend_on_the_clocks_zero(offset_s: float, jumps_s: list[float]) -> None:
    def choices(offset_s: float) -> list[str]:
        clock = Clock(offset_s)
        made = Router(clock=clock, random=Random(1))
        chosen = []
        for number in range(4):
            # The order of the reports' times, and the time between them, must not matter.
            made.update([view(one, load=0.5, holds=["x"], since_s=offset_s + number % 3) for one in IDS[:5]])
            for _ in range(5):
                chosen.append(made.choose(ask("x")))
                made.note_started(chosen[-1], ask("x"))
        return chosen

    assert choices(float(round(offset_s))) == choices(0.0)
    clock = Clock()
    made = router([view(one, load=0.5) for one in IDS], clock=clock)
    for jump_s in jumps_s:
        clock.now_s += jump_s
        chosen = made.choose(ask("x"))
        assert chosen in IDS
        made.note_started(chosen, ask("x"))


def test_requests_can_end_after_their_replica_has_left_and_come_back() -> None:
    made = router([view("a"), view("b")])
    made.note_started("a", ask("x"))
    made.update([view("b")])
    assert made.choose(ask("x")) == "b"
    made.update([view("a"), view("b")])
    made.note_ended("a", ask("x"))
    made.note_ended("gone", ask("x"))
    assert made.choose(ask("x")) in ("a", "b")
