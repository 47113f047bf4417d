"""Decides which tenant's request a pool of confined processes runs next. It has no threads and starts no processes."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

HALF_LIFE_S = 10.0
"""Time after which processor time counts half, in seconds."""

MAX_LIGHT_USE_S = 1.0
"""Most processor time that a tenant in the light lane has recently used, in seconds, if its last turn was short."""

SHORT_PART = 0.5
"""Longest short turn, as a part of a quick turn."""

MAX_LONG_PARTS = 1.5
"""The same limit for other tenants, as a multiple of a quick turn. It allows one turn that was cut."""

_FORGET_S = 10 * HALF_LIFE_S

Request = TypeVar("Request")


class TooManyWaiting(Exception):
    """The tenant already has the maximum number of waiting requests."""


class Lane(Enum):
    LIGHT = auto()
    """Quick turns of tenants that have recently used little processor time, see `Lanes`."""
    BUSY = auto()
    """Quick turns of other tenants."""
    FULL = auto()
    """Turns of requests that exceeded a quick turn."""


@dataclass(frozen=True, slots=True)
class Turn(Generic[Request]):
    """A request to run now."""

    tenant_id: str
    request: Request
    lane: Lane

    @property
    def is_quick(self) -> bool:
        """False if the request may use as much processor time as any request may."""
        return self.lane is not Lane.FULL


@dataclass(slots=True)
class _Queue(Generic[Request]):
    """A tenant's requests. The first is the one that is running or runs next."""

    requests: deque[Request] = field(default_factory=deque)
    is_running: bool = False
    needs_full_turn: bool = False


@dataclass(frozen=True, slots=True)
class _Use:
    """Processor time that a tenant has recently used, decayed until `at_s`, and that of its last turn."""

    used_s: float
    last_s: float
    at_s: float


class Lanes(Generic[Request]):
    """Gives turns to requests so that no tenant can starve another.

    Each tenant has one turn at a time, and its requests run in order. A request first gets a quick turn. If that is too
    short, it then gets a full turn. A tenant that is not light and whose last request was too long for a quick turn
    gets a full turn at once. At most `max_full` full turns run at a time, and one process is left to the light lane.
    Pauses follow the turns of other lanes.

    A tenant whose last turn was short is light up to MAX_LIGHT_USE_S, and another one only for about one quick turn.
    Tenants whose requests are all short therefore seldom wait for the turn of a tenant whose requests are not.

    Of the requests that may run, that of the tenant that has recently used least processor time goes first. While a
    tenant's next request waits, each other tenant therefore gets turns before it only until it has used more than the
    waiting tenant had used recently. A tenant that has used nothing waits in the light lane for at most one quick turn
    of each other tenant, and for a full turn in addition for at most one full turn of each.
    """

    def __init__(
        self,
        quick_cpu_s: float,
        num_processes: int,
        max_full: int,
        max_waiting_per_tenant: int,
        clock: Callable[[], float],
        pause: float = 0.0,
    ) -> None:
        """`max_waiting_per_tenant` includes the running request. After a turn that is not in the light lane, the next
        such turn begins only after a pause of `pause` times the turn's processor time.
        """
        assert 0 < max_full < num_processes
        self._quick_cpu_s = quick_cpu_s
        self._num_processes = num_processes
        self._max_full = max_full
        self._max_waiting_per_tenant = max_waiting_per_tenant
        self._clock = clock
        self._pause = pause
        self._paused_until_s = clock()
        self._num_running = dict.fromkeys(Lane, 0)
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
        """Begin the next turn, for a process that is free, or return None if no waiting request may run now."""
        now_s = self._clock()
        choices = []
        for tenant_id, queue in self._queues.items():
            use = self._use(tenant_id, now_s)
            lane = self._lane(queue, use)
            is_paused = lane is not Lane.LIGHT and now_s < self._paused_until_s
            if not queue.is_running and not is_paused and self._is_open(lane):
                choices.append((use.used_s, Turn(tenant_id, queue.requests[0], lane)))
        if not choices:
            return None
        _, turn = min(choices, key=lambda one: one[0])
        self._queues[turn.tenant_id].is_running = True
        self._num_running[turn.lane] += 1
        return turn

    def pause_s(self) -> float | None:
        """Seconds until a turn outside the light lane may begin, or None if none is paused."""
        pause_s = self._paused_until_s - self._clock()
        return pause_s if pause_s > 0 else None

    def end_turn(self, turn: Turn[Request], cpu_s: float, has_ended: bool) -> None:
        """Charge a turn to its tenant. A request that has not ended gets a full turn next."""
        now_s = self._clock()
        used_s = self._use(turn.tenant_id, now_s).used_s + cpu_s
        self._uses[turn.tenant_id] = _Use(used_s, cpu_s, now_s)
        self._uses.move_to_end(turn.tenant_id)
        self._forget_uses(now_s)
        self._num_running[turn.lane] -= 1
        if turn.lane is not Lane.LIGHT:
            self._paused_until_s = max(self._paused_until_s, now_s + self._pause * cpu_s)
        queue = self._queues.pop(turn.tenant_id)
        queue.is_running = False
        queue.needs_full_turn = not has_ended
        if has_ended:
            queue.requests.popleft()
        if queue.requests:
            self._queues[turn.tenant_id] = queue

    def _is_open(self, lane: Lane) -> bool:
        """Return whether a turn may begin in a lane. The last process is left to the light lane."""
        num_busy, num_full = self._num_running[Lane.BUSY], self._num_running[Lane.FULL]
        return lane is Lane.LIGHT or (
            num_busy + num_full < self._num_processes - 1 and (lane is Lane.BUSY or num_full < self._max_full)
        )

    def _use(self, tenant_id: str, now_s: float) -> _Use:
        use = self._uses.get(tenant_id)
        if use is None:
            return _Use(0.0, 0.0, now_s)
        return _Use(use.used_s * 0.5 ** ((now_s - use.at_s) / HALF_LIFE_S), use.last_s, now_s)

    def _forget_uses(self, now_s: float) -> None:
        """Forget tenants whose processor time hardly counts any more."""
        while next(iter(self._uses.values())).at_s < now_s - _FORGET_S:
            self._uses.popitem(last=False)

    def _lane(self, queue: _Queue[Request], use: _Use) -> Lane:
        is_short = use.last_s <= SHORT_PART * self._quick_cpu_s
        is_light = use.used_s <= (MAX_LIGHT_USE_S if is_short else MAX_LONG_PARTS * self._quick_cpu_s)
        if queue.needs_full_turn or (use.last_s >= self._quick_cpu_s and not is_light):
            return Lane.FULL
        return Lane.LIGHT if is_light else Lane.BUSY
