"""Budgets of time for each share, which refill continuously."""

from __future__ import annotations

from collections.abc import Callable


class TimeBudgets:
    """One leaky bucket per share.

    A share can use `burst_s` seconds at once. `refill` is the part of the elapsed time that all shares together can use
    continuously. Shares with debts divide it equally, so the total is bounded for any number of shares. `clock` returns
    the time in seconds.
    """

    def __init__(self, clock: Callable[[], float], burst_s: float, refill: float) -> None:
        self._clock = clock
        self._burst_s = burst_s
        self._refill_part = refill
        # Time used by each share that has not been refilled yet, in seconds, as of `_refilled_s`. Never 0.
        self._debts: dict[str, float] = {}
        self._refilled_s = clock()

    def has_debt(self, share_key: str) -> bool:
        if share_key in self._debts:
            self._refill()
        return share_key in self._debts

    def left(self, share_key: str) -> float:
        """Time that the share may still use now, in seconds. At most 0 if its budget is exhausted."""
        return self._burst_s - self._debts.get(share_key, 0.0) if self.has_debt(share_key) else self._burst_s

    def charge(self, share_key: str, used_s: float) -> None:
        if used_s > 0:
            self._refill()
            self._debts[share_key] = self._debts.get(share_key, 0.0) + used_s

    def _refill(self) -> None:
        now_s = self._clock()
        refill_s = self._refill_part * (now_s - self._refilled_s) / max(1, len(self._debts))
        self._debts = {key: debt_s - refill_s for key, debt_s in self._debts.items() if debt_s > refill_s}
        self._refilled_s = now_s
