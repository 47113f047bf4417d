from __future__ import annotations

import math

import pytest

from tests.engine.simulated_engine import Simulation


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0])
def test_invalid_time_is_refused_without_affecting_others(simulation: Simulation, seconds: float) -> None:
    simulation.add("bad", max_tokens=2, pause_s=seconds)
    simulation.add("late", max_tokens=2, pause_s=5.0)
    for _ in range(6):
        simulation.step()
    assert "late" not in simulation.finished
    simulation.clock.now = 5.0
    simulation.run()
    assert simulation.finished["bad"].code == "invalid_request"
    assert simulation.finished["late"].reason == "length"
