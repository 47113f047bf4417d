"""Places for calls that last: who gets none within a while is told to come again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from loramux.platform.errors import Unavailable

WAIT_S = 10.0
"""How long a call waits for a place; it holds a connection meanwhile, and no thread."""
RETRY_AFTER_S = 5.0
MAX_REST_S = 2.0
"""How long a place rests at most, however long it was taken."""


class Places:
    """`num_places` calls at a time, of them at most `num_each` of one tenant: the others find a place all the same.

    With `rest`, a place stays taken after its call for `rest` times as long as the call had it: one tenant's calls
    keep the processor busy for `num_each / (1 + rest)` of the time at most, however many it sends.
    """

    def __init__(self, what: str, num_places: int, num_each: int, rest: float = 0.0) -> None:
        self._what = what
        self._num_each = num_each
        self._rest = rest
        self._all = anyio.CapacityLimiter(num_places)
        # Of tenants that have or want a place just now.
        self._of_tenant: dict[str, anyio.CapacityLimiter] = {}

    @property
    def num_taken(self) -> int:
        return int(self._all.borrowed_tokens)

    @property
    def num_waiting(self) -> int:
        everyone = (self._all, *self._of_tenant.values())
        return sum(limiter.statistics().tasks_waiting for limiter in everyone)

    async def take(self, tenant_id: str, *, is_patient: bool = False) -> Callable[[], None]:
        """Take a place, and return what gives it back. Raises Unavailable `too_many_<what>` unless it is patient."""
        call = object()
        own = self._of_tenant.setdefault(tenant_id, anyio.CapacityLimiter(self._num_each))

        def give_back_own() -> None:
            own.release_on_behalf_of(call)
            self._forget_idle(tenant_id)

        def free() -> None:
            self._all.release_on_behalf_of(call)
            give_back_own()

        loop = asyncio.get_running_loop()
        try:
            with anyio.fail_after(None if is_patient else WAIT_S):
                await own.acquire_on_behalf_of(call)
                try:
                    await self._all.acquire_on_behalf_of(call)
                except BaseException:
                    give_back_own()
                    raise
        except BaseException as error:
            self._forget_idle(tenant_id)
            if not isinstance(error, TimeoutError):
                raise
            raise Unavailable(
                f"as many {self._what} as this server takes at once are under way; try again",
                code=f"too_many_{self._what}",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        taken_s = loop.time()

        def give_back() -> None:
            if self._rest:
                loop.call_later(min(MAX_REST_S, self._rest * (loop.time() - taken_s)), free)
            else:
                free()

        return give_back

    @asynccontextmanager
    async def one(self, tenant_id: str, *, is_patient: bool = False) -> AsyncIterator[None]:
        """A place for as long as the block lasts."""
        give_back = await self.take(tenant_id, is_patient=is_patient)
        try:
            yield
        finally:
            give_back()

    def _forget_idle(self, tenant_id: str) -> None:
        statistics = self._of_tenant[tenant_id].statistics() if tenant_id in self._of_tenant else None
        if statistics is not None and not statistics.borrowed_tokens and not statistics.tasks_waiting:
            del self._of_tenant[tenant_id]
