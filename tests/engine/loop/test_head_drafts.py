"""Drafts of the base's own head on a simulated device, which guesses right four times of five."""

from __future__ import annotations

import msgspec
import pytest

from loramux.engine.drafting.speculation import MAX_SEQUENCES
from loramux.engine.protocol.messages import Extend, SamplingParams
from tests.engine.loop.test_drafts import SETTINGS, VOCAB_SIZE, predicting, request, run
from tests.engine.simulated_engine import GREEDY, Simulate, stats_of


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_answers_are_the_same_with_drafts_of_the_head(simulate: Simulate, sampling: SamplingParams) -> None:
    settings = {"vocab_size": VOCAB_SIZE, "adapters": {"a": 2, "b": 3}, "eos": (9,)}
    adds = [
        request(f"{index}", sampling, digest, tokens_at_once=once)
        for index, (digest, once) in enumerate(((None, 1), ("a", 4), ("b", 1)))
    ]
    plain = run(simulate(**settings), adds)
    simulation = simulate(has_head=True, **settings)
    assert run(simulation, adds) == plain
    drafts = stats_of(simulation).drafts
    assert 0 <= drafts.accepted_head_tokens < drafts.head_tokens
    assert drafts.text_tokens == drafts.prediction_tokens == 0
    assert stats_of(simulation).completion_tokens == sum(one.end.completion_tokens for one in plain.values() if one.end)


def test_drafts_of_the_head_take_fewer_steps(simulate: Simulate) -> None:
    adds = [request("one", GREEDY)]
    simulation, drafted = simulate(), simulate(has_head=True)
    assert run(drafted, adds) == run(simulation, adds)
    assert stats_of(drafted).num_steps < stats_of(simulation).num_steps * 0.7


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_drafts_of_the_head_end_at_the_limit(simulate: Simulate, max_tokens: int) -> None:
    add = request("one", GREEDY, max_tokens=max_tokens)
    simulation = simulate(has_head=True)
    plain = run(simulate(), [add])
    assert run(simulation, [add]) == plain
    assert len(plain["one"].tokens) == max_tokens
    assert stats_of(simulation).completion_tokens == max_tokens


def test_drafts_of_the_head_end_at_the_end_of_the_context(simulate: Simulate) -> None:
    add = request("one", GREEDY, max_tokens=43)
    plain = run(simulate(max_model_len=64), [add])
    assert run(simulate(max_model_len=64, has_head=True), [add]) == plain


def test_the_head_drafts_on_after_a_pause(simulate: Simulate) -> None:
    tokens = run(simulate(), [request("one", GREEDY)])["one"].tokens
    simulation = simulate(has_head=True)
    simulation.engine.add(b"gateway", request("one", GREEDY, max_tokens=10, pause_s=5.0))
    for _ in range(20):
        simulation.step()
    assert simulation.tokens["one"] == tokens[:10]
    simulation.engine.extend(b"gateway", Extend(sequence_id="one", max_tokens=33))
    for _ in range(40):
        simulation.step()
    assert simulation.tokens["one"] == tokens[:33]
    simulation.clock.now += 6.0
    simulation.run()
    assert (simulation.finished["one"].reason, simulation.finished["one"].completion_tokens) == ("length", 33)


def test_preempted_sequences_go_on_where_they_were(simulate: Simulate) -> None:
    adds = [request(f"{index}", GREEDY) for index in range(4)]
    plain = run(simulate(num_pages=64), adds)
    simulation = simulate(num_pages=12, has_head=True)
    found = run(simulation, adds)
    assert {name: one.tokens for name, one in found.items()} == {name: one.tokens for name, one in plain.items()}
    assert simulation.scheduler.num_preemptions > 0
    assert stats_of(simulation).drafts.accepted_head_tokens > 0


def test_a_request_can_refuse_drafts_of_the_head(simulate: Simulate) -> None:
    simulation = simulate(has_head=True)
    run(simulation, [request("one", GREEDY, speculates=False)])
    assert stats_of(simulation).drafts.head_tokens == 0
    assert not any(batch.head.is_drafting for batch in simulation.executor.batches if batch.head is not None)


def test_large_batches_have_no_drafts_of_the_head(simulate: Simulate) -> None:
    adds = [request(f"{index}", GREEDY) for index in range(MAX_SEQUENCES + 1)]
    simulation = simulate(max_batch_tokens=512, has_head=True)
    assert run(simulation, adds) == run(simulate(max_batch_tokens=512), adds)
    assert stats_of(simulation).drafts.head_tokens == 0


def test_a_prediction_is_drafted_first(simulate: Simulate) -> None:
    adds = [request("one", GREEDY)]
    plain = run(simulate(), adds)
    simulation = simulate(has_head=True)
    assert run(simulation, predicting(adds, plain)) == plain
    drafts = stats_of(simulation).drafts
    assert drafts.accepted_prediction_tokens > 20
    assert drafts.text_tokens == 0


def test_cached_prefixes_and_chunks_of_prompts_have_drafts(simulate: Simulate) -> None:
    """The simulated head asserts that each position before a draft has the token after it."""
    adds = [msgspec.structs.replace(request(f"{index}", GREEDY), prompt=(*range(50), index)) for index in range(5)]
    simulation = simulate(max_batch_tokens=16, has_head=True)
    plain = run(simulate(), adds)
    for add in adds:
        [(name, answer)] = run(simulation, [add]).items()
        assert answer.tokens == plain[name].tokens
    assert stats_of(simulation).cached_tokens > 0
    assert stats_of(simulation).drafts.accepted_head_tokens > 40
