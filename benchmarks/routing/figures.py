"""Figures of a simulated fleet, and the best hit rate of any fixed placement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.routing.fleet import Fleet
from benchmarks.routing.replica import Request
from benchmarks.routing.setting import Setting

MIN_HIT_RATE = 0.95
MAX_IMBALANCE = 1.35
"""The goals: lowest hit rate and highest imbalance."""

WINDOW_S = 10.0
"""Length of the windows of `imbalance_10_s`, in seconds."""

MAX_GROWTH = 0.1
"""Growth of the queues, relative to the sequence slots, above which a run diverges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a fleet over a period.

    `hit_rate` is the share of the period's requests that found their adapter in the replica's pool. `imbalance` is the
    highest load of a replica divided by the mean load, where the load is the average number of running and waiting
    sequences. `imbalance_10_s` is the median of the same ratio over windows of ten seconds. `p99_wait_s` is the p99 of
    the time from arrival to a sequence slot, including loads. `growth` is the increase in the number of waiting
    requests divided by the number of sequence slots.
    """

    hit_rate: float
    imbalance: float
    imbalance_10_s: float
    p99_wait_s: float
    loads_per_s: float
    growth: float

    @property
    def is_diverging(self) -> bool:
        return self.growth > MAX_GROWTH

    @property
    def meets_goals(self) -> bool:
        return self.hit_rate >= MIN_HIT_RATE and self.imbalance <= MAX_IMBALANCE and not self.is_diverging


def measure(fleet: Fleet, seconds: float) -> Figures:
    replicas = [replica for replica in fleet.replicas.values() if not replica.is_dead]
    first = len(fleet.submitted)
    num_loads = sum(replica.num_loads for replica in replicas)
    num_waiting = sum(replica.num_waiting for replica in replicas)
    begin_s = fleet.now_s
    work = [[replica.sequence_seconds() for replica in replicas]]
    while fleet.now_s < begin_s + seconds - 1e-6:
        fleet.run(min(WINDOW_S, begin_s + seconds - fleet.now_s))
        work.append([replica.sequence_seconds() for replica in replicas])
    windows = sorted(_imbalance(before, after) for before, after in pairwise(work))
    grown = sum(replica.num_waiting for replica in replicas) - num_waiting
    requests = fleet.submitted[first:]
    return Figures(
        hit_rate=round(sum(request.was_resident for request in requests) / len(requests), 4),
        imbalance=round(_imbalance(work[0], work[-1]), 3),
        imbalance_10_s=round(windows[len(windows) // 2], 3),
        p99_wait_s=round(p99_wait_s(requests, fleet.now_s), 2),
        loads_per_s=round((sum(replica.num_loads for replica in replicas) - num_loads) / seconds, 1),
        growth=round(grown / (len(replicas) * fleet.setting.capacity), 3),
    )


def p99_wait_s(requests: list[Request], now_s: float) -> float:
    """The p99 of the requests' waiting times. Requests that are still waiting count with their time so far."""
    waits = sorted((now_s if one.started_s is None else one.started_s) - one.arrived_s for one in requests)
    return waits[len(waits) * 99 // 100]


def best_hit_rate(setting: Setting) -> float:
    """The highest hit rate of any fixed placement whose imbalance meets the goal.

    The placement is based on the true popularity. An adapter whose load exceeds the limit of one replica needs several
    copies, and every copy takes a place in a pool. Adapters are placed in order of popularity until all places are
    taken. Requests for all other adapters miss.
    """
    num_places = setting.num_replicas * setting.pool_adapters
    allowed = MAX_IMBALANCE / setting.num_replicas
    served = 0.0
    for part in setting.popularity():
        num_copies = math.ceil(part / allowed)
        if num_copies > num_places:
            break
        num_places -= num_copies
        served += part
    return round(served, 4)


def _imbalance(before: list[float], after: list[float]) -> float:
    work = [late - early for early, late in zip(before, after, strict=True)]
    return max(work) * len(work) / sum(work)
