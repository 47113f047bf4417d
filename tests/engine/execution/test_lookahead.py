from __future__ import annotations

import pytest

from loramux.engine.protocol.messages import Abort, SamplingParams
from tests.engine.simulated_engine import Simulation, simulate_engine


@pytest.fixture
def simulation() -> Simulation:
    return simulate_engine(adapters={"a": 2, "b": 3}, lookahead=True)


def test_decode_rows_read_the_previous_steps_token(simulation: Simulation) -> None:
    adds = [simulation.add(f"s{i}", num_prompt=3 + i, max_tokens=6, digest=d) for i, d in enumerate([None, "a", "b"])]
    simulation.run()
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
    decodes = [batch for batch in simulation.executor.batches if batch.max_q == 1]
    assert len(decodes) >= 4
    assert all((batch.tokens < 0).all() for batch in decodes)


def test_next_step_is_submitted_before_the_current_one_is_committed(simulation: Simulation) -> None:
    simulation.add("s", max_tokens=3)
    seen = []
    while simulation.engine.has_work:
        simulation.step()
        seen.append((len(simulation.executor.batches), len(simulation.tokens["s"])))
    # Three tokens take three steps, because the engine knows in advance that the third token is the last.
    assert seen == [(1, 0), (2, 1), (3, 2), (3, 3)]


def test_late_end_of_sequence_wastes_one_unbilled_row(simulation: Simulation) -> None:
    probe = simulate_engine()
    third = probe.expected(probe.add("s", max_tokens=9))[2]
    late = simulate_engine(eos=(third,), lookahead=True)
    late.add("s", max_tokens=9, sampling=SamplingParams(temperature=0.0))
    late.run()
    assert len(late.executor.batches) == 4
    assert (late.finished["s"].reason, late.finished["s"].completion_tokens) == ("stop", 3)


def test_aborted_sequences_pages_are_reused_while_its_step_is_in_flight() -> None:
    simulation = simulate_engine(num_pages=4, lookahead=True)
    simulation.add("first", num_prompt=40, max_tokens=8)
    simulation.step()
    simulation.step()
    simulation.engine.abort(b"gateway", Abort(sequence_id="first"))
    second = simulation.add("second", num_prompt=50, max_tokens=8)
    simulation.run()
    assert simulation.tokens["second"] == simulation.expected(second)
    assert simulation.finished["first"].completion_tokens == len(simulation.tokens["first"]) == 1


def test_sequence_id_can_be_reused_while_its_last_step_is_in_flight(simulation: Simulation) -> None:
    simulation.add("s", max_tokens=8)
    for _ in range(3):
        simulation.step()
    simulation.engine.abort(b"gateway", Abort(sequence_id="s"))
    simulation.step()
    simulation.finished.clear()
    simulation.tokens.clear()
    add = simulation.add("s", num_prompt=9, max_tokens=5)
    simulation.run()
    assert simulation.tokens["s"] == simulation.expected(add)


def test_preempted_sequence_keeps_its_token_in_flight() -> None:
    simulation = simulate_engine(num_pages=6, lookahead=True)
    adds = [simulation.add(f"s{i}", num_prompt=20, max_tokens=40) for i in range(3)]
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
