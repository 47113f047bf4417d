"""The places of the batches that a server runs: who takes one, and who gives one up while it waits for a quota."""

from __future__ import annotations

import time

from loramux.platform.batches.batch_claims import BatchQueue, ClaimedBatch


class PlaceGivenUp(Exception):
    """No line of the batch can run before `until_s` for lack of quota, and another batch waits for its place."""

    def __init__(self, until_s: float) -> None:
        super().__init__("the batch waits for a quota, and another batch needs its place")
        self.until_s = until_s


class Places:
    """At most `num_places` batches run at once on this server, each of another tenant.

    A tenant whose batch has given up its place rests for a while. None of its batches then begins here, so that older
    batches still go before younger ones.
    """

    def __init__(self, queue: BatchQueue, num_places: int) -> None:
        self._queue = queue
        self._num_places = num_places
        self._taken: tuple[str, ...] = ()
        """The tenants whose batches run, as of the last look for a batch."""
        self._resting: dict[str, float] = {}
        """When each resting tenant's batches can run again."""

    def claim(self, but_tenants: tuple[str, ...]) -> ClaimedBatch | None:
        """Claim the oldest batch that no server runs. Of a resting tenant, claim only a batch that can end without
        running a line, such as a cancelled one. Blocking.
        """
        resting = self._now_resting()
        claimed = self._queue.claim((*but_tenants, *resting))
        if claimed is None and resting:
            claimed = self._queue.claim_ending(but_tenants)
        self._taken = but_tenants if claimed is None else (*but_tenants, claimed.tenant_id)
        return claimed

    def are_wanted(self) -> bool:
        """True if all places are taken and the batch of another tenant waits for one. Blocking."""
        taken = self._taken
        return len(taken) >= self._num_places and self._queue.has_waiting((*taken, *self._now_resting()))

    def rest(self, tenant_id: str, until_s: float) -> None:
        # Other threads read the dictionary, so it is replaced.
        now_s = time.monotonic()
        resting = {other: end_s for other, end_s in self._resting.items() if end_s > now_s}
        self._resting = {**resting, tenant_id: until_s}

    def _now_resting(self) -> tuple[str, ...]:
        now_s = time.monotonic()
        return tuple(tenant_id for tenant_id, until_s in self._resting.items() if until_s > now_s)
