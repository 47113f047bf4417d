"""The small base's tokenizer, and directories with tokenizers that differ from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loramux.adapter_store.formats.version_files.tokenizer_files import BaseVocabulary, vocabulary_sha256

NUM_TOKENS = 60
FLAGS = {"special": True, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
ADDED = {"<|bos|>": 3, "<|reserved_0|>": 4, "<|reserved_1|>": 5}
ORDINARY = {f"t{token_id}": token_id for token_id in range(NUM_TOKENS) if token_id not in ADDED.values()}


def base_vocabulary(vocab_size: int = 70) -> BaseVocabulary:
    sha256 = vocabulary_sha256({token_id: content for content, token_id in ORDINARY.items()})
    return BaseVocabulary(NUM_TOKENS, vocab_size, ADDED, {"bos_token": "<|bos|>", "eos_token": "<|bos|>"}, sha256)


def with_tokenizer(
    directory: Path, added: Mapping[str, int] | None = None, ordinary: Mapping[str, int] = ORDINARY, **config: Any
) -> Path:
    """Write a tokenizer with these added tokens, in descending order, and with this configuration."""
    tokens = {**ADDED, **({} if added is None else added)}
    by_id = {token_id: content for content, token_id in tokens.items()}
    listed = [{"id": token_id, "content": by_id[token_id], **FLAGS} for token_id in sorted(by_id, reverse=True)]
    model = {"type": "BPE", "vocab": dict(ordinary), "merges": []}
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": listed, "model": model}))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
