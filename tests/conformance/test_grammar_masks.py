"""Masks equal the masks of a brute-force oracle over the whole vocabulary.

If the grammar allows only one text, a mask may allow only the first token of its usual tokenization, because models
have rarely seen the alternatives.
"""

from __future__ import annotations

import random

import pytest
from llguidance import LLMatcher, LLTokenizer

from loramux.engine.constraints.limits import parser_limits
from loramux.platform.grammars.check import checked_grammar
from tests.conformance.random_languages import MAX_NESTING, Language, languages
from tests.engine.byte_vocabulary import BYTES, EOS, TOKENS, VOCAB_SIZE, byte_vocabulary, tokenized
from tests.engine.constraints.masks import allowed_tokens, follow

NUM_LANGUAGES = 200
"""Number of languages in the campaign."""
FEW = 60
NUM_STEPS = MAX_NESTING - 1


def oracle(language: Language, prefix: bytes, tokens: list[bytes]) -> set[int]:
    """Return all tokens allowed after `prefix`, found by trying each token of the vocabulary."""
    allowed = {index for index, token in enumerate(tokens) if index != EOS and language.may_continue(prefix + token)}
    return allowed | ({EOS} if language.contains(prefix) else set())


def forced_text(language: Language, prefix: bytes) -> bytes:
    """Return the bytes that must follow `prefix`, up to the length of the longest token."""
    forced = b""
    while len(forced) < max(map(len, TOKENS)) and not language.contains(prefix + forced):
        following = [byte for byte in BYTES[:EOS] if language.may_continue(prefix + forced + byte)]
        if len(following) != 1:
            break
        forced += following[0]
    return forced


def check_walk(language: Language, vocabulary: LLTokenizer, tokens: list[bytes], generator: random.Random) -> int:
    """Compare the masks of one random answer with the oracle. Return the number of masks."""
    text = checked_grammar(language.kind, language.text, vocabulary)
    grammar = follow(LLMatcher(vocabulary, text, log_level=0, limits=parser_limits()), VOCAB_SIZE)
    prefix, num_masks = b"", 0
    for _ in range(NUM_STEPS):
        expected = oracle(language, prefix, tokens)
        if grammar.is_complete:
            allowed = {EOS}
        else:
            mask = grammar.mask()
            assert mask is not None, (language, prefix, grammar.failure)
            allowed = set(allowed_tokens(mask))
        if allowed != expected:
            forced = forced_text(language, prefix)
            usual = tokenized(forced, tokens)[:1]
            difference = [tokens[index] for index in allowed ^ expected]
            assert [*allowed] == usual, (language.kind, language.text, prefix, difference, forced)
        num_masks += 1
        goes_on = sorted(expected - {EOS})
        if not goes_on:
            break
        # Prefer a token of several bytes in half of the steps.
        long = [index for index in goes_on if len(tokens[index]) > 1]
        token = generator.choice(long if long and generator.random() < 0.5 else goes_on)
        grammar.accept(token)
        prefix += tokens[token]
    return num_masks


@pytest.mark.parametrize("num_languages", [FEW, pytest.param(NUM_LANGUAGES, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("has_words", [pytest.param(False, id="bytes"), pytest.param(True, id="merged tokens")])
def test_masks_equal_the_oracle(has_words: bool, num_languages: int) -> None:
    vocabulary, tokens = byte_vocabulary(has_words=has_words), TOKENS if has_words else BYTES
    num_masks = sum(
        check_walk(language, vocabulary, tokens, random.Random(number))
        for number, language in enumerate(languages(num_languages))
    )
    assert num_masks > 3 * num_languages
