from __future__ import annotations

import math

import pytest

from loramux.engine.protocol.messages import AdapterState, Unload
from tests.engine.simulated_engine import Simulation

NO_TIMES = [math.nan, math.inf, -math.inf, -1.0]


@pytest.mark.parametrize("field", ["timeout_s", "pause_s"])
@pytest.mark.parametrize("seconds", NO_TIMES)
def test_invalid_time_is_refused_without_affecting_others(simulation: Simulation, field: str, seconds: float) -> None:
    simulation.add("bad", max_tokens=2, **{field: seconds})
    simulation.add("late", max_tokens=400, timeout_s=5.0)
    for _ in range(6):
        simulation.step()
    simulation.clock.now = 5.0
    simulation.run()
    assert simulation.finished["bad"].code == "invalid_request"
    assert simulation.finished["late"].code == "deadline_exceeded"


@pytest.mark.parametrize("seconds", NO_TIMES)
def test_unload_with_an_invalid_deadline_is_refused(simulation: Simulation, seconds: float) -> None:
    add = simulation.add("s", digest="a", max_tokens=10)
    simulation.step()
    simulation.engine.unload(b"gateway", Unload(call_id="u", digest="a", deadline_s=seconds))
    (answer,) = [outbound.message for outbound in simulation.engine.take_outbox()]
    assert isinstance(answer, AdapterState)
    assert (answer.state, answer.code) == ("failed", "invalid_request")
    simulation.run()
    assert simulation.tokens["s"] == simulation.expected(add)


def test_expired_deadline_ends_the_request_before_it_runs(simulation: Simulation) -> None:
    simulation.add("s", timeout_s=0.0)
    simulation.run()
    assert (simulation.finished["s"].code, simulation.finished["s"].prompt_tokens) == ("deadline_exceeded", 0)
