"""Token ids to text as they come: only whole characters, and spaces as they are inside a text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

CONTEXT_TOKENS = 5
"""Tokens before a piece that are decoded with it, so that a leading space or a joined character comes out right."""

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one sequence token by token. `ids[start:read]` were given out, `ids[read:]` are held.

    Whether a character is incomplete is read from the tokens' bytes: in the text, U+FFFD may stand for the beginning
    of one as well as for itself.
    """

    def __init__(self, tokenizer: ModelTokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._start = 0
        self._read = len(self._ids)
        self._given = tokenizer.decode(self._ids)
        self._utf8 = _Utf8("replace")

    def feed(self, token_id: int) -> str:
        """The text that this token completes: empty while a character is incomplete."""
        spelled = self._tokenizer.text_bytes(token_id)
        if not spelled:
            # A special token may stand between the parts of a character without cutting it.
            return ""
        self._ids.append(token_id)
        self._utf8.decode(spelled)
        begun, _ = self._utf8.getstate()
        # At most three bytes are ever begun, so that no token is held for long.
        return "" if begun else self._give(self._tokenizer.decode(self._ids[self._start :]))

    def finish(self) -> str:
        """The text of tokens that are still held, incomplete as it is."""
        return self._give(self._tokenizer.decode(self._ids[self._start :])) if self._read < len(self._ids) else ""

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        self._start, self._read = self._read, len(self._ids)
        self._given = self._tokenizer.decode(self._ids[self._start :])
        return new
