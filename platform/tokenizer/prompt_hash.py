"""Identifies how a server turns requests into token ids. Servers with equal hashes do so in the same way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from loramux.engine.chat_templates.chat_template import ChatTemplate, read_special_tokens


def prompt_sha256(model_dir: Path, vocab_size: int) -> str:
    """Return a SHA-256 over the tokenizer, the chat templates, the special tokens and the size of the vocabulary.

    Raises OSError, or ModelNotSupported if a file is malformed.
    """
    template = ChatTemplate.load(model_dir)
    parts = {
        "tokenizer": hashlib.sha256((model_dir / "tokenizer.json").read_bytes()).hexdigest(),
        "templates": {} if template is None else dict(template.sources),
        "special_tokens": read_special_tokens(model_dir),
        "vocab_size": vocab_size,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
