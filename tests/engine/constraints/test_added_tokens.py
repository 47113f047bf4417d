"""A grammar can name the tokens that adapters add; only sequences with such tokens can choose them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from loramux.engine.constraints.grammar import Grammar
from loramux.engine.constraints.limits import parser_limits
from loramux.engine.constraints.vocabulary import NUM_ADDED_TOKENS, VocabularyNotUsable, load_vocabulary
from tests.demo_base import DEMO_BASE
from tests.engine.constraints.masks import allowed_tokens, follow

BASE_SIZE = 1024
"""Both the tokenizer and the embedding of the demo's base have this size."""


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(DEMO_BASE, BASE_SIZE, (1,))


def begun(vocabulary: LLTokenizer, grammar: str, vocab_size: int) -> Grammar:
    return follow(LLMatcher(vocabulary, grammar, limits=parser_limits()), vocab_size)


def test_a_grammar_reaches_a_token_of_the_adapter(vocabulary: LLTokenizer) -> None:
    assert vocabulary.vocab_size == BASE_SIZE + NUM_ADDED_TOKENS
    grammar = begun(vocabulary, f"start: <[{BASE_SIZE + 1}]> /[a-c]/", BASE_SIZE + 2)
    mask = grammar.mask()
    assert mask is not None
    assert allowed_tokens(mask) == [BASE_SIZE + 1]
    grammar.accept(BASE_SIZE + 1)
    mask = grammar.mask()
    assert mask is not None
    assert BASE_SIZE not in allowed_tokens(mask)


@pytest.mark.parametrize("vocab_size", [BASE_SIZE, BASE_SIZE + 1])
def test_a_sequence_without_the_token_cannot_follow(vocabulary: LLTokenizer, vocab_size: int) -> None:
    grammar = begun(vocabulary, f"start: <[{BASE_SIZE + 1}]>", vocab_size)
    assert grammar.mask() is None
    assert grammar.failure == "no token of the model's vocabulary can follow"


def test_a_smaller_vocabulary_ends_within_a_byte_of_the_mask(vocabulary: LLTokenizer) -> None:
    grammar = begun(vocabulary, "start: /(.|\\n)*/", 1019)
    mask = grammar.mask()
    assert mask is not None
    assert max(allowed_tokens(mask)) == 1018


def test_no_text_contains_the_tokens(vocabulary: LLTokenizer) -> None:
    grammar = begun(vocabulary, "start: /(.|\\n)*/", BASE_SIZE + NUM_ADDED_TOKENS)
    mask = grammar.mask()
    assert mask is not None
    assert max(allowed_tokens(mask)) < BASE_SIZE


@pytest.mark.parametrize("text", ["{", "{}", '{"model": {"vocab": 5}}', "[]"])
def test_an_unusable_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(VocabularyNotUsable, match=r"tokenizer\.json cannot be used"):
        load_vocabulary(tmp_path, 10, (1,))


def test_gaps_between_the_bases_tokens_are_kept(tmp_path: Path) -> None:
    document = json.loads((DEMO_BASE / "tokenizer.json").read_text())
    document["added_tokens"][-1]["id"] = 2000
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert load_vocabulary(tmp_path, BASE_SIZE, (1,)).vocab_size == 2001 + NUM_ADDED_TOKENS
