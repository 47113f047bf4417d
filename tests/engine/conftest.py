from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from loramux.engine.constraints import grammars
from tests.engine.shared_grammar_processes import shared_link
from tests.engine.simulated_engine import Simulate, Simulation, simulate_engine


@pytest.fixture(params=[False, True], ids=["at once", "lookahead"])
def lookahead(request: pytest.FixtureRequest) -> bool:
    """True if the engine submits the next step before it reads the current step's tokens."""
    return bool(request.param)


@pytest.fixture
def simulate(lookahead: bool) -> Iterator[Simulate]:
    with ExitStack() as stack:

        def made(**arguments: Any) -> Simulation:
            simulation = simulate_engine(**{"lookahead": lookahead} | arguments)
            stack.callback(simulation.grammars.close)
            return simulation

        yield made


@pytest.fixture
def simulation(simulate: Simulate) -> Simulation:
    return simulate(adapters={"a": 2, "b": 3, "c": 1})


@pytest.fixture
def shared_grammar_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "ProcessLink", shared_link)
