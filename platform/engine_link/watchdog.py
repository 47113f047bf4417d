"""Detects an engine loop that has stopped while its process is still alive."""

from __future__ import annotations


class Watchdog:
    """Watches one run of an engine by sampling its progress.

    A loop that keeps iterating is healthy, whether it has work or not. A step may take `step_timeout_s`. Each sample
    adds at most `max_gap_s` to the stalled time, so suspending the machine or container does not make the engine count
    as hung.
    """

    def __init__(self, step_timeout_s: float, max_gap_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._max_gap_s = max_gap_s
        self._num_passes = -1
        self.stalled_s = 0.0

    def look(self, num_passes: int, since_last_look_s: float) -> bool:
        """True if the engine hangs. `num_passes` is the number of iterations that its loop has made."""
        if num_passes != self._num_passes:
            self._num_passes = num_passes
            self.stalled_s = 0.0
            return False
        self.stalled_s += min(since_last_look_s, self._max_gap_s)
        return self.stalled_s > self._step_timeout_s
