"""What is asked of every system: so many greedy requests at once, each with its own prompt and maybe an adapter."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Self

from benchmarks.peers.vocabulary import FIRST_WORD

BASE = "base only"
DISTINCT = "distinct adapters"
SAME = "one adapter"
ATTENTION = "distinct adapters, q/k/v/o"
"""Only loramux answers this one: it is compared with its own base alone."""

MAX_TOKENS = 512
"""Of a prompt with its answer: what servers that reserve room for each request are told."""

PEER_KINDS = (BASE, DISTINCT, SAME)
KINDS = (*PEER_KINDS, ATTENTION)


@dataclass(frozen=True, slots=True, order=True)
class Load:
    """Tokens of every prompt and of every answer."""

    num_prompt: int
    num_output: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError with the reason."""
        num_prompt, slash, num_output = text.partition("/")
        if not (slash and num_prompt.isdecimal() and num_output.isdecimal()):
            raise ValueError(f"{text!r} is no load: give tokens of prompt and answer, like 64/32")
        load = cls(int(num_prompt), int(num_output))
        if min(load.num_prompt, load.num_output) < 1 or load.num_prompt + load.num_output > MAX_TOKENS:
            raise ValueError(f"the load {text} is not possible: both are at least 1, together at most {MAX_TOKENS}")
        return load

    def __str__(self) -> str:
        return f"{self.num_prompt}/{self.num_output}"


@dataclass(frozen=True, slots=True)
class Question:
    """One request; `adapter` is a name of ModelFiles, none for the base."""

    prompt: tuple[int, ...]
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Work:
    """Questions that arrive together."""

    questions: tuple[Question, ...]
    num_output: int

    @property
    def num_tokens(self) -> int:
        return len(self.questions) * self.num_output


@dataclass(frozen=True, slots=True)
class Answers:
    """`token_ids` of each question where they were asked for; seconds from the first question to the last answer."""

    seconds: float
    token_ids: tuple[tuple[int, ...], ...] | None


def draw_work(kind: str, load: Load, num_questions: int, vocab_size: int, seed: str) -> Work:
    """The same for the same seed. Other seeds share no prompt, so that no cache of prefixes can help."""
    source = random.Random(f"{seed} {kind} {load}")
    questions = [
        Question(tuple(source.randrange(FIRST_WORD, vocab_size) for _ in range(load.num_prompt)), adapter)
        for adapter in adapters_of(kind, num_questions)
    ]
    return Work(tuple(questions), load.num_output)


def adapters_of(kind: str, num_questions: int) -> list[str | None]:
    match kind:
        case "base only":
            return [None] * num_questions
        case "distinct adapters":
            return [f"a{index}" for index in range(num_questions)]
        case "one adapter":
            return ["a0"] * num_questions
        case "distinct adapters, q/k/v/o":
            return [f"attention{index}" for index in range(num_questions)]
    raise ValueError(kind)
