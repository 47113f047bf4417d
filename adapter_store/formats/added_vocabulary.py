"""The tokens that an adapter adds to the base's tokenizer, in `added_vocabulary.json`.

The file is an object: `vocab_size` is the number of rows of the adapter's embedding and head, and `tokens` lists the
added tokens, whose ids follow the ids of the base's tokenizer. Each token has the keys that transformers gives it in
`tokenizer.json`: `id`, `content`, and the flags `special`, `lstrip`, `rstrip`, `single_word` and `normalized`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.file_names import VOCABULARY_FILE
from loramux.adapter_store.formats.strict_json import DuplicateKey, InvalidJson, parse_strict_json

MAX_ADDED_TOKENS = 256
MAX_TOKEN_CHARS = 256
MAX_VOCAB_SIZE = 1 << 24
"""Exclusive upper bound on `vocab_size`, larger than any base's vocabulary."""

FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token with its flags, which have the same names and meanings as in transformers."""

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool
    normalized: bool


@dataclass(frozen=True, slots=True)
class AddedVocabulary:
    """An adapter's own tokens, with consecutive ids. All ids are below `vocab_size`."""

    vocab_size: int
    tokens: tuple[AddedToken, ...]

    def report(self) -> dict[str, Any]:
        """Return the vocabulary's size and token IDs as JSON values, to store with the version."""
        return {"vocab_size": self.vocab_size, "tokens": {token.content: token.id for token in self.tokens}}


def encode_added_vocabulary(vocabulary: AddedVocabulary) -> bytes:
    """Return the contents of an `added_vocabulary.json`. Equal vocabularies have equal contents."""
    return json.dumps(asdict(vocabulary), ensure_ascii=False, sort_keys=True, indent=1).encode() + b"\n"


def parse_added_vocabulary(text: bytes) -> AddedVocabulary:
    """Read an `added_vocabulary.json`. Raises AdapterRejected, whose `param` is the key at fault or the file's name."""
    try:
        document = parse_strict_json(text)
    except DuplicateKey as error:
        raise AdapterRejected("duplicate_key", f"a key appears twice in {VOCABULARY_FILE}", error.key) from None
    except InvalidJson as error:
        raise AdapterRejected("invalid_json", f"the file is not JSON: {error}", VOCABULARY_FILE) from None
    if not isinstance(document, dict) or document.keys() != {"vocab_size", "tokens"}:
        _refuse(f"{VOCABULARY_FILE} must be a JSON object with vocab_size and tokens", VOCABULARY_FILE)
    vocab_size, listed = document["vocab_size"], document["tokens"]
    if type(vocab_size) is not int or not 0 < vocab_size < MAX_VOCAB_SIZE:
        _refuse(f"vocab_size must be a whole number from 1 to {MAX_VOCAB_SIZE - 1}", "vocab_size")
    if not isinstance(listed, list):
        _refuse("tokens must be a list", "tokens")
    return AddedVocabulary(vocab_size, parse_tokens(listed, vocab_size))


def parse_tokens(listed: Sequence[Any], vocab_size: int) -> tuple[AddedToken, ...]:
    """Parse a list of tokens, whose ids must be below `vocab_size`. Raises AdapterRejected."""
    if len(listed) > MAX_ADDED_TOKENS:
        _refuse(f"an adapter can add at most {MAX_ADDED_TOKENS} tokens", "tokens")
    tokens: list[AddedToken] = []
    contents: set[str] = set()
    for index, fields in enumerate(listed):
        token = _parse_token(fields, f"tokens[{index}]")
        if tokens and token.id != tokens[-1].id + 1:
            _refuse("the ids of added tokens must be consecutive and ascending", f"tokens[{index}].id")
        if token.id >= vocab_size:
            _refuse(f"a token's id must be below vocab_size ({vocab_size})", f"tokens[{index}].id")
        if token.content in contents:
            _refuse("two added tokens have the same content", f"tokens[{index}].content")
        contents.add(token.content)
        tokens.append(token)
    return tuple(tokens)


def _parse_token(fields: Any, param: str) -> AddedToken:
    if not isinstance(fields, Mapping) or fields.keys() != {"id", "content", *FLAGS}:
        _refuse(f"a token must have exactly the keys id, content, {', '.join(FLAGS)}", param)
    if type(fields["id"]) is not int or fields["id"] < 0:
        _refuse("a token's id must be a whole number of at least 0", f"{param}.id")
    content = fields["content"]
    if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN_CHARS:
        _refuse(f"a token's content must have 1 to {MAX_TOKEN_CHARS} characters", f"{param}.content")
    for flag in FLAGS:
        if not isinstance(fields[flag], bool):
            _refuse(f"{flag} must be true or false", f"{param}.{flag}")
    return AddedToken(**fields)


def _refuse(message: str, param: str) -> NoReturn:
    raise AdapterRejected("invalid_vocabulary", message, param)
