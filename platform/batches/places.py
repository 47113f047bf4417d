"""The places of the batches that a server runs: who takes one, and who gives one up to a batch that waits."""

from __future__ import annotations

import time

from loramux.platform.batches.batch_claims import BatchQueue, ClaimedBatch

MAX_RUNNING = 4
"""Maximum number of batches that a server runs at once, each of another tenant."""


class PlaceGivenUp(Exception):
    """The batch has given up its place, because another batch waits for one."""


class Places:
    """At most `num_places` batches run at once on this server, each of another tenant.

    A batch that gives up its place waits behind the batches that wait already, and so do the other batches of its
    tenant. The tenant rests for a while: none of its batches begins here.

    Other threads read the attributes, so each change replaces them.
    """

    def __init__(self, queue: BatchQueue, num_places: int) -> None:
        self._queue = queue
        self._num_places = num_places
        self._taken: tuple[str, ...] = ()
        """The tenants whose batches run, as of the last look for a batch, without those that have left since."""
        self._resting: dict[str, float] = {}
        """When each resting tenant's batches can run again."""
        self._waiting_since_us: dict[str, int] = {}
        """When the waiting tenants gave up their places that have given up one, in the time of the database."""

    def claim(self, but_tenants: tuple[str, ...]) -> ClaimedBatch | None:
        """Claim the batch that has waited longest and that no server runs. Of a resting tenant, claim only a batch that
        can end without running a line, such as a cancelled one. Blocking.
        """
        resting, since_us = self._now_resting(), self._waiting_since_us
        claimed = self._queue.claim((*but_tenants, *resting), since_us)
        # If nothing can be claimed, only resting tenants wait.
        waiting = set(resting) if claimed is None else since_us.keys() - {claimed.tenant_id}
        if claimed is None and resting:
            claimed = self._queue.claim_ending(but_tenants)
        self._taken = but_tenants if claimed is None else (*but_tenants, claimed.tenant_id)
        self._waiting_since_us = {one: us for one, us in since_us.items() if one in waiting}
        return claimed

    def are_wanted(self) -> bool:
        """True if all places are taken and the batch of another tenant waits for one. Blocking."""
        taken = self._taken
        return len(taken) >= self._num_places and self._queue.has_waiting((*taken, *self._now_resting()))

    def give_up(self, tenant_id: str, until_s: float, now_us: int) -> bool:
        """Give up a place that was wanted. The tenant rests until `until_s`.

        Return False if another batch has just left or given up its place, which is enough.
        """
        if len(self._taken) < self._num_places:
            return False
        self.leave(tenant_id)
        now_s = time.monotonic()
        resting = {other: end_s for other, end_s in self._resting.items() if end_s > now_s}
        self._resting = {**resting, tenant_id: until_s}
        self._waiting_since_us = {**self._waiting_since_us, tenant_id: now_us}
        return True

    def leave(self, tenant_id: str) -> None:
        """The tenant's batch no longer runs."""
        self._taken = tuple(other for other in self._taken if other != tenant_id)

    def _now_resting(self) -> tuple[str, ...]:
        now_s = time.monotonic()
        return tuple(tenant_id for tenant_id, until_s in self._resting.items() if until_s > now_s)
