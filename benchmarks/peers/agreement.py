"""Compares, before anything is timed, the greedy float32 tokens that the systems generate on the small model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.answers import CheckError
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.system import System
from benchmarks.peers.workload import BASE, DISTINCT, Load, Question, Work, adapters_of, draw_work

LOAD = Load(24, 8)
LEAST_SHARE = 0.5
"""Minimum share of a peer's answers that equal peft's answers.

A peer with a lower share is probably running another model, or no adapters, so its speed is meaningless.
"""

TokenIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The number of answers that equal the reference's answers, and the total number of answers, by kind of work."""

    equal: Mapping[str, int]
    num_answers: Mapping[str, int]

    @property
    def is_whole(self) -> bool:
        return dict(self.equal) == dict(self.num_answers)

    @property
    def share(self) -> float:
        return sum(self.equal.values()) / sum(self.num_answers.values())

    def __str__(self) -> str:
        return ", ".join(f"{kind} {self.equal[kind]} of {number}" for kind, number in self.num_answers.items())


def answers_of(system: System, files: ModelFiles, kinds: Sequence[str]) -> dict[str, TokenIds]:
    """The system's answers to the same prompts with each kind of adapter. Raises SystemFailed if the system fails."""
    found: dict[str, TokenIds] = {}
    with system.open(files, True) as running:
        for kind in kinds:
            answers = running.answer(check_work(kind, files), needs_token_ids=True)
            assert answers.token_ids is not None
            found[kind] = answers.token_ids
    return found


def check_work(kind: str, files: ModelFiles) -> Work:
    """Work with the same prompts for each kind, so that only the adapters differ."""
    asked = draw_work(DISTINCT, LOAD, files.num_adapters, files.shape.vocab_size, "check")
    adapters = adapters_of(kind, files.num_adapters)
    pairs = zip(asked.questions, adapters, strict=True)
    return Work(tuple(Question(question.prompt, adapter) for question, adapter in pairs), asked.num_output)


def require_effect(reference: Mapping[str, TokenIds]) -> None:
    """Raise CheckError if an adapter does not change the base's answer, because the check could then not notice a
    missing adapter.
    """
    for kind, answers in reference.items():
        if kind != BASE and any(map(tuple.__eq__, answers, reference[BASE])):
            raise CheckError(f"with {kind}, one of the reference's answers is the base's own")


def compare(reference: Mapping[str, TokenIds], found: Mapping[str, TokenIds]) -> Agreement:
    equal = {kind: sum(map(tuple.__eq__, answers, reference[kind])) for kind, answers in found.items()}
    return Agreement(equal, {kind: len(reference[kind]) for kind in found})
