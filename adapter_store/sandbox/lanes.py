"""Decides which tenant's request a pool of confined processes runs next. It has no threads and starts no processes."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

HALF_LIFE_S = 10.0
"""Time after which processor time counts half, in seconds."""

MAX_OVERRUN_S = 0.25
"""A tenant's requests skip quick turns while its requests that exceeded one have recently used more processor time than
this, in seconds.
"""

_FORGET_S = 10 * HALF_LIFE_S

Request = TypeVar("Request")


class TooManyWaiting(Exception):
    """The tenant already has the maximum number of waiting requests."""


@dataclass(frozen=True, slots=True)
class Turn(Generic[Request]):
    """A request to run now. If it exceeds the processor time of a quick turn, it later gets a full turn."""

    tenant_id: str
    request: Request
    is_quick: bool


@dataclass(slots=True)
class _Queue(Generic[Request]):
    """A tenant's requests. The first is the one that is running or runs next."""

    requests: deque[Request] = field(default_factory=deque)
    is_running: bool = False
    needs_full_turn: bool = False


@dataclass(slots=True)
class _Use:
    """Processor time that a tenant has recently used, decayed until `at_s`. `overrun_s` is the part used by requests
    that exceeded a quick turn.
    """

    used_s: float
    overrun_s: float
    at_s: float


class Lanes(Generic[Request]):
    """Gives turns to requests so that no tenant can starve another.

    Each tenant has one turn at a time, and its requests run in order. A request first gets a quick turn. If it needs
    more than `quick_cpu_s` of processor time, it then gets a full turn. A tenant whose requests recently exceeded quick
    turns gets full turns at once. At most `max_full` full turns run at a time, and they start before quick turns, so
    with more processes than that, neither lane can block the other.

    In each lane, the tenant that has recently used least processor time goes first. While a tenant's next request
    waits in a lane, each other tenant therefore gets turns there only until it has used more than the waiting tenant
    had used recently. A tenant that has used nothing waits for at most one turn of each other tenant.
    """

    def __init__(
        self, quick_cpu_s: float, max_full: int, max_waiting_per_tenant: int, clock: Callable[[], float]
    ) -> None:
        """`max_waiting_per_tenant` includes the running request."""
        self._quick_cpu_s = quick_cpu_s
        self._max_full = max_full
        self._max_waiting_per_tenant = max_waiting_per_tenant
        self._clock = clock
        self._num_full = 0
        # Tenants with requests. Of tenants that have used equally little, the first goes first.
        self._queues: dict[str, _Queue[Request]] = {}
        # Least recently changed first.
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    def append_request(self, tenant_id: str, request: Request) -> None:
        """Let a request wait for its turn. Raises TooManyWaiting."""
        queue = self._queues.setdefault(tenant_id, _Queue())
        if len(queue.requests) >= self._max_waiting_per_tenant:
            raise TooManyWaiting
        queue.requests.append(request)

    def drop_request(self, tenant_id: str, request: Request) -> None:
        """Remove a request that is waiting. Do nothing if it is running or has ended."""
        queue = self._queues.get(tenant_id)
        if queue is None or request not in queue.requests:
            return
        if queue.requests[0] is request:
            if queue.is_running:
                return
            queue.needs_full_turn = False
        queue.requests.remove(request)
        if not queue.requests:
            del self._queues[tenant_id]

    def drop_requests(self) -> list[Request]:
        """Remove and return all requests. No turn may be running."""
        requests = [request for queue in self._queues.values() for request in queue.requests]
        self._queues.clear()
        return requests

    def next_turn(self) -> Turn[Request] | None:
        """Begin the next turn, or return None if no waiting request may run now."""
        now_s = self._clock()
        quick: list[tuple[float, str]] = []
        full: list[tuple[float, str]] = []
        for tenant_id, queue in self._queues.items():
            if not queue.is_running:
                use = self._use(tenant_id, now_s)
                lane = full if queue.needs_full_turn or use.overrun_s > MAX_OVERRUN_S else quick
                lane.append((use.used_s, tenant_id))
        is_quick = not full or self._num_full >= self._max_full
        waiting = quick if is_quick else full
        if not waiting:
            return None
        _, tenant_id = min(waiting, key=lambda one: one[0])
        queue = self._queues[tenant_id]
        queue.is_running = True
        self._num_full += not is_quick
        return Turn(tenant_id, queue.requests[0], is_quick)

    def end_turn(self, turn: Turn[Request], cpu_s: float, has_ended: bool) -> None:
        """Charge a turn to its tenant. A request that has not ended gets a full turn next."""
        now_s = self._clock()
        use = self._use(turn.tenant_id, now_s)
        use.used_s += cpu_s
        use.overrun_s += cpu_s if cpu_s >= self._quick_cpu_s else 0.0
        self._uses[turn.tenant_id] = use
        self._uses.move_to_end(turn.tenant_id)
        self._forget_uses(now_s)
        self._num_full -= not turn.is_quick
        queue = self._queues.pop(turn.tenant_id)
        queue.is_running = False
        queue.needs_full_turn = not has_ended
        if has_ended:
            queue.requests.popleft()
        if queue.requests:
            self._queues[turn.tenant_id] = queue

    def _use(self, tenant_id: str, now_s: float) -> _Use:
        use = self._uses.get(tenant_id)
        if use is None:
            return _Use(0.0, 0.0, now_s)
        part = 0.5 ** ((now_s - use.at_s) / HALF_LIFE_S)
        return _Use(use.used_s * part, use.overrun_s * part, now_s)

    def _forget_uses(self, now_s: float) -> None:
        """Forget tenants whose processor time hardly counts any more."""
        while next(iter(self._uses.values())).at_s < now_s - _FORGET_S:
            self._uses.popitem(last=False)
