from __future__ import annotations

import random

import pytest

from loramux.engine.drafting import text_index
from loramux.engine.drafting.text_index import MAX_CHAIN, MAX_MATCH, MIN_MATCH, TextIndex


def longest_match(text: list[int], tokens: list[int]) -> int:
    """The length of the longest match of the last tokens, by comparing every place."""
    found = 0
    for end in range(len(text) + 1):
        length = 0
        while length < min(end, len(tokens), MAX_MATCH) and text[end - 1 - length] == tokens[-1 - length]:
            length += 1
        found = max(found, length)
    return found if found >= MIN_MATCH else 0


@pytest.mark.parametrize("vocab_size", [2, 7, 60])
def test_matches_are_real_and_the_longest_of_the_recent_ones(vocab_size: int) -> None:
    dice = random.Random(vocab_size)
    num_longest = num_found = 0
    for _ in range(200):
        text = [dice.randrange(vocab_size) for _ in range(dice.randint(0, 60))]
        tokens = [dice.randrange(vocab_size) for _ in range(dice.randint(0, 5))]
        start = dice.randint(0, len(text))
        tokens += text[start : start + 12]
        index = TextIndex(text)
        index.extend(len(text))
        match, longest = index.find(tokens), longest_match(text, tokens)
        assert (match is None) == (longest == 0)
        if match is not None:
            place, length = match
            assert text[place - length : place] == tokens[len(tokens) - length :]
            num_found += 1
            num_longest += length == longest
    # Only MAX_CHAIN places are compared, so with two tokens the longest match can be missed.
    assert num_found > 50
    assert num_longest == num_found if vocab_size > 2 else num_longest > num_found // 2


def test_the_most_recent_of_equal_matches_wins() -> None:
    text = [1, 2, 3, 4, 0, 1, 2, 3, 5]
    index = TextIndex(text)
    index.extend(len(text))
    assert index.find([1, 2, 3]) == (8, 3)


def test_a_longer_match_wins_over_a_recent_one() -> None:
    text = [9, 1, 2, 3, 4, 0, 1, 2, 3, 5]
    index = TextIndex(text)
    index.extend(len(text))
    assert index.find([9, 1, 2, 3]) == (4, 4)


def test_a_match_beyond_the_chain_is_not_found() -> None:
    text = [9, 1, 2, 3, *[0, 1, 2, 3] * MAX_CHAIN]
    index = TextIndex(text)
    index.extend(len(text))
    assert index.find([9, 1, 2, 3]) == (len(text), 3)


def test_a_growing_text_is_indexed_in_parts() -> None:
    text: list[int] = []
    index = TextIndex(text)
    dice = random.Random(0)
    for _ in range(40):
        text += [dice.randrange(4) for _ in range(dice.randint(0, 5))]
        index.extend(len(text), max_tokens=4)
    index.extend(len(text))
    whole = TextIndex(list(text))
    whole.extend(len(text))
    for end in range(len(text)):
        assert index.find(text[:end]) == whole.find(text[:end])


def test_only_the_last_places_of_a_long_text_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_index, "MAX_PLACES", 50)
    text = list(range(1000))
    index = TextIndex(text)
    for end in range(0, 1001, 20):
        index.extend(end)
        assert len(index._previous) <= 100
        assert len(index._latest) <= 100
    assert index.find([990, 991, 992]) == (993, 3)
    assert index.find([10, 11, 12]) is None
