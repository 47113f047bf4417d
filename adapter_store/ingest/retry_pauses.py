"""How long a server waits before it tries a failed version again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LONGEST_PAUSE_S = 300.0
"""Longest pause before a failed version is tried again, in seconds."""


@dataclass(frozen=True, slots=True)
class _Pause:
    pause_s: float
    due_s: float


class RetryPauses:
    """The pauses of failed versions in one thread of one server. Each further failure of a version doubles its pause.

    Nothing is stored: another server, or this one after a restart, tries the version at once.
    """

    def __init__(self, first_s: float, clock: Callable[[], float]) -> None:
        self._first_s = first_s
        self._clock = clock
        self._pauses: dict[str, _Pause] = {}

    def note_failure(self, version_id: str) -> float:
        """Begin a version's next pause, and return its length in seconds."""
        last = self._pauses.get(version_id)
        pause_s = self._first_s if last is None else min(2 * last.pause_s, LONGEST_PAUSE_S)
        self._pauses[version_id] = _Pause(pause_s, self._clock() + pause_s)
        return pause_s

    def forget(self, version_id: str) -> None:
        """Forget a version that has its verdict."""
        self._pauses.pop(version_id, None)

    def paused(self) -> set[str]:
        """Return the versions that are not to be tried yet."""
        now_s = self._clock()
        # Another server may have decided a version that has long been due, or a purge may have deleted it.
        self._pauses = {key: one for key, one in self._pauses.items() if now_s < one.due_s + LONGEST_PAUSE_S}
        return {key for key, one in self._pauses.items() if now_s < one.due_s}
