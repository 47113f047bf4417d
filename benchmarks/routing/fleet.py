"""A discrete-event simulation of gateways and replicas."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable
from random import Random

from benchmarks.answers import CheckError
from benchmarks.routing.policies import Policy
from benchmarks.routing.replica import Report, Request, SimulatedReplica
from benchmarks.routing.setting import Setting
from loramux.platform.routing.views import ReplicaView, RoutingRequest, digest_prefix

MakePolicy = Callable[[Callable[[], float], Random], Policy]


class Gateway:
    """A policy, and the reports that this gateway has read. The replica `local_id` runs in the same server."""

    def __init__(self, policy: Policy, local_id: str, capacity: int, pool_adapters: int) -> None:
        self.policy = policy
        self._local_id = local_id
        self._capacity = capacity
        self._pool_adapters = pool_adapters
        self._seen: dict[str, tuple[Report, ReplicaView]] = {}

    def read(self, reports: dict[str, Report], now_s: float) -> None:
        self._seen = {
            replica_id: (
                before
                if (before := self._seen.get(replica_id)) and before[0] is report
                else (report, self._view(replica_id, report, now_s))
            )
            for replica_id, report in reports.items()
        }
        self._update()

    def lose(self, replica_id: str) -> None:
        """Forget a replica whose link has failed."""
        self._seen.pop(replica_id, None)
        self._update()

    def _update(self) -> None:
        self.policy.update([view for _, view in self._seen.values()])

    def _view(self, replica_id: str, report: Report, now_s: float) -> ReplicaView:
        return ReplicaView(
            id=replica_id,
            is_local=replica_id == self._local_id,
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            capacity=self._capacity,
            pages_free_fraction=1.0 - min(1.0, report.num_in_use / self._pool_adapters),
            is_draining=report.is_draining,
            holds=report.holds,
            since_s=now_s,
        )


class Fleet:
    """Gateways that route a Poisson stream of requests to replicas.

    Each replica reports every `report_s`, and each gateway reads the reports every `report_s`, at independent times. A
    view is therefore up to two periods old.
    """

    def __init__(self, setting: Setting, make_policy: MakePolicy) -> None:
        self.setting = setting
        self.now_s = 0.0
        self.replicas: dict[str, SimulatedReplica] = {}
        self.submitted: list[Request] = []
        # Number of requests that have ended or been cut.
        self._num_gone = 0
        self._random = Random(setting.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        digests = [hashlib.sha256(b"%d" % adapter).hexdigest() for adapter in range(setting.num_adapters)]
        self._adapters = {digest: adapter for adapter, digest in enumerate(digests)}
        self._prefixes = [digest_prefix(digest) for digest in digests]
        self._routing = [
            RoutingRequest(
                digest=digest, prefix_key=None, share_key="", weight=1, num_prompt_tokens=256, max_tokens=256
            )
            for digest in digests
        ]
        self._cumulative = list(itertools.accumulate(setting.popularity()))
        self._reports: dict[str, Report] = {}
        self._gateways = [
            Gateway(
                make_policy(self._clock, Random(setting.seed * 1000 + number)),
                f"replica-{number}",
                setting.capacity,
                setting.pool_adapters,
            )
            for number in range(setting.num_gateways)
        ]
        for number in range(setting.num_replicas):
            self.join(number)
        if setting.is_warm:
            self._fill_pools()
        for gateway in self._gateways:
            gateway.read(self._reports, self.now_s)
            self.after(self._random.uniform(0, setting.report_s), self._reading(gateway))
        self._arrive()

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = until_s

    def submit(self, adapter: int) -> Request:
        random, setting = self._random, self.setting
        request = Request(
            adapter=adapter,
            routing=self._routing[adapter],
            arrived_s=self.now_s,
            answer_s=random.uniform(setting.min_answer_s, setting.max_answer_s),
            gateway=random.randrange(setting.num_gateways),
        )
        self.submitted.append(request)
        self._route(request)
        return request

    def submit_stream(self, adapter: int, requests_per_s: float, seconds: float) -> None:
        """Add a Poisson stream of requests for one adapter."""
        until_s = self.now_s + seconds

        def arrive() -> None:
            if self.now_s < until_s:
                self.submit(adapter)
                self.after(self._random.expovariate(requests_per_s), arrive)

        arrive()

    def join(self, number: int) -> SimulatedReplica:
        setting = self.setting
        replica = SimulatedReplica(
            f"replica-{number}",
            setting,
            self._clock,
            self.after,
            Random(setting.seed * 1_000_000 + number),
            self._prefixes,
            self._ended,
        )
        self.replicas[replica.id] = replica
        self._reports[replica.id] = replica.report()

        def report() -> None:
            if not replica.is_dead:
                self._reports[replica.id] = replica.report()
                self.after(setting.report_s, report)

        self.after(self._random.uniform(0, setting.report_s), report)
        return replica

    def kill(self, replica_id: str) -> int:
        """Kill a replica and return the number of cut streams. Requests that have not started are routed to other
        replicas."""
        num_cut = 0
        del self._reports[replica_id]
        for request in self.replicas[replica_id].die():
            self._gateways[request.gateway].policy.note_ended(replica_id, request.routing)
            if request.started_s is None:
                self._route(request)
            else:
                num_cut += 1
        self._num_gone += num_cut
        return num_cut

    def check(self) -> None:
        """Raise CheckError if the running, waiting, ended and cut requests do not add up to all submitted requests."""
        num_present = sum(replica.num_running + replica.num_waiting for replica in self.replicas.values())
        if self._num_gone + num_present != len(self.submitted):
            raise CheckError(f"{len(self.submitted)} requests, {self._num_gone} gone, {num_present} present")

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Call `event` after `seconds` of simulated time."""
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), event))

    def _clock(self) -> float:
        return self.now_s

    def _arrive(self) -> None:
        self.submit(self._random.choices(range(self.setting.num_adapters), cum_weights=self._cumulative)[0])
        self.after(self._random.expovariate(self.setting.requests_per_s), self._arrive)

    def _route(self, request: Request) -> None:
        gateway = self._gateways[request.gateway]
        replica_id = gateway.policy.choose(request.routing)
        while self.replicas[replica_id].is_dead:
            gateway.lose(replica_id)
            replica_id = gateway.policy.choose(request.routing)
        request.replica_id = replica_id
        request.was_resident = False
        gateway.policy.note_started(replica_id, request.routing)
        self.replicas[replica_id].add(request)

    def _ended(self, request: Request) -> None:
        self._num_gone += 1
        self._gateways[request.gateway].policy.note_ended(request.replica_id, request.routing)

    def _reading(self, gateway: Gateway) -> Callable[[], None]:
        def read() -> None:
            gateway.read(self._reports, self.now_s)
            for prefetch in gateway.policy.prefetches():
                self.replicas[prefetch.replica_id].prefetch(self._adapters[prefetch.digest])
            self.after(self.setting.report_s, read)

        return read

    def _fill_pools(self) -> None:
        """Fill the pools as if each adapter had been requested once from an idle fleet, least popular first."""
        gateway = self._gateways[0]
        gateway.read(self._reports, self.now_s)
        for adapter in reversed(range(self.setting.num_adapters)):
            self.replicas[gateway.policy.choose(self._routing[adapter])].put(adapter)
        self._reports = {replica.id: replica.report() for replica in self.replicas.values()}
