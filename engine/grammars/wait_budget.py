"""Limits how long the engine's steps wait for each tenant's masks."""

from __future__ import annotations

from collections.abc import Callable

BURST_S = 5e-3
"""Time that the engine waits for one share at once, in seconds."""

REFILL = 0.1
"""Time that the engine waits for all shares continuously, as a part of the elapsed time."""


class WaitBudgets:
    """One leaky bucket per share. The engine no longer waits for the masks of a share whose bucket is full.

    Shares with debts divide the refill equally, so the total is bounded for any number of shares. `clock` returns the
    time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Time waited for each share that has not been refilled yet, in seconds, as of `_refilled_s`. Never 0.
        self._debts: dict[str, float] = {}
        self._refilled_s = clock()

    def left(self, share_key: str) -> float:
        """Time that the engine may still wait for the share, in seconds. At most 0 if the budget is exhausted."""
        if share_key not in self._debts:
            return BURST_S
        self._refill()
        return BURST_S - self._debts.get(share_key, 0.0)

    def charge(self, share_key: str, waited_s: float) -> None:
        self._refill()
        self._debts[share_key] = self._debts.get(share_key, 0.0) + waited_s

    def _refill(self) -> None:
        now_s = self._clock()
        refill_s = REFILL * (now_s - self._refilled_s) / max(1, len(self._debts))
        self._debts = {key: debt_s - refill_s for key, debt_s in self._debts.items() if debt_s > refill_s}
        self._refilled_s = now_s
