from __future__ import annotations

from functools import partial

import pytest

from tests.engine.simulated_engine import Simulate, Simulation, simulate_engine


@pytest.fixture(params=[False, True], ids=["at once", "lookahead"])
def lookahead(request: pytest.FixtureRequest) -> bool:
    """True if the engine submits the next step before it reads the current step's tokens."""
    return bool(request.param)


@pytest.fixture
def simulate(lookahead: bool) -> Simulate:
    return partial(simulate_engine, lookahead=lookahead)


@pytest.fixture
def simulation(simulate: Simulate) -> Simulation:
    return simulate(adapters={"a": 2, "b": 3, "c": 1})
