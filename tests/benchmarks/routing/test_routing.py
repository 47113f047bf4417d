from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from benchmarks.answers import CheckError
from benchmarks.routing import table
from benchmarks.routing.__main__ import main, run
from benchmarks.routing.figures import best_hit_rate
from benchmarks.routing.fleet import Fleet
from benchmarks.routing.policies import BALANCE, POLICIES, BoundedLoadHash
from benchmarks.routing.scenarios import cold_burst, replica_dies, replica_joins
from benchmarks.routing.setting import Setting
from loramux.platform.routing.router import Router
from loramux.platform.routing.views import ReplicaView, RoutingRequest

SMALL = Setting(num_adapters=600, num_replicas=10, pool_adapters=70, load=0.8, settle_s=20, measure_s=20)


@pytest.mark.parametrize("zipf", [0.8, 1.2])
def test_router_meets_the_goals_where_random_choice_does_not(zipf: float) -> None:
    setting = replace(SMALL, zipf=zipf)
    routed, random = run(setting, "router"), run(setting, "random")
    assert routed["meets_goals"]
    assert not random["meets_goals"]
    assert routed["figures"]["loads_per_s"] < random["figures"]["loads_per_s"] / 5
    assert routed["figures"]["hit_rate"] <= best_hit_rate(setting)


def test_equal_seeds_give_equal_figures() -> None:
    setting = replace(SMALL, is_warm=False, settle_s=2, measure_s=3)
    assert run(setting, "router") == run(setting, "router")
    assert run(setting, "router") != run(replace(setting, seed=2), "router")


def test_replica_dies() -> None:
    scenario = replica_dies(SMALL, POLICIES["router"])
    assert 0 < scenario.remarks["streams_cut"] <= SMALL.capacity
    assert scenario.during.hit_rate < scenario.before.hit_rate
    assert scenario.after.meets_goals


def test_new_replica_is_neither_starved_nor_flooded() -> None:
    scenario = replica_joins(SMALL, POLICIES["router"])
    assert scenario.remarks["load_over_mean_in_20_to_30_s"] > 0.6
    assert scenario.remarks["highest_load_over_mean"] < 1.6


def test_burst_on_a_cold_adapter_spreads() -> None:
    scenario = cold_burst(SMALL, POLICIES["router"])
    assert scenario.remarks["copies"] > 1
    assert not scenario.after.is_diverging


def test_main_writes_figures(tmp_path: Path) -> None:
    size = "--adapters 50 --replicas 4 --pool 20 --capacity 4 --settle-s 1 --measure-s 2"
    axes = "--start cold --zipf 1 --load 0.5 --gateways 2 --scenarios dies"
    main([*size.split(), *axes.split(), "--out", str(tmp_path / "routing.json")])
    document = json.loads((tmp_path / "routing.json").read_text())
    assert [row["policy"] for row in document["rows"]] == list(POLICIES)
    assert [scenario["name"] for scenario in document["scenarios"]] == ["replica dies"]
    # A heading, a line and five policies; an empty line, a heading, a line and three phases.
    assert len(list(table.lines([document]))) == 7 + 6


def test_lost_request_raises_check_error() -> None:
    fleet = Fleet(replace(SMALL, settle_s=1), POLICIES["router"])
    fleet.run(1.0)
    fleet.check()
    fleet.submitted.pop()
    with pytest.raises(CheckError, match="requests"):
        fleet.check()


@pytest.mark.parametrize(("pool_adapters", "expected"), [(1, 0.5), (2, 1.0)])
def test_best_hit_rate_counts_places(pool_adapters: int, expected: float) -> None:
    setting = Setting(num_adapters=4, num_replicas=2, pool_adapters=pool_adapters, zipf=0.0)
    assert best_hit_rate(setting) == pytest.approx(expected)


def test_best_hit_rate_gives_a_popular_adapter_several_places() -> None:
    # The more popular of two adapters gets 0.8 of the requests, more than the 0.675 that one replica may have.
    assert best_hit_rate(Setting(num_adapters=2, num_replicas=2, pool_adapters=1, zipf=2.0)) == 0.8
    assert best_hit_rate(Setting(num_adapters=2, num_replicas=2, pool_adapters=2, zipf=2.0)) == 1.0


def test_bounded_load_hash_keeps_its_bound() -> None:
    policy = BoundedLoadHash(Random(1))
    policy.update([_view(f"replica-{number}") for number in range(5)])
    request = RoutingRequest(
        digest="ab" * 32, prefix_key=None, share_key="", weight=1, num_prompt_tokens=1, max_tokens=1
    )
    counts: dict[str, int] = {}
    for _ in range(100):
        chosen = policy.choose(request)
        policy.note_started(chosen, request)
        counts[chosen] = counts.get(chosen, 0) + 1
    assert max(counts.values()) <= BALANCE * 100 / 5 + 1
    assert len(counts) >= 4


def test_compared_router_is_the_products() -> None:
    assert type(POLICIES["router"](lambda: 0.0, Random(1))) is Router


def _view(replica_id: str) -> ReplicaView:
    return ReplicaView(
        id=replica_id,
        is_local=False,
        num_running=0,
        num_waiting=0,
        capacity=100,
        pages_free_fraction=1.0,
        is_draining=False,
        holds=frozenset(),
        since_s=0.0,
    )
