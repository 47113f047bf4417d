"""How long decode steps take, by their number of rows."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

PART_OF_NEW = 0.2
"""Weight of a new time in the average of its number of rows."""

MOST_OF_OLD = 2.0
"""A new time counts as at most this multiple of the average, because a busy machine sometimes delays a step."""

MAX_AGE = 512
"""Number of steps after which a time is forgotten. The number of rows is then tried again."""

FIRST_SLOPE = 0.1
"""Part of a step of known time that one more row takes, until a second number of rows has been measured."""


@dataclass(slots=True)
class _Average:
    seconds: float
    step: int


class StepTimes:
    """Averages of recent times. Estimates the times of other numbers of rows from these."""

    def __init__(self) -> None:
        self._averages: dict[int, _Average] = {}
        self._has_run: set[int] = set()
        self._num_steps = 0
        # The recent averages by number of rows, or None after a step. A decision reads them several times.
        self._known: list[tuple[int, float]] | None = None

    def note(self, num_rows: int, seconds: float) -> None:
        self._num_steps += 1
        self._known = None
        if num_rows not in self._has_run:
            # The first step also records a program, or captures a graph.
            self._has_run.add(num_rows)
            return
        found = self._averages.get(num_rows)
        if found is None:
            self._averages[num_rows] = _Average(seconds, self._num_steps)
            return
        found.seconds = updated(found.seconds, seconds)
        found.step = self._num_steps

    def ratio(self, num_rows: int, num_more: int) -> float:
        """How much longer a step takes with `num_more` more rows. 1 means that these take no time.

        A step with more rows is never faster, so times that say so are noise, and the ratio is the largest that they
        allow.
        """
        known, total = self._recent(), num_rows + num_more
        before = min([_estimate(known, num_rows), *[seconds for rows, seconds in known if rows >= num_rows]])
        after = max([_estimate(known, total), *[seconds for rows, seconds in known if rows <= total]])
        return after / before if before > 0 else 1.0

    def seconds(self, num_rows: int) -> float:
        """The estimated time of a step, or 0 if no step has been measured."""
        return _estimate(self._recent(), num_rows)

    def _recent(self) -> list[tuple[int, float]]:
        if self._known is not None:
            return self._known
        oldest = self._num_steps - MAX_AGE
        for num_rows in [num_rows for num_rows, one in self._averages.items() if one.step < oldest]:
            del self._averages[num_rows]
        self._known = sorted((num_rows, one.seconds) for num_rows, one in self._averages.items())
        return self._known


def updated(average: float, new: float) -> float:
    """The moving average of times after a new one."""
    return average + PART_OF_NEW * (min(new, MOST_OF_OLD * average) - average)


def _estimate(known: list[tuple[int, float]], num_rows: int) -> float:
    """Interpolate between the nearest numbers of rows. Beyond the largest, go on in the same line."""
    if not known:
        return 0.0
    rows, seconds = known[min(bisect_left(known, (num_rows, 0.0)), len(known) - 1)]
    if rows == num_rows:
        return seconds
    below = [one for one in known if one[0] < min(rows, num_rows)]
    if not below:
        return seconds * (1 + FIRST_SLOPE * num_rows) / (1 + FIRST_SLOPE * rows)
    fewer, before = below[-1]
    return before + max(0.0, seconds - before) * (num_rows - fewer) / (rows - fewer)
