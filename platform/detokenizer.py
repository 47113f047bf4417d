"""Token ids to text as they come: only whole characters, and spaces as they are inside a text."""

from __future__ import annotations

from collections.abc import Sequence

from loramux.platform.model_tokenizer import ModelTokenizer

CONTEXT_TOKENS = 5
"""Tokens before a piece that are decoded with it, so that a leading space or a joined character comes out right."""

MAX_HELD_TOKENS = 8
"""A character has at most four bytes: what is still incomplete after this many tokens never completes."""

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes one sequence token by token. `ids[start:read]` were given out, `ids[read:]` are held."""

    def __init__(self, tokenizer: ModelTokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._start = 0
        self._read = len(self._ids)
        self._given = tokenizer.decode(self._ids)

    def feed(self, token_id: int) -> str:
        """The text that this token completes: empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids[self._start :])
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read < MAX_HELD_TOKENS:
            return ""
        return self._give(text)

    def finish(self) -> str:
        """The text of tokens that are still held, incomplete as it is."""
        return self._give(self._tokenizer.decode(self._ids[self._start :])) if self._read < len(self._ids) else ""

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        self._start, self._read = self._read, len(self._ids)
        self._given = self._tokenizer.decode(self._ids[self._start :])
        return new
