"""Starts a local Ray cluster and what runs in it, and exits: `python -m benchmarks.cluster.deployer DOCUMENT`.

DOCUMENT is a Deployment as JSON. Ray can join only one cluster per process, and reads its settings when it is imported.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from benchmarks.cluster.served_gateway import ServedGateway, read_settings
from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.local_cluster import HOST, LocalCluster
from loramux.admin.server.settings import LOCAL_CLUSTER
from loramux.admin.serving.cluster_deployment import bring_up
from loramux.admin.serving.serve import read_model
from loramux.engine.loop.config import EngineConfig
from loramux.platform.cluster.ray_connection import APP, QUIET, connect, disconnect

SESSIONS, PROXIED, PLAIN, MULTIPLEXED = "sessions", "proxied", "plain", "multiplexed"
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
MAX_CALLS = 10_000


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` says what runs: replicas of loramux alone, the same with a gateway behind Ray Serve's proxy at `port`, or
    replicas that Ray Serve calls once for each request, by its default router or by `multiplexed`.
    """

    kind: str
    settings: dict[str, Any]
    gateway: dict[str, Any] = {}
    """Settings of the gateway behind the proxy."""
    command: tuple[str, ...]
    """The command line that starts an engine."""
    num_replicas: int
    num_slots: int
    port: int = 0


def main(document: str) -> None:
    told = msgspec.json.decode(document, type=Deployment)
    settings = read_settings({**told.settings, "cluster_replicas": told.num_replicas})
    if told.kind == SESSIONS:
        bring_up(settings.model_copy(update={"cluster": LOCAL_CLUSTER}), told.command)
        return
    local = LocalCluster(DataDirectory(settings.data_dir).cluster)
    head = local.start(0)
    os.environ.update({**QUIET, **local.environment})
    connect(head.address)
    _, config = read_model(settings)
    if told.kind == PROXIED:
        _deploy_gateway(told, config)
    else:
        _deploy_plain(told, config)
    disconnect()


def _deploy_gateway(told: Deployment, config: EngineConfig) -> None:
    from ray import serve

    from loramux.platform.cluster.deployment import ReplicaPlan, replicas

    serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": told.port})
    plan = ReplicaPlan(
        num_replicas=told.num_replicas,
        num_cpus=0.0,
        num_gpus=0.0,
        drain_s=1.0,
        start_timeout_s=60.0,
        step_timeout_s=60.0,
        is_on_loopback=True,
    )
    # HAProxy takes no deployment with a router of its own at the head of an application, so the gateway is the head.
    engines = replicas(config, plan, told.command)
    gateway = serve.deployment(
        serve.ingress()(ServedGateway),
        name="gateway",
        max_ongoing_requests=MAX_CALLS,
        ray_actor_options={"num_cpus": 0},
    )
    serve.run(gateway.bind(msgspec.json.encode(told.gateway).decode(), engines), name=APP, route_prefix="/")


def _deploy_plain(told: Deployment, config: EngineConfig) -> None:
    from ray import serve

    from benchmarks.cluster.plain_replica import PlainReplica, multiplexed

    replica = multiplexed(told.num_slots) if told.kind == MULTIPLEXED else PlainReplica
    deployment = serve.deployment(
        replica,
        name="engine",
        num_replicas=told.num_replicas,
        max_ongoing_requests=MAX_CALLS,
        ray_actor_options={"num_cpus": 0},
    )
    serve.start(proxy_location="Disabled")
    serve.run(deployment.bind(msgspec.json.encode(config).decode(), told.command), name=APP, route_prefix=None)


if __name__ == "__main__":
    main(sys.argv[1])
