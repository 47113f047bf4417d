"""Extracts the tokens that an adapter adds to its base from the tokenizer that was saved beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.added_vocabulary import FLAGS, AddedVocabulary, parse_tokens
from loramux.adapter_store.formats.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.formats.safetensors_header import header_length, parse_header
from loramux.admin.client.given_files import is_given

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
MAX_TOKENIZER_BYTES = 128 << 20
"""Largest tokenizer file that is read, in bytes."""

_EMBEDDING_OR_HEAD = (
    "embed_tokens.weight",
    "lm_head.weight",
    "embed_tokens.base_layer.weight",
    "lm_head.base_layer.weight",
)


def has_tokenizer(directory: Path) -> bool:
    """Raises OSError if a tokenizer's file is not a regular file."""
    return any(is_given(directory / name) for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE))


def added_vocabulary(directory: Path, num_tokens: int, vocab_size: int) -> AddedVocabulary | None:
    """Return the vocabulary of the adapter in a directory, or None if the adapter uses the base's vocabulary.

    The base's tokenizer has `num_tokens` tokens, and the base's embedding and head have `vocab_size` rows. Tokens
    without a row, such as a padding token that was used only in training, are left out. Raises AdapterRejected if the
    tokenizer cannot be read, or adds tokens that cannot be served.
    """
    num_rows = _num_rows(directory / TENSORS_FILE) or max(vocab_size, _last_trained(directory / CONFIG_FILE) + 1)
    listed = [fields for fields in _added_tokens(directory) if num_tokens <= fields["id"] < num_rows]
    if not listed and num_rows == vocab_size:
        return None
    return AddedVocabulary(num_rows, parse_tokens(listed, num_rows))


def _added_tokens(directory: Path) -> list[dict[str, Any]]:
    """Return the added tokens of the directory's tokenizer, including the base's added tokens, by ascending ID."""
    if (path := directory / TOKENIZER_FILE).is_file():
        listed = _object_in(path).get("added_tokens")
    elif (path := directory / TOKENIZER_CONFIG_FILE).is_file():
        by_id = _object_in(path).get("added_tokens_decoder", {})
        is_object = isinstance(by_id, Mapping) and all(isinstance(fields, Mapping) for fields in by_id.values())
        listed = [{"id": _integer(token_id), **fields} for token_id, fields in by_id.items()] if is_object else None
    else:
        return []
    if listed is None:
        listed = []
    if not isinstance(listed, list) or not all(
        isinstance(one, Mapping) and type(one.get("id")) is int for one in listed
    ):
        raise AdapterRejected("invalid_tokenizer", f"{path.name} has a malformed list of added tokens", path.name)
    tokens = [{name: one.get(name, False) for name in ("id", "content", *FLAGS)} for one in listed]
    return sorted(tokens, key=lambda token: token["id"])


def _object_in(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise AdapterRejected("file_too_large", f"{path.name} has more than {MAX_TOKENIZER_BYTES} bytes", path.name)
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterRejected("invalid_tokenizer", f"{path.name} is not JSON: {error}", path.name) from None
    if not isinstance(document, dict):
        raise AdapterRejected("invalid_tokenizer", f"{path.name} is not a JSON object", path.name)
    return document


def _integer(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _num_rows(path: Path) -> int | None:
    """Return the number of rows of the embedding or the head in a safetensors file, or None if it has neither."""
    with path.open("rb") as file:
        size = path.stat().st_size
        length = header_length(file.read(256), size)
        file.seek(8)
        header = parse_header(file.read(length), size)
    for name, entry in header.tensors.items():
        if name.endswith(_EMBEDDING_OR_HEAD) and len(entry.shape) == 2:
            return entry.shape[0]
    return None


def _last_trained(path: Path) -> int:
    """Return the largest token ID in `trainable_token_indices`, or -1 if there is none.

    Invalid values are skipped, because the server refuses them later.
    """
    listed = _object_in(path).get("trainable_token_indices") or []
    lists = listed.values() if isinstance(listed, Mapping) else [listed]
    return max(
        (token for tokens in lists if isinstance(tokens, list) for token in tokens if type(token) is int), default=-1
    )
