"""The tokens that end an answer of the base.

As in vLLM, these are the end tokens in `generation_config.json`, or in `config.json` if it has none, and the
tokenizer's own `eos_token`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loramux.adapter_store.formats.files.file_names import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from loramux.adapter_store.formats.version_files.tokenizer_files import special_tokens_of
from loramux.engine.protocol.errors import ModelNotSupported

_EOS = "eos_token_id"

ReadJson = Callable[[str], Mapping[str, Any]]
"""Returns the object in a file of the model directory, or an empty one if there is no such file. Raises
ModelNotSupported for another content.
"""


def end_tokens(
    raw: Mapping[str, Any], generation: Mapping[str, Any], tokenizer_eos: int | None, vocab_size: int
) -> tuple[int, ...]:
    """The end tokens without duplicates. Some files also name -1 or tokens that the model lacks, which are ignored."""
    value = raw.get(_EOS) if generation.get(_EOS) is None else generation[_EOS]
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if tokenizer_eos is not None:
        listed = [*listed, tokenizer_eos]
    return tuple(dict.fromkeys(token for token in map(int, listed) if 0 <= token < vocab_size))


def eos_of_tokenizer(read: ReadJson) -> int | None:
    """The ID of the token that the tokenizer's configuration calls `eos_token`, or None if there is none.

    A malformed tokenizer has none. The error when the tokenizer is loaded says what is wrong with it.
    """
    try:
        config = read(TOKENIZER_CONFIG_FILE)
        content = special_tokens_of({**read("special_tokens_map.json"), **config}).get("eos_token")
        if content is None:
            return None
        # Reading a large tokenizer.json takes a few tenths of a second, and most configurations list the added tokens.
        for token_id, token in (config.get("added_tokens_decoder") or {}).items():
            if token["content"] == content:
                return int(token_id)
        return _id_of(content, read(TOKENIZER_FILE))
    except (ModelNotSupported, IndexError, KeyError, TypeError, AttributeError, ValueError):
        return None


def _id_of(content: str, tokenizer: Mapping[str, Any]) -> int | None:
    for token in tokenizer.get("added_tokens") or []:
        if token["content"] == content:
            return int(token["id"])
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        # A Unigram model lists tokens with their scores.
        vocabulary = {token[0]: index for index, token in enumerate(vocabulary)}
    found = vocabulary.get(content)
    return found if type(found) is int else None
