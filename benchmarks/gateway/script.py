"""The answers of the scripted engine and the scripted server: the same tokens for every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

NUM_DIFFERENT = 64
"""Number of different tokens. Longer answers repeat them."""


@dataclass(frozen=True, slots=True)
class Script:
    """The tokens of an answer, in order. `texts[i]` is the text of `token_ids[i]`.

    A request's `seed` is the length of a step in microseconds. Each running answer gains one token per step. With a
    `seed` of 0, the whole answer is ready at once.
    """

    token_ids: Sequence[int]
    texts: Sequence[str]

    @staticmethod
    def of(tokenizer: ModelTokenizer) -> Script:
        """A script of tokens that are ASCII words or parts of such words."""
        found: dict[int, str] = {}
        for token_id in range(tokenizer.num_tokens):
            text = tokenizer.text_bytes(token_id).decode("ascii", "replace")
            if text.strip().isalpha() and text.isascii():
                found[token_id] = text
            if len(found) == NUM_DIFFERENT:
                break
        return Script(tuple(found), tuple(found.values()))

    def text(self, num_tokens: int) -> str:
        """The text of an answer of `num_tokens` tokens."""
        return "".join(self.texts[position % len(self.texts)] for position in range(num_tokens))
