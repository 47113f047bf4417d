from __future__ import annotations

from collections import defaultdict

import pytest

from loramux.engine.protocol.messages import (
    Abort,
    AdapterState,
    Extend,
    Finished,
    FromEngine,
    Load,
    Rejected,
    StepOutput,
    Unload,
)
from tests.engine.simulated_engine import Simulation

FIRST, SECOND = b"first", b"second"


def run_for(simulation: Simulation, max_steps: int = 100) -> dict[bytes, list[FromEngine]]:
    """Step until no work is left, and return the messages for each gateway."""
    told: dict[bytes, list[FromEngine]] = defaultdict(list)
    for _ in range(max_steps):
        if not simulation.engine.has_work:
            break
        simulation.engine.step()
        for outbound in simulation.engine.take_outbox():
            told[outbound.owner].append(outbound.message)
    return told


def tokens_of(told: list[FromEngine]) -> list[int]:
    outputs = [output for message in told if isinstance(message, StepOutput) for output in message.outputs]
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("digest", [None, "a"])
def test_two_gateways_can_use_the_same_id(simulation: Simulation, digest: str | None) -> None:
    adds = {}
    for owner, prompt in ((FIRST, (1, 2, 3)), (SECOND, (9, 8, 7, 6))):
        adds[owner] = simulation.make_add("same", prompt, 6, digest)
        simulation.engine.add(owner, adds[owner])
    told = run_for(simulation)
    for owner, add in adds.items():
        assert tokens_of(told[owner]) == simulation.expected(add)
        assert isinstance(told[owner][-1], Finished)
        assert told[owner][-1].completion_tokens == 6
    assert len(simulation.executor.batches) == 6, "both run concurrently"


def test_duplicate_id_is_rejected_and_the_running_sequence_continues(simulation: Simulation) -> None:
    add = simulation.make_add("same", (1, 2, 3), 6)
    simulation.engine.add(FIRST, add)
    simulation.engine.step()
    simulation.engine.add(FIRST, simulation.make_add("same", (4, 5), 2))
    told = run_for(simulation)[FIRST]
    assert [one.sequence_id for one in told if isinstance(one, Rejected)] == ["same"]
    assert tokens_of(told) == simulation.expected(add)
    assert [one.completion_tokens for one in told if isinstance(one, Finished)] == [6]


def test_gateway_cannot_end_or_extend_anothers_sequence(simulation: Simulation) -> None:
    add = simulation.make_add("mine", (1, 2, 3), 6)
    simulation.engine.add(FIRST, add)
    simulation.engine.step()
    simulation.engine.abort(SECOND, Abort(sequence_id="mine"))
    simulation.engine.extend(SECOND, Extend(sequence_id="mine", max_tokens=50))
    assert tokens_of(run_for(simulation)[FIRST]) == simulation.expected(add)


def test_requests_of_a_dead_gateway_are_dropped(simulation: Simulation) -> None:
    simulation.hold_loads()
    simulation.engine.load(FIRST, Load(call_id="l", digest="b"))
    running = simulation.make_add("running", (1, 2, 3), 30)
    simulation.engine.add(FIRST, simulation.make_add("gone", (1, 2, 3), 30))
    simulation.engine.add(SECOND, running)
    simulation.engine.step()
    simulation.engine.abort_all(FIRST)
    assert tokens_of(run_for(simulation)[SECOND]) == simulation.expected(running)
    assert not simulation.engine.has_work


def test_unload_ends_only_with_its_own_gateway(simulation: Simulation) -> None:
    first = simulation.make_add("running", (1, 2, 3), 40, "a")
    simulation.engine.add(SECOND, first)
    for _ in range(4):
        simulation.engine.step()
    simulation.engine.unload(FIRST, Unload(call_id="dead", digest="a"))
    simulation.engine.unload(SECOND, Unload(call_id="alive", digest="a"))
    simulation.engine.abort_all(FIRST)
    told = run_for(simulation)
    answers = [one for one in told[SECOND] if isinstance(one, AdapterState)]
    assert [(one.call_id, one.state) for one in answers] == [("alive", "absent")]
    ends = [one for one in told[SECOND] if isinstance(one, Finished)]
    assert [(one.reason, one.completion_tokens) for one in ends] == [("length", 40)]
    assert not any(isinstance(one, AdapterState) for one in told[FIRST])
