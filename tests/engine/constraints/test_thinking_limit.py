from __future__ import annotations

import pytest
from llguidance import LLMatcher
from msgspec import structs

from loramux.engine.constraints.thinking_limit import ThinkingLimit
from loramux.engine.protocol.messages import Add, SamplingParams, ThinkingBudget
from tests.engine.byte_vocabulary import EOS, ids, text
from tests.engine.simulated_engine import GREEDY, Simulate

BEGIN, END = (50, 51), (60, 61, 62)


def budget(
    num_tokens: int, is_open: bool, begin: tuple[int, ...] = BEGIN, end: tuple[int, ...] = END
) -> ThinkingBudget:
    return ThinkingBudget(num_tokens=num_tokens, begin=begin, end=end, is_open=is_open)


@pytest.mark.parametrize(
    ("num_tokens", "is_open", "answer", "forced"),
    [
        pytest.param(0, True, [], 60, id="at once"),
        pytest.param(0, False, [], None, id="not begun"),
        pytest.param(0, False, [50], None, id="half begun"),
        pytest.param(0, False, [50, 51], 60, id="at once after the begin marker"),
        pytest.param(0, False, [9, 50, 51], 60, id="after a leading token"),
        pytest.param(0, False, [9, 9, 9, 9, 9, 50, 51], None, id="marker inside the answer"),
        pytest.param(2, True, [1], None, id="budget left"),
        pytest.param(2, True, [1, 1], 60, id="budget used up"),
        pytest.param(2, True, [1, 60], 61, id="half written by the model"),
        pytest.param(2, True, [1, 1, 60, 61], 62, id="last token of the marker"),
        pytest.param(2, True, [1, 1, 60, 61, 62], None, id="over"),
        pytest.param(2, True, [60, 61, 62, 1, 1, 1], None, id="ended by the model"),
        pytest.param(2, True, [60, 61, 62, 50, 51, 1, 1, 1], None, id="does not begin again"),
        pytest.param(2, True, [1, 1, 60, 60], 61, id="repeated start of the marker"),
    ],
)
def test_forced_token(num_tokens: int, is_open: bool, answer: list[int], forced: int | None) -> None:
    # A marker in the prompt has no effect.
    prompt = [*BEGIN, *END, 50]
    assert ThinkingLimit(budget(num_tokens, is_open), [*prompt, *answer], len(prompt)).forced_token() == forced
    tokens = list(prompt)
    limit = ThinkingLimit(budget(num_tokens, is_open), tokens, len(prompt))
    for token in answer:
        limit.forced_token()
        tokens.append(token)
    assert limit.forced_token() == forced


def test_thinking_ends_in_any_batch_and_others_are_unaffected(simulate: Simulate) -> None:
    simulation = simulate(num_pages=8, max_batch_tokens=9)
    adds = []
    for num_tokens in (0, 1, 13):
        sampling = structs.replace(GREEDY, thinking=budget(num_tokens, True))
        adds.append(simulation.add(f"s{num_tokens}", 28, 30, sampling=sampling))
    beside = simulation.add("beside", 20, 30)
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    for add in adds:
        thinking = add.sampling.thinking
        assert thinking is not None
        thought = simulation.expected(add)[: thinking.num_tokens]
        assert END[0] not in thought
        begun = [*thought, *END]
        rest = simulation.executor.generate((*add.prompt, *begun), add.max_tokens - len(begun), None)
        assert simulation.tokens[add.sequence_id] == [*begun, *rest]
    assert simulation.tokens["beside"] == simulation.expected(beside)


@pytest.mark.parametrize("num_tokens", [0, 5, 8])
def test_a_grammar_after_the_thinking_is_followed(simulate: Simulate, num_tokens: int) -> None:
    """If the limit falls inside a character, the end marker follows after the character."""
    marker = "</t>"
    grammar = f'start: thought answer\nthought[suffix="{marker}"]: /(.|\\n)*/\nanswer: /[ab]{{3}}/\n'
    assert not LLMatcher.validate_grammar(grammar)
    simulation = simulate(eos=(EOS,))
    for index in range(6):
        thinking = budget(num_tokens, True, tuple(ids("<t>")), tuple(ids(marker)))
        sampling = SamplingParams(seed=index, thinking=thinking)
        prompt = tuple(ids(f"prompt {index}"))
        simulation.engine.add(
            b"g", Add(sequence_id=str(index), prompt=prompt, max_tokens=60, sampling=sampling, grammar=grammar)
        )
    while len(simulation.finished) < 6:
        simulation.step()
    for name, finished in simulation.finished.items():
        assert (finished.reason, finished.code) == ("stop", None)
        thought, _, answer = text(simulation.tokens[name]).partition(marker)
        assert len(answer) == 3
        assert set(answer) <= {"a", "b"}
        assert "\ufffd" not in thought


@pytest.mark.parametrize(
    "wrong", [budget(-1, True), budget(1, True, begin=()), budget(1, True, end=()), budget(1, True, end=(1000,))]
)
def test_wrong_budgets_are_refused(simulate: Simulate, wrong: ThinkingBudget) -> None:
    simulation = simulate()
    simulation.add("s", sampling=structs.replace(GREEDY, thinking=wrong))
    simulation.step()
    assert simulation.finished["s"].code == "invalid_request"
