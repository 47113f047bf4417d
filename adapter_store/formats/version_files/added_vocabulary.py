"""The facts in which an adapter's tokenizer differs from the base's, in `added_vocabulary.json`.

The file is an object: `vocab_size` is the number of rows of the adapter's embedding and head, and `tokens` lists the
added tokens, whose ids follow the ids of the base's tokenizer. Each token has the keys that transformers gives it in
`tokenizer.json`: `id`, `content`, and the flags `special`, `lstrip`, `rstrip`, `single_word` and `normalized`.

Two more keys are optional. `renamed` lists added tokens of the base to which the adapter gives another content, as
tokens like those above. `special_tokens` maps roles, such as `eos_token`, to the contents that the adapter uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import VOCABULARY_FILE
from loramux.adapter_store.formats.files.strict_json import parse_json_file

MAX_ADDED_TOKENS = 256
MAX_TOKEN_CHARS = 256
MAX_VOCAB_SIZE = 1 << 24
"""Exclusive upper bound on `vocab_size`, larger than any base's vocabulary."""

FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")

_OPTIONAL = ("renamed", "special_tokens")
"""The keys of `added_vocabulary.json` that are left out if they are empty."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""The roles of special tokens, as in transformers' `special_tokens_map`."""

SpecialTokens = tuple[tuple[str, str], ...]
"""Pairs of a role and a content, by role. A version has those that differ from the base's."""


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
    """An adapter's own tokens, with consecutive ids. All ids are below `vocab_size`.

    `renamed` are tokens of the base with other contents, by ascending id.
    """

    vocab_size: int
    tokens: tuple[AddedToken, ...]
    renamed: tuple[AddedToken, ...] = ()
    special_tokens: SpecialTokens = ()

    def report(self) -> dict[str, Any]:
        """Return the vocabulary's size, token IDs and special tokens as JSON values, to store with the version."""
        facts: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "tokens": {token.content: token.id for token in self.tokens},
        }
        if self.renamed:
            facts["renamed"] = {token.content: token.id for token in self.renamed}
        if self.special_tokens:
            facts["special_tokens"] = dict(self.special_tokens)
        return facts


def encode_added_vocabulary(vocabulary: AddedVocabulary) -> bytes:
    """Return the contents of an `added_vocabulary.json`. Equal vocabularies have equal contents."""
    document = {**asdict(vocabulary), "special_tokens": dict(vocabulary.special_tokens)}
    written = {name: value for name, value in document.items() if value or name not in _OPTIONAL}
    return json.dumps(written, ensure_ascii=False, sort_keys=True, indent=1).encode() + b"\n"


def parse_added_vocabulary(text: bytes) -> AddedVocabulary:
    """Read an `added_vocabulary.json`. Raises AdapterRejected, whose `param` is the key at fault or the file's name."""
    document = parse_json_file(text, VOCABULARY_FILE)
    if not isinstance(document, dict) or document.keys() - set(_OPTIONAL) != {"vocab_size", "tokens"}:
        _refuse(
            f"{VOCABULARY_FILE} must be a JSON object with vocab_size and tokens, and with nothing else but "
            f"{' and '.join(_OPTIONAL)}",
            VOCABULARY_FILE,
        )
    vocab_size, listed = document["vocab_size"], document["tokens"]
    if type(vocab_size) is not int or not 0 < vocab_size < MAX_VOCAB_SIZE:
        _refuse(f"vocab_size must be a whole number from 1 to {MAX_VOCAB_SIZE - 1}", "vocab_size")
    return AddedVocabulary(
        vocab_size,
        parse_tokens(listed, vocab_size),
        parse_renamed(document.get("renamed", [])),
        parse_special_tokens(document.get("special_tokens", {})),
    )


def parse_tokens(listed: Any, vocab_size: int) -> tuple[AddedToken, ...]:
    """Parse the list of added tokens, whose ids must be below `vocab_size`. Raises AdapterRejected."""
    tokens = _parse_list(listed, "tokens")
    for index, token in enumerate(tokens):
        if token.id != tokens[0].id + index:
            _refuse("the ids of added tokens must be consecutive and ascending", f"tokens[{index}].id")
        if token.id >= vocab_size:
            _refuse(f"a token's id must be below vocab_size ({vocab_size})", f"tokens[{index}].id")
    return tokens


def parse_renamed(listed: Any) -> tuple[AddedToken, ...]:
    """Parse the list of renamed tokens. Raises AdapterRejected."""
    tokens = _parse_list(listed, "renamed")
    for index, token in enumerate(tokens[1:], 1):
        if token.id <= tokens[index - 1].id:
            _refuse("the ids of renamed tokens must be ascending", f"renamed[{index}].id")
    return tokens


def parse_special_tokens(named: Any) -> SpecialTokens:
    """Parse the special tokens by role. Raises AdapterRejected."""
    if not isinstance(named, Mapping):
        _refuse("special_tokens must be an object", "special_tokens")
    for role, content in named.items():
        if role not in SPECIAL_TOKENS:
            _refuse(f"the roles of special tokens are {', '.join(SPECIAL_TOKENS)}", "special_tokens")
        _check_content(content, f"special_tokens.{role}")
    return tuple(sorted(named.items()))


def _parse_list(listed: Any, param: str) -> tuple[AddedToken, ...]:
    if not isinstance(listed, list):
        _refuse(f"{param} must be a list", param)
    if len(listed) > MAX_ADDED_TOKENS:
        verb = "add" if param == "tokens" else "rename"
        _refuse(f"an adapter can {verb} at most {MAX_ADDED_TOKENS} tokens", param)
    tokens: list[AddedToken] = []
    contents: set[str] = set()
    for index, fields in enumerate(listed):
        token = _parse_token(fields, f"{param}[{index}]")
        if token.content in contents:
            _refuse("two tokens have the same content", f"{param}[{index}].content")
        contents.add(token.content)
        tokens.append(token)
    return tuple(tokens)


def _parse_token(fields: Any, param: str) -> AddedToken:
    if not isinstance(fields, Mapping) or fields.keys() != {"id", "content", *FLAGS}:
        _refuse(f"a token must have exactly the keys id, content, {', '.join(FLAGS)}", param)
    if type(fields["id"]) is not int or fields["id"] < 0:
        _refuse("a token's id must be a whole number of at least 0", f"{param}.id")
    _check_content(fields["content"], f"{param}.content")
    for flag in FLAGS:
        if not isinstance(fields[flag], bool):
            _refuse(f"{flag} must be true or false", f"{param}.{flag}")
    return AddedToken(**fields)


def _check_content(content: Any, param: str) -> None:
    if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN_CHARS:
        _refuse(f"a token's content must have 1 to {MAX_TOKEN_CHARS} characters", param)


def _refuse(message: str, param: str) -> NoReturn:
    raise AdapterRejected("invalid_vocabulary", message, param)
