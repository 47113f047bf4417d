"""The work given to every system: concurrent greedy requests, each with its own prompt and possibly an adapter."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Self

from benchmarks.peers.vocabulary import FIRST_WORD

BASE = "base only"
DISTINCT = "distinct adapters"
SAME = "one adapter"
ATTENTION = "distinct adapters, q/k/v/o"
"""Kind of work that only loramux does, compared with its own base."""

MAX_TOKENS = 512
"""Maximum number of tokens in a prompt and its answer together, for servers that reserve room for each request."""

PEER_KINDS = (BASE, DISTINCT, SAME)
KINDS = (*PEER_KINDS, ATTENTION)


@dataclass(frozen=True, slots=True, order=True)
class Load:
    """Number of tokens in every prompt and in every answer."""

    num_prompt: int
    num_output: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "PROMPT/OUTPUT". Raises ValueError with the reason."""
        num_prompt, slash, num_output = text.partition("/")
        if not (slash and num_prompt.isdecimal() and num_output.isdecimal()):
            raise ValueError(f"{text!r} is not a load: give numbers of prompt and answer tokens, like 64/32")
        load = cls(int(num_prompt), int(num_output))
        if min(load.num_prompt, load.num_output) < 1 or load.num_prompt + load.num_output > MAX_TOKENS:
            raise ValueError(
                f"the load {text} is impossible: both must be at least 1, and their sum at most {MAX_TOKENS}"
            )
        return load

    def __str__(self) -> str:
        return f"{self.num_prompt}/{self.num_output}"


@dataclass(frozen=True, slots=True)
class Question:
    """`adapter` is one of the names in ModelFiles, or None for the base."""

    prompt: tuple[int, ...]
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Work:
    questions: tuple[Question, ...]
    num_output: int

    @property
    def num_tokens(self) -> int:
        return len(self.questions) * self.num_output


@dataclass(frozen=True, slots=True)
class Answers:
    """`token_ids` of each answer, if requested, and the seconds from the first question to the last answer."""

    seconds: float
    token_ids: tuple[tuple[int, ...], ...] | None


def draw_work(kind: str, load: Load, num_questions: int, vocab_size: int, seed: str) -> Work:
    """Draw work that depends only on the arguments. Different seeds give different prompts, so prefix caches do not
    help.
    """
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
