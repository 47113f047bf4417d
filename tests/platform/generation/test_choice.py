from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.engine.protocol.messages import Add, Finished, SamplingParams, SequenceOutput, TokenLogprobs
from loramux.platform.generation.choice import Choice, ChoiceDelta
from loramux.platform.generation.plan import Reasoning, TextRules
from loramux.platform.tool_calls.reasoning import Markers

RULES = {
    "plain": TextRules(),
    "special tokens": TextRules(skip_special_tokens=False),
    "stop": TextRules(stops=("e", "th")),
    "shown stop": TextRules(stops=("at",), include_stop_str_in_output=True),
    "reasoning": TextRules(reasoning=Reasoning(Markers("<think>", "</think>"), True)),
}


def fed(tokenizer: Any, rules: TextRules, parts: list[list[int]], min_tokens: int) -> tuple[Any, ...]:
    """Feed tokens in these parts, then the end. Return all that the client sees, and the numbers of billed tokens."""
    sampling = SamplingParams(min_tokens=min_tokens)
    num_tokens = sum(map(len, parts))
    choice = Choice(0, Add(sequence_id="s", prompt=(5,), max_tokens=64, sampling=sampling), tokenizer, rules)
    deltas: list[ChoiceDelta | None] = []
    for part in parts:
        logprobs = tuple(TokenLogprobs(token_id=token_id, logprob=-1.0) for token_id in part)
        deltas.append(choice.feed(SequenceOutput(sequence_id="s", token_ids=tuple(part), logprobs=logprobs)))
    deltas.append(
        choice.finish(Finished(sequence_id="s", reason="length", prompt_tokens=1, completion_tokens=num_tokens))
    )
    found = [delta for delta in deltas if delta is not None]
    return (
        "".join(delta.text for delta in found),
        "".join(delta.reasoning for delta in found),
        [token_id for delta in found for token_id in delta.token_ids],
        [entry.token_id for delta in found for entry in delta.logprobs],
        [(one.text, one.logprobs) for delta in found for one in delta.text_tokens if one.logprobs],
        [delta.finish_reason for delta in found if delta.finish_reason],
        choice.completion_tokens,
        choice.num_reasoning,
    )


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@settings(max_examples=30, deadline=None)
@given(
    ids=st.lists(st.integers(0, 1023), min_size=1, max_size=24),
    cuts=st.sets(st.integers(1, 23)),
    min_tokens=st.integers(0, 3),
)
def test_joined_tokens_give_what_single_tokens_give(
    tokenizer: Any, rules: TextRules, ids: list[int], cuts: set[int], min_tokens: int
) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    parts = [ids[start:end] for start, end in pairwise(places)]
    singly = fed(tokenizer, rules, [[token_id] for token_id in ids], min_tokens)
    assert fed(tokenizer, rules, parts, min_tokens) == singly
