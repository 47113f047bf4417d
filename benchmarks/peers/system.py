"""The interface to the systems that are compared. Open a system with model files, then send it work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from benchmarks.answers import RunFailed
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.workload import Answers, Work

LORAMUX = "loramux"


class SystemFailed(RunFailed):
    """A system did not start, ended early, or gave a wrong answer. The message says why."""


class Running(Protocol):
    def answer(self, work: Work, *, needs_token_ids: bool) -> Answers:
        """Send all questions together and wait for the last answer. Raises SystemFailed if an answer has the wrong
        length.
        """


@dataclass(frozen=True, slots=True)
class System:
    """A server or library with weights in one dtype. `kinds` are the kinds of work that it supports.

    `open` takes the model files and a flag that is true if answers will be compared and not timed.
    """

    name: str
    dtype: str
    kinds: tuple[str, ...]
    open: Callable[[ModelFiles, bool], AbstractContextManager[Running]]
    setting: str | None = None
    """Distinguishes systems with the same name and dtype."""

    @property
    def label(self) -> str:
        return ", ".join(part for part in (self.name, self.dtype, self.setting) if part)


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's version and the systems that it can run as. `missing` says how to configure a missing peer."""

    name: str
    version: str
    systems: tuple[System, ...]
    check: System | None
    """The system whose answers are compared with the reference."""
    missing: str | None = None


def missing_peer(name: str, sentence: str) -> Peer:
    return Peer(name, "not found", (), None, sentence)
