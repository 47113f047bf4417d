"""The requests of a load: their models, prompts and lengths."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_TEXT = """
the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but some
what there we can out other were all your when up use word how said an each she which do their time if will way
about many then them would write like so these her long make thing see him two has look more day could go come did
my sound no most number who over know water than call first people may down side been now find any new work part
take get place made live where after back little only round man year came show every good me give our under name
very through just form much great think say help low line before turn cause same mean differ move right boy old too
does tell sentence set three want air well also play small end put home read hand port large spell add even land
here must big high such follow act why ask men change went light kind off need house picture try us again animal
point mother world near build self earth father
"""
WORDS = tuple(_TEXT.split())
"""Frequent English words. Most tokenizers have one token for each."""

CHAT, COMPLETIONS = "chat", "completions"
PATHS = {CHAT: "/chat/completions", COMPLETIONS: "/completions"}

Prompt = str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
"""A text, token ids, or the messages of a conversation."""


class WorkloadError(Exception):
    """The options do not describe a load. The message says which one to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `more` are further fields of its body, which replace others of the same name."""

    model: str
    prompt: Prompt
    num_tokens: int | None
    """The requested length of the answer, or None to leave it to the server."""
    at_s: float | None = None
    """When a trace sends it, in seconds from the start."""
    more: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def body(self, endpoint: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "temperature": 0.0}
        if self.num_tokens is not None:
            body["max_tokens"] = self.num_tokens
        if endpoint == COMPLETIONS:
            body["prompt"] = self.prompt
        elif isinstance(self.prompt, str):
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["messages"] = self.prompt
        return body | {"stream": True, "stream_options": {"include_usage": True}} | dict(self.more)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, drawn uniformly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, name: str) -> Lengths:
        """Read `N` or `LOW-HIGH`. Raises WorkloadError."""
        low, _, high = text.partition("-")
        try:
            found = cls(_whole(low), _whole(high or low))
        except ValueError:
            raise WorkloadError(f"{name} is {text[:40]!r}: it should be a number of tokens, or LOW-HIGH") from None
        if not 0 <= found.low <= found.high:
            raise WorkloadError(f"{name} is {text}: the first number must not be larger than the second")
        return found

    def draw(self, dice: random.Random) -> int:
        return dice.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class PromptScale:
    """The number of tokens of a prompt of random words: `per_word * num_words + fixed`."""

    per_word: float = 1.0
    fixed: float = 0.0

    @classmethod
    def of(cls, short: tuple[int, int], long: tuple[int, int]) -> PromptScale:
        """Compute the scale from the words and tokens of two prompts."""
        per_word = (long[1] - short[1]) / (long[0] - short[0])
        return cls(per_word, short[1] - per_word * short[0]) if per_word > 0 else cls()

    def num_words(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.fixed) / self.per_word))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPrompts:
    """Prompts of random words, or of random token ids if `ids` is given."""

    scale: PromptScale = PromptScale()
    ids: Lengths | None = None
    """The smallest and largest token id."""

    def draw(self, num_tokens: int, dice: random.Random) -> str | tuple[int, ...]:
        if self.ids is not None:
            return tuple(dice.randint(self.ids.low, self.ids.high) for _ in range(max(1, num_tokens)))
        return random_words(self.scale.num_words(num_tokens), dice)


def random_words(num_words: int, dice: random.Random) -> str:
    return " ".join(dice.choices(WORDS, k=num_words))


def zipf_models(models: Sequence[str], exponent: float, dice: random.Random) -> Iterator[str]:
    """Draw models without end by Zipf's law. The first is the most frequent; with exponent 0 all are equally so."""
    # A sum that is computed once makes each draw a binary search.
    weights = list(itertools.accumulate((place + 1) ** -exponent for place in range(len(models))))
    while True:
        yield from dice.choices(models, cum_weights=weights)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError
    return int(text)
