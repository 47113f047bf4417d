"""What is compared: a system in one dtype, which can be opened on model files and then answers work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.workload import Answers, Work

LORAMUX = "loramux"


class SystemFailed(Exception):
    """A system does not start, ended, or answered what was not asked; the message says why, with its last words."""


class Running(Protocol):
    """A system with the model and all adapters loaded."""

    def answer(self, work: Work, *, needs_token_ids: bool) -> Answers:
        """Ask all at once and wait for the last; raises SystemFailed where an answer is not as long as asked."""


@dataclass(frozen=True, slots=True)
class System:
    """`name` is the product, `dtype` that of its weights; `kinds` are the kinds of work that it does.

    `open` takes the files and whether answers are to be compared: then everything that is rounded is float32.
    """

    name: str
    dtype: str
    kinds: tuple[str, ...]
    open: Callable[[ModelFiles, bool], AbstractContextManager[Running]]
    setting: str | None = None
    """What sets it apart from others of the same name and dtype."""

    @property
    def label(self) -> str:
        return ", ".join(part for part in (self.name, self.dtype, self.setting) if part)


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a peer was found and in which ways it can run; `missing` says how to make it found."""

    name: str
    version: str
    systems: tuple[System, ...]
    check: System | None
    """Float32 throughout, for the comparison of answers."""
    missing: str | None = None


def missing_peer(name: str, sentence: str) -> Peer:
    return Peer(name, "not found", (), None, sentence)
