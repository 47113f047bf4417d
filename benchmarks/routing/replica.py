"""A simulated replica: sequence slots, a queue, and a pool of adapters."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.routing.setting import Setting
from loramux.platform.routing.views import RoutingRequest

After = Callable[[float, Callable[[], None]], None]
"""Calls a function after some simulated seconds."""


@dataclass(slots=True, kw_only=True)
class Request:
    adapter: int
    routing: RoutingRequest
    arrived_s: float
    answer_s: float
    gateway: int
    replica_id: str = ""
    started_s: float | None = None
    was_resident: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    num_running: int
    num_waiting: int
    num_in_use: int
    """Number of adapters in the pool that running or waiting requests use."""
    holds: frozenset[int]
    is_draining: bool


class SimulatedReplica:
    def __init__(
        self,
        replica_id: str,
        setting: Setting,
        clock: Callable[[], float],
        after: After,
        random: Random,
        prefixes: list[int],
        ended: Callable[[Request], None],
    ) -> None:
        self.id = replica_id
        self.is_draining = False
        self.is_dead = False
        self.num_loads = 0
        self._setting = setting
        self._clock = clock
        self._after = after
        self._random = random
        self._prefixes = prefixes
        self._ended = ended
        self._sequence_seconds = 0.0
        self._counted_s = clock()
        # Adapters in the pool, with the number of requests that use each. The least recently used adapter comes first.
        self._users: OrderedDict[int, int] = OrderedDict()
        # Adapters that are not yet in the pool, with the requests that wait for each. Some are being loaded.
        self._cold: OrderedDict[int, list[Request]] = OrderedDict()
        self._loading: set[int] = set()
        self._ready: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._num_cold = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._ready) + self._num_cold

    def add(self, request: Request) -> None:
        self.sequence_seconds()
        adapter = request.adapter
        if adapter in self._users:
            request.was_resident = True
            self._users[adapter] += 1
            self._users.move_to_end(adapter)
            self._ready.append(request)
            self._run()
            return
        self._num_cold += 1
        self._cold.setdefault(adapter, []).append(request)
        self._load()

    def prefetch(self, adapter: int) -> None:
        if adapter not in self._users and adapter not in self._cold:
            self._cold[adapter] = []
            self._load()

    def holds(self, adapter: int) -> bool:
        return adapter in self._users

    def put(self, adapter: int) -> None:
        """Place an adapter in the pool at once, before the simulation begins."""
        if adapter in self._users:
            self._users.move_to_end(adapter)
            return
        if len(self._users) == self._setting.pool_adapters:
            self._users.popitem(last=False)
        self._users[adapter] = 0

    def report(self) -> Report:
        return Report(
            num_running=len(self._running),
            num_waiting=self.num_waiting,
            num_in_use=sum(1 for num_users in self._users.values() if num_users),
            holds=frozenset([self._prefixes[adapter] for adapter in (*self._users, *self._loading)]),
            is_draining=self.is_draining,
        )

    def sequence_seconds(self) -> float:
        """The number of running and waiting sequences, integrated over time until now."""
        now_s = self._clock()
        self._sequence_seconds += (len(self._running) + self.num_waiting) * (now_s - self._counted_s)
        self._counted_s = now_s
        return self._sequence_seconds

    def die(self) -> list[Request]:
        """Stop for good, and return all running and waiting requests."""
        self.sequence_seconds()
        lost = [*self._running.values(), *self._ready, *(one for cold in self._cold.values() for one in cold)]
        self.is_dead = True
        self._running.clear()
        self._ready.clear()
        self._cold.clear()
        self._num_cold = 0
        return lost

    def _load(self) -> None:
        for adapter in self._cold:
            if len(self._loading) == self._setting.parallel_loads:
                return
            if adapter in self._loading:
                continue
            if len(self._users) + len(self._loading) >= self._setting.pool_adapters and not self._evict():
                return
            self._loading.add(adapter)
            self.num_loads += 1
            load_s = self._random.uniform(self._setting.min_load_s, self._setting.max_load_s)
            self._after(load_s, lambda adapter=adapter: self._loaded(adapter))  # type: ignore[misc]

    def _evict(self) -> bool:
        for adapter, num_users in self._users.items():
            if not num_users:
                del self._users[adapter]
                return True
        return False

    def _loaded(self, adapter: int) -> None:
        if self.is_dead:
            return
        self._loading.discard(adapter)
        requests = self._cold.pop(adapter)
        self._num_cold -= len(requests)
        self._users[adapter] = len(requests)
        self._ready.extend(requests)
        self._load()
        self._run()

    def _run(self) -> None:
        while self._ready and len(self._running) < self._setting.capacity:
            request = self._ready.popleft()
            request.started_s = self._clock()
            self._running[id(request)] = request
            self._after(request.answer_s, lambda request=request: self._end(request))  # type: ignore[misc]

    def _end(self, request: Request) -> None:
        if self._running.get(id(request)) is not request:
            return
        self.sequence_seconds()
        del self._running[id(request)]
        self._users[request.adapter] -= 1
        self._ended(request)
        if self._cold:
            self._load()
        self._run()
