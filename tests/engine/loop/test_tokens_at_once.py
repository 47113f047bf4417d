from __future__ import annotations

import pytest

from loramux.engine.protocol.messages import Abort, Finished, SamplingParams, StepOutput
from tests.engine.simulated_engine import GREEDY, Simulate, Simulation


def told(simulation: Simulation) -> tuple[list[int], list[int], Finished]:
    """Run one sequence, and return the number of tokens in each output, all tokens, and the final message."""
    sizes: list[int] = []
    tokens: list[int] = []
    while simulation.engine.has_work:
        simulation.engine.step()
        for outbound in simulation.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=(output,)):
                    sizes.append(len(output.token_ids))
                    tokens += output.token_ids
                case Finished():
                    finished = outbound.message
    return sizes, tokens, finished


@pytest.mark.parametrize("lookahead", [False, True], ids=["at-once", "a-step-ahead"])
@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [(1, [1]), (2, [1, 1]), (4, [1, 3]), (5, [1, 4]), (14, [1, 4, 4, 4, 1])],
)
def test_first_token_is_sent_alone_and_the_rest_in_groups(
    simulate: Simulate, lookahead: bool, max_tokens: int, expected: list[int]
) -> None:
    simulation = simulate(lookahead=lookahead)
    add = simulation.add("one", max_tokens=max_tokens, tokens_at_once=4)
    sizes, tokens, finished = told(simulation)
    assert sizes == expected
    assert tokens == simulation.expected(add)
    assert (finished.reason, finished.completion_tokens) == ("length", max_tokens)
    assert finished.stop_token_id is None


def test_pending_tokens_are_sent_before_a_stop_token_ends_the_sequence(simulate: Simulate) -> None:
    whole = simulate().expected(simulate().make_add("one", (1, 2, 3), 12))
    stop = whole[7]
    num_told = whole.index(stop)
    simulation = simulate()
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(stop,))
    simulation.engine.add(b"gateway", simulation.make_add("one", (1, 2, 3), 12, sampling=sampling, tokens_at_once=100))
    _, tokens, finished = told(simulation)
    assert tokens == whole[:num_told]
    assert (finished.reason, finished.completion_tokens) == ("stop", num_told + 1)
    assert finished.stop_token_id == stop


def test_abort_sends_all_billed_tokens(simulation: Simulation) -> None:
    add = simulation.add("one", max_tokens=50, tokens_at_once=100)
    for _ in range(10):
        simulation.step()
    simulation.engine.abort(b"gateway", Abort(sequence_id="one"))
    simulation.run()
    assert len(simulation.tokens["one"]) == simulation.finished["one"].completion_tokens > 1
    assert simulation.tokens["one"] == simulation.expected(add)[: len(simulation.tokens["one"])]


def test_streamed_sequences_receive_each_token_immediately(simulation: Simulation) -> None:
    whole = simulation.add("whole", max_tokens=20, tokens_at_once=100)
    streamed = simulation.add("streamed", max_tokens=20, sampling=GREEDY)
    while len(simulation.tokens["streamed"]) < 19:
        before = len(simulation.tokens["streamed"])
        simulation.step()
        assert len(simulation.tokens["streamed"]) <= before + 1
        assert len(simulation.tokens["whole"]) == min(1, len(simulation.tokens["streamed"]))
    simulation.run()
    for add in (whole, streamed):
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
