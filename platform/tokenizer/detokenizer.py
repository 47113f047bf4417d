"""Token ids to text as they come: whole characters, spaces as inside a text, and nothing of a stop string."""

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


class StopStrings:
    """Holds back the longest end of the text that could still become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_found = False

    def feed(self, text: str) -> str:
        """The text that may be shown now. Once a stop string is complete, `is_found`, and what precedes it is all."""
        if not self._stops:
            return text
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.is_found = True
            self._held = ""
            return text[: min(starts)]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        shown = text[: len(text) - num_held]
        self._held = text[len(shown) :]
        return shown

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, shorter than `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
