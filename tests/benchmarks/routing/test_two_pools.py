from __future__ import annotations

import pytest

from benchmarks.routing.__main__ import run
from benchmarks.routing.setting import Setting


@pytest.mark.parametrize("zipf", [0.8, 1.0, 1.2])
def test_two_engines_hit_about_as_often_as_one_with_both_pools(zipf: float) -> None:
    """As two engines on one machine: one gateway, and half of the slots and of the pool in each engine."""

    def hit_rate(num_engines: int) -> float:
        setting = Setting(
            num_adapters=200,
            num_replicas=num_engines,
            pool_adapters=80 // num_engines,
            capacity=64 // num_engines,
            parallel_loads=8 // num_engines,
            num_gateways=1,
            zipf=zipf,
            settle_s=30.0,
            measure_s=90.0,
        )
        return float(run(setting, "router")["figures"]["hit_rate"])

    assert hit_rate(2) >= 0.95 * hit_rate(1)
