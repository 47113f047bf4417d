"""Three events: a replica dies, a replica joins, and a cold adapter suddenly becomes popular."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.routing.figures import Figures, measure, p99_wait_s
from benchmarks.routing.fleet import Fleet, MakePolicy
from benchmarks.routing.setting import Setting

PHASE_S = 30.0
"""Length in seconds of each phase: before the event, right after it, and later."""

BURST_LOAD = 0.2
"""Load of the cold adapter's requests, as a fraction of the fleet's capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Figures of the three phases, and additional figures of the event itself."""

    name: str
    setting: Setting
    before: Figures
    during: Figures
    after: Figures
    remarks: dict[str, float]


def replica_dies(setting: Setting, make_policy: MakePolicy) -> Scenario:
    def kill(fleet: Fleet) -> Callable[[], dict[str, float]]:
        num_cut = fleet.kill(f"replica-{setting.num_replicas - 1}")
        return lambda: {"streams_cut": num_cut}

    return _run("replica dies", setting, make_policy, kill)


def replica_joins(setting: Setting, make_policy: MakePolicy) -> Scenario:
    def join(fleet: Fleet) -> Callable[[], dict[str, float]]:
        newcomer = fleet.join(setting.num_replicas)
        others = [replica for replica in fleet.replicas.values() if replica is not newcomer]
        loads: list[float] = []

        def watch() -> None:
            mean = sum(replica.num_running + replica.num_waiting for replica in others) / len(others)
            loads.append((newcomer.num_running + newcomer.num_waiting) / mean)
            fleet.after(1.0, watch)

        fleet.after(1.0, watch)
        return lambda: {
            "load_over_mean_in_5_to_15_s": _mean(loads[5:15]),
            "load_over_mean_in_20_to_30_s": _mean(loads[20:30]),
            "load_over_mean_in_50_to_60_s": _mean(loads[50:60]),
            "highest_load_over_mean": round(max(loads), 2),
        }

    return _run("replica joins", setting, make_policy, join)


def cold_burst(setting: Setting, make_policy: MakePolicy) -> Scenario:
    def burst(fleet: Fleet) -> Callable[[], dict[str, float]]:
        first = len(fleet.submitted)
        adapter = setting.num_adapters - 1
        fleet.submit_stream(adapter, BURST_LOAD * setting.requests_per_s / setting.load, PHASE_S)

        def remarks() -> dict[str, float]:
            period = [one for one in fleet.submitted[first:] if one.arrived_s < fleet.now_s - PHASE_S]
            waits = {
                is_burst: p99_wait_s([one for one in period if (one.adapter == adapter) is is_burst], fleet.now_s)
                for is_burst in (True, False)
            }
            return {
                "burst_p99_wait_s": round(waits[True], 2),
                "others_p99_wait_s": round(waits[False], 2),
                "copies": sum(replica.holds(adapter) for replica in fleet.replicas.values()),
            }

        return remarks

    return _run("burst on a cold adapter", setting, make_policy, burst)


def _mean(loads: list[float]) -> float:
    return round(sum(loads) / len(loads), 2)


def _run(
    name: str, setting: Setting, make_policy: MakePolicy, event: Callable[[Fleet], Callable[[], dict[str, float]]]
) -> Scenario:
    fleet = Fleet(replace(setting, measure_s=PHASE_S), make_policy)
    fleet.run(setting.settle_s)
    before = measure(fleet, PHASE_S)
    remarks = event(fleet)
    during = measure(fleet, PHASE_S)
    after = measure(fleet, PHASE_S)
    fleet.check()
    return Scenario(name=name, setting=setting, before=before, during=during, after=after, remarks=remarks())
