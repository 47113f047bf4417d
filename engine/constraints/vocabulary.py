"""The bytes of each token, in the form that the grammar compiler needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class VocabularyNotUsable(Exception):
    """The model's tokenizer cannot be used with grammars. The message explains why."""


NUM_ADDED_TOKENS = 256
"""Maximum number of tokens that an adapter can add."""


def load_vocabulary(model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Load the vocabulary from a Hugging Face directory's `tokenizer.json`, padded to at least `vocab_size` tokens.

    NUM_ADDED_TOKENS placeholders follow the tokenizer's tokens, for the tokens that adapters add. A grammar can name a
    placeholder by its id, but no text matches it. All adapters share the vocabulary, which takes about 70 MB.

    Takes one or two seconds for a vocabulary of 128,000 tokens. Raises VocabularyNotUsable.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise VocabularyNotUsable("llguidance is not installed on the engine's machine") from error
    path = model_dir / "tokenizer.json"
    if not eos_token_ids:
        raise VocabularyNotUsable("the model's configuration names no end-of-sequence token")
    try:
        text, num_tokens = _with_added_tokens(path.read_text())
        return LLTokenizer(text, n_vocab=max(vocab_size, num_tokens), eos_token=list(eos_token_ids))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VocabularyNotUsable(f"{path} cannot be used with grammars: {error}") from error


def _with_added_tokens(text: str) -> tuple[str, int]:
    """A `tokenizer.json` with NUM_ADDED_TOKENS more tokens, and its total number of tokens."""
    document = json.loads(text)
    vocabulary, added = document["model"]["vocab"], document.get("added_tokens") or []
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    first = max(max(ids, default=-1), *(token["id"] for token in added), -1) + 1
    flags = {"special": True, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    further = [
        {"id": first + index, "content": f"<|loramux_added_{index}|>", **flags} for index in range(NUM_ADDED_TOKENS)
    ]
    return json.dumps({**document, "added_tokens": [*added, *further]}), first + NUM_ADDED_TOKENS
