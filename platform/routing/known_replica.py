"""Combines a replica's last report with the requests that this gateway has sent to the replica since."""

from __future__ import annotations

from loramux.platform.routing.views import ReplicaView

SHORT_OF_PAGES = 0.1
"""A pool is short of pages if its `pages_free_fraction` is below this value."""

FULL_POOL_COST = 1.0
"""Penalty for a pool without free pages, in units of load."""

LOCAL_CREDIT = 0.05
"""Credit for the gateway's own engine, in units of load, because it needs no forwarding."""


class KnownReplica:
    """A replica's cost and residency.

    `load` is the number of running and waiting sequences divided by the capacity. The number of sequences is the
    reported number plus the change in this gateway's own sequences since the report. A report is already old when it
    arrives, so it may lack requests that this gateway sent before its arrival. The change is therefore measured from
    this gateway's lowest number of sequences between the previous report and this one. This can count a request twice
    until the next report, but never misses one.

    `cost` is the load, plus a penalty for a pool that is short of pages, minus a credit for the local engine.
    """

    __slots__ = (
        "_expected",
        "_expected_before",
        "_num_lowest",
        "_num_own",
        "_num_own_reported",
        "cost",
        "id",
        "load",
        "view",
    )

    def __init__(self, view: ReplicaView) -> None:
        self.view = view
        self.id = view.id
        self.load = 0.0
        self.cost = 0.0
        self._num_own = 0
        self._num_lowest = 0
        self._num_own_reported = 0
        self._expected: set[int] = set()
        self._expected_before: set[int] = set()
        self._weigh()

    def receive(self, view: ReplicaView) -> None:
        if view.since_s != self.view.since_s:
            self._num_own_reported = self._num_lowest
            self._num_lowest = self._num_own
            self._expected_before = self._expected
            self._expected = set()
        self.view = view
        self._weigh()

    def note_started(self) -> None:
        self._num_own += 1
        self._weigh()

    def note_ended(self) -> None:
        # The ended request may have been sent before the replica was forgotten and rediscovered.
        self._num_own = max(0, self._num_own - 1)
        self._num_lowest = min(self._num_lowest, self._num_own)
        self._weigh()

    def expect(self, prefix: int) -> None:
        """Count an adapter as held until two more reports have arrived, by which time a report should show it."""
        if prefix not in self.view.holds:
            self._expected.add(prefix)

    def holds(self, prefix: int) -> bool:
        return prefix in self.view.holds or prefix in self._expected or prefix in self._expected_before

    @property
    def num_held(self) -> int:
        return len(self.view.holds) + len(self._expected)

    def _weigh(self) -> None:
        view = self.view
        num_sequences = view.num_running + view.num_waiting + self._num_own - self._num_own_reported
        self.load = max(num_sequences, self._num_own) / max(1, view.capacity)
        shortage = max(0.0, 1.0 - view.pages_free_fraction / SHORT_OF_PAGES)
        self.cost = self.load + FULL_POOL_COST * shortage - LOCAL_CREDIT * view.is_local
