"""The file with an adapter's own tokens is parsed strictly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.version_files.added_vocabulary import (
    MAX_ADDED_TOKENS,
    AddedToken,
    AddedVocabulary,
    encode_added_vocabulary,
    parse_added_vocabulary,
)

PLAIN = {"special": False, "lstrip": False, "rstrip": False, "single_word": False, "normalized": True}


def listed(*contents: str, first: int = 10) -> list[dict[str, Any]]:
    return [{"id": first + index, "content": content, **PLAIN} for index, content in enumerate(contents)]


def test_a_vocabulary_is_read_as_written() -> None:
    flags = (True, False, True, False, True)
    tokens = (AddedToken(10, "<|ü|>", *flags), AddedToken(11, ' \u0000"', *flags[::-1]))
    written = AddedVocabulary(12, tokens)
    assert parse_added_vocabulary(encode_added_vocabulary(written)) == written


def test_the_most_tokens_and_characters_are_accepted() -> None:
    contents = [f"{index:03}" + "x" * 253 for index in range(MAX_ADDED_TOKENS)]
    document = {"vocab_size": 10 + MAX_ADDED_TOKENS, "tokens": listed(*contents)}
    assert len(parse_added_vocabulary(json.dumps(document).encode()).tokens) == MAX_ADDED_TOKENS


HOSTILE = {
    "no object": ([], "invalid_vocabulary", "added_vocabulary.json"),
    "no tokens": ({"vocab_size": 12}, "invalid_vocabulary", "added_vocabulary.json"),
    "more keys": ({"vocab_size": 12, "tokens": [], "x": 1}, "invalid_vocabulary", "added_vocabulary.json"),
    "tokens as object": ({"vocab_size": 12, "tokens": {"a": 1}}, "invalid_vocabulary", "tokens"),
    "no size": ({"vocab_size": 0, "tokens": []}, "invalid_vocabulary", "vocab_size"),
    "a size as text": ({"vocab_size": "12", "tokens": []}, "invalid_vocabulary", "vocab_size"),
    "a true size": ({"vocab_size": True, "tokens": []}, "invalid_vocabulary", "vocab_size"),
    "a huge size": ({"vocab_size": 1 << 63, "tokens": []}, "invalid_vocabulary", "vocab_size"),
    "too many": (
        {"vocab_size": 999, "tokens": listed(*map(str, range(MAX_ADDED_TOKENS + 1)))},
        "invalid_vocabulary",
        "tokens",
    ),
    "a gap": ({"vocab_size": 99, "tokens": listed("a") + listed("b", first=12)}, "invalid_vocabulary", "tokens[1].id"),
    "an id twice": (
        {"vocab_size": 99, "tokens": listed("a") + listed("b", first=10)},
        "invalid_vocabulary",
        "tokens[1].id",
    ),
    "descending": ({"vocab_size": 99, "tokens": listed("a", "b")[::-1]}, "invalid_vocabulary", "tokens[1].id"),
    "beyond the size": ({"vocab_size": 11, "tokens": listed("a", "b")}, "invalid_vocabulary", "tokens[1].id"),
    "a negative id": ({"vocab_size": 11, "tokens": listed("a", first=-1)}, "invalid_vocabulary", "tokens[0].id"),
    "a content twice": ({"vocab_size": 99, "tokens": listed("a", "a")}, "invalid_vocabulary", "tokens[1].content"),
    "no content": ({"vocab_size": 99, "tokens": listed("")}, "invalid_vocabulary", "tokens[0].content"),
    "a long content": ({"vocab_size": 99, "tokens": listed("x" * 257)}, "invalid_vocabulary", "tokens[0].content"),
    "a surrogate": ({"vocab_size": 99, "tokens": listed("\ud800")}, "invalid_json", "added_vocabulary.json"),
    "a token as text": ({"vocab_size": 99, "tokens": ["a"]}, "invalid_vocabulary", "tokens[0]"),
    "a flag as number": (
        {"vocab_size": 99, "tokens": [{**listed("a")[0], "special": 1}]},
        "invalid_vocabulary",
        "tokens[0].special",
    ),
    "a missing flag": ({"vocab_size": 99, "tokens": [{"id": 1, "content": "a"}]}, "invalid_vocabulary", "tokens[0]"),
}


@pytest.mark.parametrize(("document", "code", "param"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_vocabulary_is_refused(document: Any, code: str, param: str) -> None:
    with pytest.raises(AdapterRejected) as refused:
        parse_added_vocabulary(json.dumps(document).encode())
    assert (refused.value.code, refused.value.param) == (code, param)


def test_a_repeated_key_is_refused() -> None:
    with pytest.raises(AdapterRejected) as refused:
        parse_added_vocabulary(b'{"vocab_size": 1, "tokens": [], "tokens": []}')
    assert (refused.value.code, refused.value.param) == ("duplicate_key", "tokens")
