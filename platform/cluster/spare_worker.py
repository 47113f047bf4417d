"""Starts a process of Ray in reserve, which becomes the replica that replaces a dead one."""

from __future__ import annotations

import os

RPC_TIMEOUT_S = 5.0
PRELOADED = {"RAY_preload_python_modules": "ray.serve._private.replica,zmq.asyncio,structlog,msgspec"}
"""Ray's node manager reads it. Its processes import these modules, which takes seconds, before they are needed. Modules
of loramux are not among them, because loramux may be upgraded before the process becomes a replica.
"""


def start_spare() -> None:
    """Ask Ray to start a process on this machine that runs nothing yet, unless there is one. Blocks for a moment.

    Ray starts such processes when its node starts, and gives them to the next actors. It does not start others in their
    place, and has no public call for it. Replicas call this function once, after their engine has started: a spare that
    is killed is missing until then, and of two replicas that die together, only one is replaced by a spare.
    """
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

    if _has_spare():
        return
    own = ray.get_runtime_context().get_node_id()
    (node,) = [one for one in ray.nodes() if one["NodeID"] == own]
    address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    # Without these options, the call would go through the environment's HTTP proxy.
    with init_grpc_channel(address, GLOBAL_GRPC_OPTIONS) as channel:
        request = node_manager_pb2.PrestartWorkersRequest(num_workers=1)
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=RPC_TIMEOUT_S)


def _has_spare() -> bool:
    """Whether a process of this process's node manager runs nothing yet. Ray names processes by what they run."""
    # Ray brings it along.
    import psutil

    started = psutil.process_iter(["ppid", "cmdline"])
    names = [" ".join(one.info["cmdline"] or ()) for one in started if one.info["ppid"] == os.getppid()]
    return any(name.startswith("ray::IDLE") or "default_worker.py" in name for name in names)
