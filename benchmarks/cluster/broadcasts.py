"""Counts the bytes that Ray Serve would send to the gateways of the simulated fleet to tell them who holds what.

The fleet is that of benchmarks/routing, with 50 replicas. Each replica writes the report that a replica of a cluster
writes. As in Ray Serve, the controller reads every report once per second, and ten times per second sends the list of
all replicas, with their reports, to every gateway if a report has changed. The list is the one that Ray Serve sends,
pickled as Ray pickles it. The figures do not depend on the machine, and equal seeds give equal figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.cluster.environment import enter_environment
from benchmarks.harness import begin, new_parser, reports_failure
from benchmarks.routing.fleet import Fleet
from benchmarks.routing.policies import POLICIES
from benchmarks.routing.replica import Report, SimulatedReplica
from benchmarks.routing.setting import Setting
from benchmarks.tables import table
from loramux.engine.protocol.messages import PROTOCOL, ResidentAdapter, Stats
from loramux.platform.cluster.replica_report import CoarseState, HeldState, ReplicaIdentity, as_values

LOOP_S = 0.1
"""Interval, in seconds, of Ray Serve's control loop, which sends changes."""
STATS = Stats(
    call_id="",
    num_steps=0,
    num_running=0,
    num_waiting=0,
    num_pages=0,
    num_free_pages=0,
    num_kv_pages=0,
    num_adapter_pages=0,
    num_prefix_pages=0,
    prompt_tokens=0,
    completion_tokens=0,
    cached_tokens=0,
    num_adapter_loads=0,
    num_adapter_evictions=0,
    num_preemptions=0,
    mixed_steps=0,
    max_adapters_in_step=0,
)


class Controller:
    """Reads the reports of a fleet's replicas, and counts what it would send."""

    def __init__(self, fleet: Fleet, setting: Setting) -> None:
        self._fleet = fleet
        self._setting = setting
        self._states = {name: CoarseState(identity(setting, name)) for name in fleet.replicas}
        self._reports: dict[str, HeldState] = {}
        self._is_changed = False
        self.num_changes = 0
        self.num_sent = 0
        self.num_bytes = 0
        for number, replica in enumerate(fleet.replicas.values()):
            fleet.after(setting.report_s * number / len(fleet.replicas), lambda replica=replica: self._read(replica))  # type: ignore[misc]
        fleet.after(LOOP_S, self._loop)

    def _read(self, replica: SimulatedReplica) -> None:
        held = self._states[replica.id].observe(statistics(replica.report(), self._setting))
        if held != self._reports.get(replica.id):
            self._reports[replica.id] = held
            self._is_changed = True
            self.num_changes += 1
        self._fleet.after(self._setting.report_s, lambda: self._read(replica))

    def _loop(self) -> None:
        if self._is_changed:
            self._is_changed = False
            self.num_sent += 1
            self.num_bytes += len(message(self._setting, self._reports))
        self._fleet.after(LOOP_S, self._loop)


def identity(setting: Setting, name: str) -> ReplicaIdentity:
    return ReplicaIdentity(
        base="0" * 64,
        base_id="0" * 64,
        version="0.1.0",
        protocol=PROTOCOL,
        capacity=setting.capacity,
        num_pages=setting.pool_adapters,
        host=f"ip-10-0-0-{name.rpartition('-')[2]}.internal",
    )


def statistics(report: Report, setting: Setting) -> Stats:
    """The statistics of an engine whose adapters have one page each."""
    adapters = tuple(
        ResidentAdapter(digest=f"{prefix:016x}", slot=slot, num_pages=1, num_users=1)
        for slot, prefix in enumerate(report.holds)
    )
    return msgspec.structs.replace(
        STATS,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        num_pages=setting.pool_adapters,
        num_free_pages=max(0, setting.pool_adapters - report.num_in_use),
        adapters=adapters,
    )


