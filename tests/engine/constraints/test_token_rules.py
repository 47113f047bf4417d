from __future__ import annotations

import numpy as np
import pytest

from loramux.engine.constraints.grammar import Mask
from loramux.engine.constraints.token_rules import TokenRules, token_rules
from loramux.engine.protocol.messages import SamplingParams, ThinkingBudget
from tests.engine.constraints.masks import allowed_tokens


def mask_of(*token_ids: int, vocab_size: int) -> Mask:
    is_allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
    is_allowed[list(token_ids)] = True
    return np.packbits(is_allowed, bitorder="little")


def rules_of(vocab_size: int = 70, **fields: object) -> TokenRules:
    rules = token_rules(SamplingParams(**fields), [], 0, vocab_size)  # type: ignore[arg-type]
    assert rules is not None
    return rules


def allowed(mask: Mask | None) -> list[int]:
    assert mask is not None
    return allowed_tokens(mask)


def test_settings_without_rules_have_none() -> None:
    assert token_rules(SamplingParams(stop_token_ids=(3,), min_tokens=4), [], 0, 70) is None


@pytest.mark.parametrize("vocab_size", [70, 64, 63, 1000])
def test_only_the_listed_tokens_are_allowed(vocab_size: int) -> None:
    listed = (0, 7, 8, 33, vocab_size - 1)
    mask = rules_of(vocab_size, allowed_token_ids=listed).restrict(None)
    assert mask is not None
    assert len(mask) == -(-vocab_size // 32) * 4
    assert allowed(mask) == list(listed)


def test_a_grammar_allows_only_what_the_rules_allow_too() -> None:
    rules = rules_of(allowed_token_ids=(1, 5, 69))
    grammar = mask_of(0, 5, 6, 69, vocab_size=70)
    before = grammar.copy()
    assert allowed(rules.restrict(grammar, held_back=(69,))) == [5]
    assert (grammar == before).all()
    # Masks of later tokens ignore the tokens held back.
    assert allowed(rules.restrict(None)) == [1, 5, 69]


def test_rules_after_drafts_are_those_of_the_longer_text() -> None:
    """The rules themselves do not change, and a copy that allows nothing does not make them fail."""
    tokens = [9, 20, 4]
    budget = ThinkingBudget(num_tokens=3, begin=(20,), end=(21, 22), is_open=False)
    for fields in ({"thinking": budget}, {"bad_words": ((4, 6), (6, 7, 8))}, {"allowed_token_ids": (5,)}):
        params = SamplingParams(**fields)  # type: ignore[arg-type]
        rules = TokenRules(params, tokens, 1, 70)
        rules.restrict(None)
        for drafts in ((6,), (6, 7), (6, 7, 21)):
            longer = TokenRules(params, [*tokens, *drafts], 1, 70)
            assert allowed(rules.after(drafts).restrict(None)) == allowed(longer.restrict(None))
        assert allowed(rules.restrict(None)) == allowed(TokenRules(params, list(tokens), 1, 70).restrict(None))
    assert rules.after((6,)).restrict(None, held_back=(5,)) is None
    assert rules.failure is None


def test_end_tokens_beyond_a_smaller_vocabulary_are_ignored() -> None:
    rules = rules_of(vocab_size=20, allowed_token_ids=(1, 5))
    assert allowed(rules.restrict(None, held_back=(1, 31, 32, 128_001))) == [5]


@pytest.mark.parametrize(
    ("grammar", "held_back"),
    [
        pytest.param(mask_of(2, 3, vocab_size=70), (), id="disjoint from the grammar"),
        pytest.param(None, (1, 5), id="only end tokens"),
    ],
)
def test_rules_that_leave_no_token_fail_for_good(grammar: Mask | None, held_back: tuple[int, ...]) -> None:
    rules = rules_of(allowed_token_ids=(1, 5))
    assert rules.restrict(grammar, held_back) is None
    assert rules.failure
    assert rules.restrict(None) is None
