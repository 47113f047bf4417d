"""Processes that follow grammars, which tests share. Starting one takes a fifth of a second, and most tests need it for
one fork.

A process keeps nothing of its forks, so a test cannot see that it has served others. Tests that end or stop the process
start their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from loramux.engine.constraints.process_link import NOT_RUNNING, ProcessLink


class _SharedLink(ProcessLink):
    """A process that rests when its engine is closed."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(command, environment)
        self._resting = _resting[tuple(command)]

    def stop(self) -> str:
        if self.has_ended:
            return super().stop()
        self._resting.append(self)
        return NOT_RUNNING


_resting: defaultdict[tuple[str, ...], list[_SharedLink]] = defaultdict(list)
"""The processes of closed engines, by command."""


def shared_link(command: Sequence[str], environment: Mapping[str, str]) -> ProcessLink:
    """A process that has rested, or a new one. Every test has the same environment, except for its name."""
    resting = _resting[tuple(command)]
    while resting:
        link = resting.pop()
        if not link.has_ended:
            return link
        link.stop()
    return _SharedLink(command, environment)
