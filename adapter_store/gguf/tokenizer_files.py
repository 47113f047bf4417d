"""Writes the tokenizer and chat templates in a GGUF file's metadata as the files of a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loramux.adapter_store.formats.files.file_names import (
    GENERATION_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from loramux.adapter_store.formats.version_files.added_vocabulary import SPECIAL_TOKENS
from loramux.adapter_store.formats.version_files.tokenizer_files import DEFAULT
from loramux.adapter_store.gguf.byte_pairs import adds_bos, tokenizer_document
from loramux.adapter_store.gguf.tokenizer_metadata import CONTROL, TokenizerMetadata, read_tokenizer_metadata

_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<turn|>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
        "[EOT]",
    )
)
"""Control tokens that end an answer, as in llama.cpp. Converters do not write the list of `generation_config.json`."""

_HARMONY = frozenset(("<|return|>", "<|call|>", "<|end|>"))
"""If a vocabulary has all of these tokens, `<|end|>` ends only a part of an answer."""


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files that describe a GGUF base's tokenizer, by name.

    Arrays are sequences of Python values. Raises ConversionRefused, with the key in `param`: `unsupported_tokenizer`,
    `invalid_tokenizer` or `invalid_template`.
    """
    found = read_tokenizer_metadata(metadata)
    files = {TOKENIZER_FILE: tokenizer_document(found)}
    files[TOKENIZER_CONFIG_FILE] = _tokenizer_config(found)
    files[GENERATION_FILE] = _generation_config(found)
    written = {name: json.dumps(document, ensure_ascii=False).encode() + b"\n" for name, document in files.items()}
    if set(found.templates) == {DEFAULT}:
        written[TEMPLATE_FILE] = found.templates[DEFAULT].encode()
    return written


def end_token_ids(found: TokenizerMetadata) -> list[int]:
    """Return the IDs of the tokens that end an answer, the file's EOS first."""
    roles = [found.roles[role] for role in ("eos_token", "eot_token", "eom_token") if role in found.roles]
    known = {token: index for index, token in enumerate(found.tokens) if found.types[index] == CONTROL}
    ends = _ENDS - {"<|end|>"} if known.keys() >= _HARMONY else _ENDS
    return list(dict.fromkeys((*roles, *sorted(known[token] for token in ends if token in known))))


def _tokenizer_config(found: TokenizerMetadata) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(found),
        "add_eos_token": bool(found.add_eos),
    }
    config.update((role, token) for role in SPECIAL_TOKENS if (token := found.token(role)) is not None)
    if found.templates and set(found.templates) != {DEFAULT}:
        # A file can contain only one template.
        config["chat_template"] = [{"name": name, "template": one} for name, one in found.templates.items()]
    return config


def _generation_config(found: TokenizerMetadata) -> dict[str, Any]:
    ids: dict[str, Any] = {
        name: found.roles[role]
        for name, role in (("bos_token_id", "bos_token"), ("pad_token_id", "pad_token"))
        if role in found.roles
    }
    ends = end_token_ids(found)
    return {**ids, "eos_token_id": ends} if ends else ids
