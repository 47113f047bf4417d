"""Malformed and hostile tokenizers are refused with the key at fault, in bounded time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from loramux.adapter_store.errors import ConversionRefused
from loramux.adapter_store.gguf import tokenizer_metadata
from loramux.adapter_store.gguf.byte_pairs import MAX_PIECE_CHARS
from loramux.adapter_store.gguf.tokenizer_files import tokenizer_files
from tests.adapter_store.gguf.vocabularies import SPACE, byte_level_metadata, sentencepiece_metadata

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    original = Tokenizer(models.BPE())
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return byte_level_metadata(original, "gpt-2")


@pytest.fixture(scope="module")
def sentencepiece() -> dict[str, Any]:
    return sentencepiece_metadata({SPACE + "a": -1.0, SPACE: -2.0, "a": -3.0})


def refusal(metadata: dict[str, Any]) -> tuple[str, str | None]:
    started = time.process_time()
    with pytest.raises(ConversionRefused) as error:
        tokenizer_files(metadata)
    assert time.process_time() - started < 5
    return error.value.code, error.value.param


INVALID = "invalid_tokenizer"
UNSUPPORTED = "unsupported_tokenizer"
MANY = tokenizer_metadata.MAX_TOKENS + 1
LONG = "x" * (tokenizer_metadata.MAX_TOKEN_CHARS + 1)

BYTE_LEVEL: dict[str, tuple[str, Any, str]] = {
    "no kind": ("model", None, UNSUPPORTED),
    "an encoder": ("model", "bert", UNSUPPORTED),
    "a Unigram vocabulary": ("model", "t5", UNSUPPORTED),
    "RWKV": ("model", "rwkv", UNSUPPORTED),
    "a kind that is not text": ("model", 7, INVALID),
    "no pre-tokenizer": ("pre", None, UNSUPPORTED),
    "an unknown pre-tokenizer": ("pre", "gpt-99", UNSUPPORTED),
    "an encoder's pre-tokenizer": ("pre", "jina-v2-de", UNSUPPORTED),
    "a pre-tokenizer that is not text": ("pre", ["gpt-2"], INVALID),
    "no tokens": ("tokens", None, INVALID),
    "an empty vocabulary": ("tokens", [], INVALID),
    "tokens as one text": ("tokens", "abc", INVALID),
    "tokens as a number": ("tokens", 3, INVALID),
    "tokens that are bytes": ("tokens", [b"a", b"\xff"], INVALID),
    "tokens that are numbers": ("tokens", [1, 2], INVALID),
    "tokens that are not UTF-8": ("tokens", ["a", "\ud800"], INVALID),
    "tokens within tokens": ("tokens", [["a"], ["b"]], INVALID),
    "a token twice": ("tokens", ["a", "b", "a"], INVALID),
    "too many tokens": ("tokens", ["a"] * MANY, INVALID),
    "a long token": ("tokens", ["a", LONG], INVALID),
    "types as text": ("token_type", "1", INVALID),
    "fewer types than tokens": ("token_type", [1, 3], INVALID),
    "types that are not integers": ("token_type", [1.0] * 1000, INVALID),
    "types that are text": ("token_type", ["1"] * 1000, INVALID),
    "types of two dimensions": ("token_type", [[1]] * 1000, INVALID),
    "ragged types": ("token_type", [[1], [1, 2]] * 500, INVALID),
    "no merges": ("merges", None, INVALID),
    "merges as text": ("merges", "a b", INVALID),
    "a merge of an absent token": ("merges", ["a b", "\u4e00 b"], INVALID),
    "a merge into an absent token": ("merges", ["! \u0120"], INVALID),
    "a merge of one token": ("merges", ["ab"], INVALID),
    "a merge of nothing": ("merges", ["a "], INVALID),
    "an empty merge": ("merges", [""], INVALID),
    "merges that are numbers": ("merges", [1], INVALID),
    "ten million merges": ("merges", ["a b"] * 10_000_000, INVALID),
    "an ID past the vocabulary": ("eos_token_id", 600, INVALID),
    "a negative ID": ("bos_token_id", -1, INVALID),
    "an ID that is a number with a fraction": ("bos_token_id", 1.0, INVALID),
    "an ID that is true": ("eot_token_id", True, INVALID),
    "an ID that is text": ("padding_token_id", "1", INVALID),
    "many IDs": ("eom_token_id", [1, 2], INVALID),
    "a flag that is a number": ("add_bos_token", 1, INVALID),
    "a flag that is text": ("add_eos_token", "true", INVALID),
    "a space prefix that is a number": ("add_space_prefix", 0, INVALID),
}


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_malformed_byte_level_vocabulary_is_refused(byte_level: dict[str, Any], name: str) -> None:
    key, value, code = BYTE_LEVEL[name]
    assert refusal({**byte_level, f"tokenizer.ggml.{key}": value}) == (code, f"tokenizer.ggml.{key}")


SENTENCEPIECE: dict[str, tuple[str, Any, str]] = {
    "no scores": ("scores", None, INVALID),
    "fewer scores than tokens": ("scores", [0.0], INVALID),
    "scores that are text": ("scores", ["0"] * 1000, INVALID),
    "a score that is no number": ("scores", [float("nan")] * 1000, INVALID),
    "an infinite score": ("scores", [float("inf")] * 1000, INVALID),
    "a table of characters": ("precompiled_charsmap", [1, 2], UNSUPPORTED),
    "a merge of an absent token": ("merges", ["x y"], INVALID),
}


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_malformed_sentencepiece_vocabulary_is_refused(sentencepiece: dict[str, Any], name: str) -> None:
    key, value, code = SENTENCEPIECE[name]
    assert refusal({**sentencepiece, f"tokenizer.ggml.{key}": value}) == (code, f"tokenizer.ggml.{key}")


def test_bos_that_is_added_must_have_an_id(byte_level: dict[str, Any]) -> None:
    assert refusal({**byte_level, "tokenizer.ggml.add_bos_token": True}) == (INVALID, "tokenizer.ggml.add_bos_token")
    assert refusal({**byte_level, "tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": None}) == (
        INVALID,
        "tokenizer.ggml.add_eos_token",
    )


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.chat_template.tool_use"])
@pytest.mark.parametrize(
    "value", ["x" * (1 << 20), 7, ["x"], "\ud800", b"x"], ids=["1 MB", "int", "list", "utf", "bytes"]
)
def test_malformed_chat_template_is_refused(byte_level: dict[str, Any], key: str, value: Any) -> None:
    assert refusal({**byte_level, key: value}) == ("invalid_template", key)


def test_many_chat_templates_are_refused(byte_level: dict[str, Any]) -> None:
    many = {f"tokenizer.chat_template.t{number}": "x" for number in range(1000)}
    assert refusal({**byte_level, **many}) == ("invalid_template", "tokenizer.chat_template")


def test_long_vocabularies_take_bounded_time(sentencepiece: dict[str, Any]) -> None:
    """Runs of one letter imply the most merges, and long tokens without parts take the longest to divide."""
    size, count, draw = MAX_PIECE_CHARS, 4000, random.Random(1)
    runs = {"a" * length: -float(length) for length in range(2, size + 1)}
    letters = "".join(chr(0x4E00 + draw.randrange(20_000)) for _ in range(size + count))
    long = {letters[start : start + size]: -float(start) for start in range(count)}
    started = time.process_time()
    files = tokenizer_files(sentencepiece_metadata({**runs, **long, "a": -1e6}))
    assert len(json.loads(files["tokenizer.json"])["model"]["merges"]) == size * (size - 1) // 2
    assert time.process_time() - started < 10
    assert refusal(sentencepiece_metadata({"a" * (size + 1): -1.0})) == (INVALID, "tokenizer.ggml.tokens")


def test_empty_tokens_get_names_and_arrays_can_be_numpy(byte_level: dict[str, Any]) -> None:
    tokens = [*byte_level["tokenizer.ggml.tokens"], "", ""]
    metadata = {
        **byte_level,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([*byte_level["tokenizer.ggml.token_type"], 1, 1], np.int32),
    }
    vocabulary = json.loads(tokenizer_files(metadata)["tokenizer.json"])["model"]["vocab"]
    assert [token for token in vocabulary if token.startswith("[EMPTY")] == ["[EMPTY_600]", "[EMPTY_601]"]


def test_random_damage_is_read_or_refused(byte_level: dict[str, Any], sentencepiece: dict[str, Any]) -> None:
    draw = random.Random(7)
    values = (None, 0, -1, 1 << 63, 1.5, True, "", "x", [], [0], ["a"], [[]], {}, b"a", float("nan"), "\udc80")
    refused = 0
    for number in range(400):
        metadata = dict(byte_level if number % 2 else sentencepiece)
        for key in draw.sample([key for key in metadata if key.startswith("tokenizer.")], draw.randint(1, 2)):
            value = metadata[key]
            if isinstance(value, list) and draw.random() < 0.6:
                at, part = draw.randrange(len(value)), list(value)
                part[at : at + draw.randint(0, 2)] = [draw.choice(values)] * draw.randint(0, 2)
                metadata[key] = part
            else:
                metadata[key] = draw.choice(values)
        try:
            Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"].decode())
        except ConversionRefused:
            refused += 1
    assert 200 < refused < 400
