from __future__ import annotations

import pytest

from benchmarks.routing.__main__ import POLICIES
from benchmarks.routing.figures import measure
from benchmarks.routing.fleet import Fleet
from benchmarks.routing.setting import Setting


@pytest.mark.parametrize("zipf", [0.8, 1.0, 1.2])
def test_two_engines_hold_twice_the_adapters_and_hit_about_as_often_as_one_with_both_pools(zipf: float) -> None:
    """As two engines on one machine: one gateway, and half of the sequence slots in each engine."""

    def run(num_engines: int, pool_adapters: int) -> tuple[float, int]:
        setting = Setting(
            num_adapters=200,
            num_replicas=num_engines,
            pool_adapters=pool_adapters,
            capacity=64 // num_engines,
            parallel_loads=8 // num_engines,
            num_gateways=1,
            zipf=zipf,
            settle_s=30.0,
            measure_s=90.0,
        )
        fleet = Fleet(setting, POLICIES["router"])
        fleet.run(setting.settle_s)
        hit_rate = measure(fleet, setting.measure_s).hit_rate
        num_resident = sum(
            any(engine.holds(adapter) for engine in fleet.replicas.values()) for adapter in range(setting.num_adapters)
        )
        return hit_rate, num_resident

    (hit_rate, num_resident), (_, num_in_one), (best_rate, _) = run(2, 40), run(1, 40), run(1, 80)
    assert num_resident >= 1.8 * num_in_one
    assert hit_rate >= 0.95 * best_rate
