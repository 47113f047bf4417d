"""Keeps a started process of Ray in reserve, which becomes the replica that replaces a dead one."""

from __future__ import annotations

RPC_TIMEOUT_S = 5.0
PRELOADED = {"RAY_preload_python_modules": "ray.serve._private.replica,loramux.platform.cluster.engine_replica"}
"""Ray's node manager reads it. Its processes import these modules, which takes seconds, before they are needed."""


def start_spare() -> None:
    """Ask Ray to start a process on this machine that runs nothing yet. Blocks for a moment.

    Ray starts such processes when its node starts, and gives them to the next actors. It does not start others in their
    place, and has no public call for it.
    """
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

    own = ray.get_runtime_context().get_node_id()
    (node,) = [one for one in ray.nodes() if one["NodeID"] == own]
    with init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        request = node_manager_pb2.PrestartWorkersRequest(num_workers=1)
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=RPC_TIMEOUT_S)
