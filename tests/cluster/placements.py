"""Prints the placement groups of a cluster as JSON: `python -m tests.cluster.placements ADDRESS`.

With a further argument, an engine's configuration as JSON, it first replaces the replicas by one that reserves two
CPUs and, though its engine runs on the CPU, two GPUs.
"""

from __future__ import annotations

import json
import sys

import msgspec

from loramux.engine.loop.config import EngineConfig
from loramux.platform.cluster.ray_connection import connect, disconnect


def main(address: str, configuration: str | None = None) -> None:
    connect(address)
    import ray
    from ray.util import placement_group_table

    if configuration is not None:
        from loramux.platform.cluster.deployment import ReplicaPlan, deploy

        config = msgspec.json.decode(configuration, type=EngineConfig)
        times = {"drain_s": 5.0, "start_timeout_s": 120.0, "step_timeout_s": 60.0}
        deploy(config, ReplicaPlan(num_replicas=1, num_cpus=2.0, num_gpus=2.0, is_on_loopback=True, **times))
    machines = {one["NodeID"]: one["Resources"] for one in ray.nodes()}
    groups = [
        {
            "strategy": one["strategy"],
            "bundles": list(one["bundles"].values()),
            "cpus": [machines[node]["CPU"] for node in one["bundles_to_node_id"].values()],
        }
        for one in placement_group_table().values()
        if one["state"] == "CREATED"
    ]
    disconnect()
    print(json.dumps(groups))


if __name__ == "__main__":
    main(*sys.argv[1:])
