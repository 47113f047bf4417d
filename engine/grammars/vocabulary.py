"""The bytes of each token, in the form that the grammar compiler needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class VocabularyNotUsable(Exception):
    """The model's tokenizer cannot be used with grammars. The message explains why."""


def load_vocabulary(model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Load the vocabulary from a Hugging Face directory's `tokenizer.json`, padded to `vocab_size` tokens.

    Takes up to a second for a vocabulary of 128,000 tokens. Raises VocabularyNotUsable.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise VocabularyNotUsable("llguidance is not installed on the engine's machine") from error
    path = model_dir / "tokenizer.json"
    if not eos_token_ids:
        raise VocabularyNotUsable("the model's configuration names no end-of-sequence token")
    try:
        return LLTokenizer(path.read_text(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except (OSError, ValueError) as error:
        raise VocabularyNotUsable(f"{path} cannot be used with grammars: {error}") from error


def no_vocabulary() -> LLTokenizer:
    """Raise VocabularyNotUsable. Engines without a tokenizer use this as their `load_vocabulary`."""
    raise VocabularyNotUsable("this engine has no tokenizer")
