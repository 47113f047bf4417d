"""Limits concurrent calls. By default, a call that gets no slot within WAIT_S is refused and can be retried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from loramux.platform.errors import ApiError, RateLimited, Unavailable

WAIT_S = 10.0
"""Maximum time that a call waits for a slot, in seconds. A waiting call occupies a connection but no thread."""
RETRY_AFTER_S = 5.0
MAX_REST_S = 2.0
"""Maximum cooldown that a single call adds, in seconds."""
UNRESTED_S = 1.0
"""Longest cooldown, in seconds, at which a call that ends frees its slot immediately. The calls for a single page stay
below this limit.
"""


class _Share:
    """One tenant's slots, and the end of its cooldown."""

    def __init__(self, num_slots: int) -> None:
        self.limiter = anyio.CapacityLimiter(num_slots)
        self.rests_until_s = 0.0


class TransferSlots:
    """Allows `num_slots` concurrent calls, and `num_each` per tenant, so that no tenant can take all slots.

    With `rest`, each call adds `rest` times its duration, but at most MAX_REST_S, to its tenant's cooldown. If more
    than UNRESTED_S of the cooldown remains when a call ends, the call keeps its slot until only UNRESTED_S remains. In
    the long run, short calls of one tenant therefore use at most `1 / (1 + rest)` of a CPU core in total.
    """

    def __init__(self, what: str, num_slots: int, num_each: int, rest: float = 0.0) -> None:
        self._what = what
        self._num_each = num_each
        self._rest = rest
        self._all = anyio.CapacityLimiter(num_slots)
        # Tenants that hold a slot, wait for a slot or are cooling down.
        self._of_tenant: dict[str, _Share] = {}

    @property
    def num_taken(self) -> int:
        return int(self._all.borrowed_tokens)

    @property
    def num_waiting(self) -> int:
        everyone = (self._all, *(share.limiter for share in self._of_tenant.values()))
        return sum(limiter.statistics().tasks_waiting for limiter in everyone)

    async def acquire_slot(self, tenant_id: str, *, is_patient: bool = False, rests: bool = True) -> Callable[[], None]:
        """Take a slot and return the function that releases it.

        Unless `is_patient`, raises `too_many_<what>` after WAIT_S: RateLimited if the tenant's own calls hold all its
        slots, Unavailable if all tenants' calls hold all slots. With `rests=False`, the call adds no cooldown.
        """
        # A limiter gives each borrower one token, so every call borrows for itself.
        call = object()
        kind: type[ApiError] = RateLimited
        whose = "this tenant"
        share = self._of_tenant.setdefault(tenant_id, _Share(self._num_each))

        def release_own() -> None:
            share.limiter.release_on_behalf_of(call)
            self._forget_idle(tenant_id)

        try:
            with anyio.fail_after(None if is_patient else WAIT_S):
                # The tenant's slot comes first, so that calls over its limit never hold one of the server's slots.
                await share.limiter.acquire_on_behalf_of(call)
                kind, whose = Unavailable, "this server"
                try:
                    await self._all.acquire_on_behalf_of(call)
                except BaseException:
                    release_own()
                    raise
        except BaseException as error:
            self._forget_idle(tenant_id)
            if not isinstance(error, TimeoutError):
                raise
            raise kind(
                f"{whose} has reached its limit of concurrent {self._what}; try again",
                code=f"too_many_{self._what}",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        loop = asyncio.get_running_loop()
        taken_s = loop.time()

        def release_slot() -> None:
            self._all.release_on_behalf_of(call)
            now_s = loop.time()
            if rests:
                rest_s = min(MAX_REST_S, self._rest * (now_s - taken_s))
                share.rests_until_s = max(share.rests_until_s, now_s) + rest_s
            if share.rests_until_s - now_s > UNRESTED_S:
                loop.call_at(share.rests_until_s - UNRESTED_S, release_own)
            else:
                release_own()

        return release_slot

    @asynccontextmanager
    async def held_slot(self, tenant_id: str, *, is_patient: bool = False, rests: bool = True) -> AsyncIterator[None]:
        release_slot = await self.acquire_slot(tenant_id, is_patient=is_patient, rests=rests)
        try:
            yield
        finally:
            release_slot()

    def _forget_idle(self, tenant_id: str) -> None:
        share = self._of_tenant.get(tenant_id)
        if share is None or share.limiter.borrowed_tokens or share.limiter.statistics().tasks_waiting:
            return
        loop = asyncio.get_running_loop()
        if share.rests_until_s > loop.time():
            loop.call_at(share.rests_until_s, self._forget_idle, tenant_id)
        else:
            del self._of_tenant[tenant_id]
