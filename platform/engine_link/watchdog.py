"""Finds a loop that has stopped although its process lives."""

from __future__ import annotations

from loramux.engine.server.step_record import LoopProgress


class Watchdog:
    """Judges one run of an engine by looks at its progress.

    A loop that passes is well, whether it had work or not; one that is in a step may stay there for `step_timeout_s`,
    and for `first_step_timeout_s` before the first step of its life is through, since kernels may have to be compiled
    for it. A look counts at most `max_gap_s`, so that a supervisor that could not look, because the machine or the
    container stood still, does not blame the engine for it.
    """

    def __init__(self, step_timeout_s: float, first_step_timeout_s: float, max_gap_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._first_step_timeout_s = max(first_step_timeout_s, step_timeout_s)
        self._max_gap_s = max_gap_s
        self._num_passes = -1
        self.stalled_s = 0.0

    def look(self, progress: LoopProgress, since_last_look_s: float) -> bool:
        """Whether the loop hangs."""
        if progress.num_passes != self._num_passes:
            self._num_passes = progress.num_passes
            self.stalled_s = 0.0
            return False
        self.stalled_s += min(since_last_look_s, self._max_gap_s)
        return self.stalled_s > (self._step_timeout_s if progress.num_steps else self._first_step_timeout_s)
