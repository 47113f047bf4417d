from __future__ import annotations

import pytest
from msgspec import structs

from loramux.engine.constraints.token_rules import token_rules
from loramux.engine.protocol.messages import SamplingParams
from tests.engine.constraints.masks import allowed_tokens
from tests.engine.constraints.ruled_sequences import expected_tokens
from tests.engine.simulated_engine import GREEDY, VOCAB_SIZE, Simulate


@pytest.mark.parametrize(
    ("answer", "forbidden"),
    [
        pytest.param([], [7], id="one token"),
        pytest.param([1], [2, 7], id="last of two"),
        pytest.param([1, 1], [2, 7], id="repeated start"),
        pytest.param([1, 5], [7], id="interrupted"),
        pytest.param([4, 1, 2], [3, 7], id="last of three"),
    ],
)
def test_the_token_that_would_complete_a_word_is_forbidden(answer: list[int], forbidden: list[int]) -> None:
    params = SamplingParams(bad_words=((7,), (1, 2), (1, 2, 3)))
    # The prompt ends with token 1, but a word does not begin in the prompt.
    rules = token_rules(params, [9, 1, *answer], 2, 70)
    assert rules is not None
    mask = rules.restrict(None)
    assert mask is not None
    assert sorted(set(range(70)) - set(allowed_tokens(mask))) == forbidden


def test_words_are_avoided_and_other_sequences_are_unaffected(simulate: Simulate) -> None:
    simulation = simulate(num_pages=8, max_batch_tokens=9)
    adds, words = [], {}
    for index in range(3):
        name = f"s{index}"
        add = simulation.make_add(name, tuple(range(index, index + 28)), 30)
        free = simulation.expected(add)
        words[name] = ((free[2],), (free[0], free[1]), (0, 0))
        adds.append(structs.replace(add, sampling=structs.replace(GREEDY, bad_words=words[name])))
        simulation.engine.add(b"gateway", adds[-1])
    beside = simulation.add("beside", 20, 30)
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    for add in adds:
        found = words[add.sequence_id]

        def forbidden(answer: list[int], found: tuple[tuple[int, ...], ...] = found) -> list[int]:
            return [word[-1] for word in found if len(word) == 1 or answer[-1:] == [word[0]]]

        expected = expected_tokens(simulation, add, forbidden)
        assert simulation.tokens[add.sequence_id] == expected
        assert expected != simulation.expected(add)
    assert simulation.tokens["beside"] == simulation.expected(beside)


@pytest.mark.parametrize("words", [((),), ((VOCAB_SIZE,),), ((-1,),), ((1,),) * 129])
def test_words_that_are_no_tokens_are_refused(simulate: Simulate, words: tuple[tuple[int, ...], ...]) -> None:
    simulation = simulate()
    simulation.add("s", sampling=structs.replace(GREEDY, bad_words=words))
    simulation.step()
    assert simulation.finished["s"].code == "invalid_request"
    assert "bad_words" in (simulation.finished["s"].message or "")
