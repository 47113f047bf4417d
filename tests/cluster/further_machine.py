"""Adds a machine to a local cluster, as Ray sees it, until standard input is closed.

`python -m tests.cluster.further_machine ADDRESS NUM_CPUS NUM_GPUS` prints a line once the machine belongs to the
cluster. `ray start` adds none to a cluster that listens on the loopback interface only.
"""

from __future__ import annotations

import sys

from loramux.admin.server.local_cluster import HOST, OBJECT_STORE_BYTES


def main(address: str, num_cpus: str, num_gpus: str) -> None:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters = RayParams(
        gcs_address=address,
        node_ip_address=HOST,
        num_cpus=int(num_cpus),
        num_gpus=int(num_gpus),
        object_store_memory=OBJECT_STORE_BYTES,
        include_log_monitor=False,
        node_manager_port=0,
        min_worker_port=0,
        max_worker_port=0,
    )
    parameters.dashboard_agent_listen_port = None
    node = Node(parameters, head=False, shutdown_at_exit=True)
    print("ready", flush=True)
    sys.stdin.read()
    node.kill_all_processes(check_alive=False, allow_graceful=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