def message(setting: Setting, reports: dict[str, HeldState]) -> bytes:
    """What Ray Serve's controller answers to a gateway that waits for changes."""
    from ray import cloudpickle
    from ray.serve._private.common import DeploymentID, DeploymentTargetInfo, ReplicaID, RunningReplicaInfo
    from ray.serve._private.long_poll import LongPollNamespace, UpdatedObject

    deployment = DeploymentID(name="engine", app_name="loramux")
    replicas = [
        RunningReplicaInfo(
            replica_id=ReplicaID(unique_id=f"{number:08d}", deployment_id=deployment),
            node_id=f"{number:056x}",
            node_ip=f"10.0.0.{number}",
            availability_zone=None,
            actor_name=f"SERVE_REPLICA::loramux#engine#{number:08d}",
            max_ongoing_requests=10_000,
            routing_stats=as_values(held),
            replica_metadata=as_values(identity(setting, name)),
            port=40_000 + number,
        )
        for number, (name, held) in enumerate(reports.items())
    ]
    targets = DeploymentTargetInfo(is_available=True, running_replicas=replicas)
    key = (LongPollNamespace.DEPLOYMENT_TARGETS, deployment)
    return bytes(cloudpickle.dumps({key: UpdatedObject(targets, 1, 0.0)}))


def count(setting: Setting) -> dict[str, Any]:
    fleet = Fleet(setting, POLICIES["router"])
    fleet.run(setting.settle_s)
    controller = Controller(fleet, setting)
    # The first reports are all new.
    fleet.run(2 * setting.report_s)
    before = controller.num_changes, controller.num_sent, controller.num_bytes
    fleet.run(setting.measure_s)
    fleet.check()
    changes, sent, num_bytes = (
        now - then
        for now, then in zip((controller.num_changes, controller.num_sent, controller.num_bytes), before, strict=True)
    )
    return {
        "setting": dataclasses.asdict(setting),
        "changes_per_s": round(changes / setting.measure_s, 1),
        "messages_per_s": round(sent / setting.measure_s, 1),
        "message_bytes": round(num_bytes / max(1, sent)),
        "bytes_per_s_and_gateway": round(num_bytes / setting.measure_s),
        "bytes_per_s": round(num_bytes * setting.num_gateways / setting.measure_s),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("cluster.broadcasts", __doc__, is_timed=False)
    add = parser.add_argument
    defaults = Setting()
    add("--replicas", type=int, nargs="+", default=[3, 10, defaults.num_replicas])
    add("--load", type=float, nargs="+", default=[0.2, 0.7, 0.9], help="fractions of the fleet's capacity")
    add("--zipf", type=float, default=defaults.zipf)
    add("--gateways", type=int, default=defaults.num_gateways)
    add("--measure-s", type=float, default=60.0, help="simulated seconds measured")
    return parser.parse_args(argv)


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    enter_environment("benchmarks.cluster.broadcasts", sys.argv[1:] if argv is None else argv)
    run = begin(arguments)
    rows = []
    base = Setting(zipf=arguments.zipf, num_gateways=arguments.gateways, measure_s=arguments.measure_s)
    for num_replicas in arguments.replicas:
        # As many adapters for each replica as in the largest fleet.
        num_adapters = base.num_adapters * num_replicas // base.num_replicas
        for load in arguments.load:
            fleet = dataclasses.replace(base, num_replicas=num_replicas, num_adapters=num_adapters, load=load)
            rows.append(count(fleet))
    headings = ("replicas", "load", "changes/s", "messages/s", "bytes of one", "KB/s per gateway", "KB/s")
    shown = [
        (
            str(row["setting"]["num_replicas"]),
            f"{row['setting']['load']:.0%}",
            f"{row['changes_per_s']:.1f}",
            f"{row['messages_per_s']:.1f}",
            str(row["message_bytes"]),
            f"{row['bytes_per_s_and_gateway'] / 1000:.0f}",
            f"{row['bytes_per_s'] / 1000:.0f}",
        )
        for row in rows
    ]
    run.console.print(table(f"reports to {arguments.gateways} gateways", headings, shown))
    run.write({"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
