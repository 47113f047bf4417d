from __future__ import annotations

import re

import pytest
from llguidance import LLMatcher
from msgspec import structs

from loramux.engine.protocol.messages import Add, SamplingParams
from tests.engine.byte_vocabulary import EOS, ids, text
from tests.engine.constraints.ruled_sequences import expected_tokens
from tests.engine.simulated_engine import GREEDY, VOCAB_SIZE, Simulate, Simulation

EVEN = tuple(range(2, 2000, 2))[:499]
ENDING = structs.replace(GREEDY, ignore_eos=False)


def forbidden_beside(allowed: tuple[int, ...]) -> set[int]:
    return set(range(VOCAB_SIZE)) - set(allowed)


def test_only_listed_tokens_are_generated_and_others_are_unaffected(simulate: Simulate) -> None:
    simulation = simulate(adapters={"a": 2})
    ruled, free = [], []
    for index in range(4):
        digest = "a" if index % 2 else None
        sampling = structs.replace(GREEDY, allowed_token_ids=EVEN)
        ruled.append(simulation.add(f"r{index}", 5 + index, 30, digest, sampling))
        free.append(simulation.add(f"f{index}", 7 + index, 30, digest))
    simulation.run()
    for add in ruled:
        expected = expected_tokens(simulation, add, lambda answer: forbidden_beside(EVEN))
        assert simulation.tokens[add.sequence_id] == expected
        assert expected != simulation.expected(add)
    for add in free:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)


def test_a_preempted_sequence_keeps_its_rules(simulate: Simulate) -> None:
    simulation = simulate(num_pages=6, max_batch_tokens=9)
    sampling = structs.replace(GREEDY, allowed_token_ids=EVEN)
    adds = [simulation.add(f"s{i}", num_prompt=30 - i, max_tokens=30, sampling=sampling) for i in range(3)]
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    for add in adds:
        expected = expected_tokens(simulation, add, lambda answer: forbidden_beside(EVEN))
        assert simulation.tokens[add.sequence_id] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_of_sequence_must_be_listed(simulate: Simulate, temperature: float) -> None:
    simulation = simulate(eos=(EOS,))
    for name, listed in (("listed", (EOS,)), ("both", (EOS, 5)), ("not listed", (5,))):
        sampling = SamplingParams(temperature=temperature, seed=1, allowed_token_ids=listed)
        simulation.add(name, max_tokens=40, sampling=sampling)
    simulation.run()
    assert simulation.tokens["listed"] == []
    assert simulation.finished["listed"].reason == "stop"
    assert set(simulation.tokens["both"]) <= {5}
    assert (simulation.tokens["not listed"], simulation.finished["not listed"].reason) == ([5] * 40, "length")


def add_text(simulation: Simulation, name: str, pattern: str, allowed: str, **fields: object) -> None:
    add = Add(
        sequence_id=name,
        prompt=tuple(ids("Tell me")),
        max_tokens=20,
        sampling=SamplingParams(seed=3, allowed_token_ids=(EOS, *ids(allowed)), **fields),  # type: ignore[arg-type]
        grammar=LLMatcher.grammar_from_regex(pattern),
    )
    simulation.engine.add(b"gateway", add)


def test_a_grammar_and_the_listed_tokens_both_hold(simulate: Simulate) -> None:
    simulation = simulate(eos=(EOS,))
    add_text(simulation, "s", "[a-f]{10}", "cdxyz")
    while "s" not in simulation.finished:
        simulation.step()
    assert re.fullmatch("[cd]{10}", text(simulation.tokens["s"]))
    assert simulation.finished["s"].reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sequence_without_an_allowed_token_fails_alone(simulate: Simulate, temperature: float) -> None:
    simulation = simulate(eos=(EOS,))
    beside = simulation.add("beside", max_tokens=20)
    add_text(simulation, "none", "[ab]{3}[cd]{3}", "ab", temperature=temperature)
    while simulation.engine.has_work:
        simulation.step()
    finished = simulation.finished["none"]
    assert (finished.reason, finished.code) == ("error", "no_token_allowed")
    assert finished.message
    # Only the tokens before the empty mask are emitted and billed.
    assert re.fullmatch("[ab]{3}", text(simulation.tokens["none"]))
    assert finished.completion_tokens == 3
    assert simulation.tokens["beside"] == simulation.expected(beside)
    simulation.engine.check_integrity()


def test_min_tokens_leaves_a_token_or_the_sequence_fails(simulate: Simulate) -> None:
    simulation = simulate(eos=(EOS,))
    for name, listed in (("goes on", (EOS, 5)), ("cannot", (EOS,))):
        sampling = structs.replace(ENDING, min_tokens=3, allowed_token_ids=listed)
        simulation.add(name, max_tokens=9, sampling=sampling)
    simulation.run()
    assert simulation.tokens["goes on"][:3] == [5, 5, 5]
    assert simulation.finished["cannot"].code == "no_token_allowed"
    assert simulation.finished["cannot"].completion_tokens == 0


@pytest.mark.parametrize(
    "listed", [(-1,), (VOCAB_SIZE,), tuple(range(5)) * 300], ids=["negative", "outside", "too many"]
)
def test_bad_lists_are_refused(simulate: Simulate, listed: tuple[int, ...]) -> None:
    simulation = simulate()
    simulation.add("s", sampling=structs.replace(GREEDY, allowed_token_ids=listed))
    simulation.step()
    assert simulation.finished["s"].code == "invalid_request"
    assert "allowed_token_ids" in (simulation.finished["s"].message or "")
