"""Decodes token IDs incrementally into whole characters with correct spacing, and finds stop strings in the text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from loramux.engine.text.text_tokenizer import TextTokenizer

CONTEXT_TOKENS = 5
"""Number of preceding tokens to decode with new ones, so that spaces and split characters are decoded correctly."""

_Utf8 = codecs.getincrementaldecoder("utf-8")
_CONTINUATION = re.compile(rb"[\x80-\xbf]")


def new_detokenizer(tokenizer: TextTokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
    """Return a detokenizer for the tokens after `prompt`."""
    kind = ByteDetokenizer if tokenizer.joins_bytes else ContextDetokenizer
    return kind(tokenizer, prompt, skip_special_tokens=skip_special_tokens)


def echoed_text(tokenizer: TextTokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of a prompt, without an incomplete character at its end.

    A detokenizer of the tokens after the prompt returns this character, once it is complete.
    """
    if tokenizer.joins_bytes:
        return ByteDetokenizer(tokenizer, (), skip_special_tokens=skip_special_tokens).feed_all(prompt)
    detokenizer = ContextDetokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    end, num_held = len(prompt), detokenizer.num_held
    while num_held:
        end -= 1
        num_held -= bool(detokenizer.spelled(prompt[end]))
    return tokenizer.decode(prompt[:end], skip_special_tokens=skip_special_tokens)


class Detokenizer(Protocol):
    """Decodes one sequence token by token. `feed`, `feed_all` and `finish` return the new text."""

    def feed(self, token_id: int) -> str: ...

    def feed_all(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class ByteDetokenizer:
    """Decodes tokens of a byte-level vocabulary. The text is the concatenation of their bytes."""

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._bytes_of = tokenizer.text_bytes if skip_special_tokens else tokenizer.token_bytes
        self._utf8 = _Utf8("replace")
        # The prompt can end with an incomplete character.
        for token_id in prompt[-CONTEXT_TOKENS:]:
            self.feed(token_id)

    def feed(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes_of(token_id))

    def feed_all(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class ContextDetokenizer:
    """Decodes each token together with the preceding tokens, which works with every decoder of the tokenizers library.

    The text of `ids[start:read]` has been emitted. The text of `ids[read:]` is held back. The bytes of the tokens show
    whether a character is incomplete. U+FFFD in the text does not show this, because a model can also write U+FFFD
    itself.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special_tokens = skip_special_tokens
        self.spelled = tokenizer.text_bytes if skip_special_tokens else tokenizer.token_bytes
        self._ids: list[int] = []
        self._start = self._read = 0
        self._given = ""
        self._utf8 = _Utf8("replace")
        # The prompt can end with an incomplete character. The rest of a character that begins before the context would
        # spoil the bytes after it, because decoders replace every byte of a run that is not UTF-8.
        context = prompt[-CONTEXT_TOKENS:]
        begins = (index for index, one in enumerate(context) if not _CONTINUATION.match(self.spelled(one)))
        self.feed_all(context[next(begins, len(context)) :])

    def feed(self, token_id: int) -> str:
        spelled = self.spelled(token_id)
        if not spelled:
            # A special token between the parts of a character does not split the character.
            return ""
        self._ids.append(token_id)
        self._utf8.decode(spelled)
        begun, _ = self._utf8.getstate()
        # An incomplete character has at most three bytes, so no token is held back for long.
        return "" if begun else self._give(self._decoded(self._ids[self._start :]))

    @property
    def num_held(self) -> int:
        """Number of tokens that are held back. Tokens without text do not count."""
        return len(self._ids) - self._read

    def feed_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.feed, token_ids))

    def finish(self) -> str:
        return self._give(self._decoded(self._ids[self._start :])) if self._read < len(self._ids) else ""

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        self._start, self._read = self._read, len(self._ids)
        self._given = self._decoded(self._ids[self._start :])
        return new

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special_tokens)


class StopStrings:
    """Holds back the longest suffix of the text that could still become a stop string.

    If several stop strings are complete, the one that begins first counts. If several begin at the same position, the
    shortest counts.
    """

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        self._stops = tuple(stops)
        self._is_shown = is_shown
        self._held = ""
        self.found: str | None = None
        """The stop string that was found, if any."""

    def feed(self, text: str, can_stop: bool = True) -> str:
        """Add `text` and return the text that can be shown now.

        If it completes a stop string, set `found` and stop before the string, or after it if `is_shown`. Unless
        `can_stop`, no stop string takes effect in this text or in earlier text. Feed the text of one token at a time.
        Otherwise, which of several stop strings counts depends on how many tokens come together.
        """
        if not self._stops:
            return text
        text = self._held + text
        if not can_stop:
            self._held = ""
            return text
        found = [(start, start + len(stop)) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            start, end = min(found)
            self.found = text[start:end]
            return text[: end if self._is_shown else start]
        num_held = max(overlap(text, stop) for stop in self._stops)
        shown = text[: len(text) - num_held]
        self._held = text[len(shown) :]
        return shown

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    if len(stop) < 2:
        return 0
    tail = text[1 - len(stop) :]
    at = tail.find(stop[0])
    while at >= 0 and not stop.startswith(tail[at:]):
        at = tail.find(stop[0], at + 1)
    return len(tail) - at if at >= 0 else 0
