"""Examples made from parts of sentences, and their division into training and held-out examples."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

HELD_OUT_SHARE = 5
"""The share of held-out sentences is one divided by this number."""


@dataclass(frozen=True, slots=True)
class Example:
    system: str
    prompt: str
    answer: str
    sentences: tuple[str, ...]
    """The sentences of the prompt."""
    expected: str
    """What a grader compares an answer with."""

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.prompt}]


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    draw: Callable[[random.Random], Example]
    num_steps: int
    """Steps of training, of eight examples each."""


def draw_held_out(task: Task, count: int, seed: int) -> list[Example]:
    """Draw different examples that contain only held-out sentences."""
    return _draw(task, count, seed, is_held_out=True)


def draw_training(task: Task, count: int, seed: int) -> list[Example]:
    """Draw different examples that contain no held-out sentence."""
    return _draw(task, count, seed, is_held_out=False)


def _draw(task: Task, count: int, seed: int, *, is_held_out: bool) -> list[Example]:
    chance = random.Random(seed)
    drawn: dict[str, Example] = {}
    while len(drawn) < count:
        example = task.draw(chance)
        if all(_is_held_out(sentence) is is_held_out for sentence in example.sentences):
            drawn.setdefault(example.prompt, example)
    return list(drawn.values())


def _is_held_out(sentence: str) -> bool:
    """A sentence's own hash decides, and therefore the two splits can never share a sentence."""
    return hashlib.sha256(sentence.encode()).digest()[0] % HELD_OUT_SHARE == 0
