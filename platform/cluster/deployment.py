"""Deploys replicas on Ray Serve."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from loramux.engine.loop.config import EngineConfig
from loramux.platform.cluster.engine_replica import EngineReplica, ReplicaSettings
from loramux.platform.cluster.ray_connection import APP, DEPLOYMENT, ClusterUnavailable

MAX_CALLS = 10_000
"""Calls that a replica handles at once. Each gateway has one session and at most one further call. The engine, not Ray
Serve, limits requests, because a queue before the engine would not be fair between tenants.
"""
REPORT_PERIOD_S = 1.0
"""How often Ray Serve asks replicas for their state, in seconds."""
HEALTH_PERIOD_S, LOCAL_HEALTH_PERIOD_S = 2.0, 0.5
"""How often Ray Serve asks replicas whether they work, in seconds: in any cluster, and in one of this machine only. It
learns of a replica's death from the next answer.
"""
UPSCALE_DELAY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """How many replicas run, and what each of them needs."""

    num_replicas: int
    max_replicas: int | None = None
    """If set, the number of replicas grows and shrinks with the work, from `num_replicas` to this number."""
    downscale_delay_s: float = 300.0
    """How long fewer replicas must be enough before their number shrinks, in seconds."""
    num_cpus: float
    """CPUs that a replica reserves. 0 reserves none."""
    num_gpus: float
    drain_s: float
    """How long a replica that is being stopped may run its sequences, in seconds."""
    start_timeout_s: float
    step_timeout_s: float
    is_on_loopback: bool

    @property
    def reserved(self) -> dict[str, float]:
        """What a replica reserves on its machine, by Ray's names of resources."""
        return {name: amount for name, amount in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if amount}


def deploy(config: EngineConfig, plan: ReplicaPlan, command: tuple[str, ...] | None = None, app: str = APP) -> None:
    """Start the replicas, or replace them one after the other if their configuration has changed. Blocks until they
    run.

    `command` is the command line that starts an engine, or None for loramux's own engine.

    Raises ClusterUnavailable with the reason if they do not start.
    """
    # Gateways use handles. Without this, Ray Serve would start HTTP proxies.
    serve.start(proxy_location="Disabled")
    try:
        serve.run(replicas(config, plan, command), name=app, route_prefix=None)
    except RuntimeError as error:
        raise ClusterUnavailable(_failure(app, error)) from error


def missing_machine(plan: ReplicaPlan) -> str | None:
    """Say what no machine of the cluster has, or return None if a replica fits into one of them.

    Ray waits for such a machine, which a cluster that grows with its work may start.
    """
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(one.get(name, 0.0) >= amount for name, amount in plan.reserved.items()) for one in machines):
        return None
    needed = " and ".join(f"{amount:g} {name}{'s' * (amount != 1)}" for name, amount in plan.reserved.items())
    return f"no machine of the cluster has {needed}, which a replica reserves: Ray waits for one"


def replicas(config: EngineConfig, plan: ReplicaPlan, command: tuple[str, ...] | None = None) -> Application:
    """Return the deployment of the replicas, which is not running yet."""
    options: dict[str, Any] = {"num_replicas": plan.num_replicas}
    if plan.max_replicas is not None:
        options = {"autoscaling_config": autoscaling_config(plan, plan.max_replicas)}
    if config.tensor_parallel_size > 1 and plan.reserved:
        # A single bundle, because Ray shows a replica only the GPUs of its own bundle. The workers of its engine are
        # processes of the replica and see the same GPUs.
        options |= {"placement_group_bundles": [plan.reserved], "placement_group_strategy": "STRICT_PACK"}
    settings = msgspec.json.encode(
        ReplicaSettings(
            engine=config,
            start_timeout_s=plan.start_timeout_s,
            step_timeout_s=plan.step_timeout_s,
            is_on_loopback=plan.is_on_loopback,
            command=command,
        )
    )
    deployment = serve.deployment(
        EngineReplica,
        name=DEPLOYMENT,
        max_ongoing_requests=MAX_CALLS,
        health_check_period_s=LOCAL_HEALTH_PERIOD_S if plan.is_on_loopback else HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=plan.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus},
        request_router_config=RequestRouterConfig(
            request_router_class="loramux.platform.cluster.tunnel_router.TunnelRouter",
            request_routing_stats_period_s=REPORT_PERIOD_S,
        ),
        **options,
    )
    # Ray Serve replaces replicas of another version, and gives each call a version of its own unless it is given one.
    code_version = hashlib.sha256(version("loramux").encode() + settings).hexdigest()[:16]
    return deployment.options(version=code_version, _internal=True).bind(settings.decode())


def autoscaling_config(plan: ReplicaPlan, max_replicas: int) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=plan.num_replicas,
        max_replicas=max_replicas,
        upscale_delay_s=UPSCALE_DELAY_S,
        downscale_delay_s=plan.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function="loramux.platform.cluster.autoscaling:decide"),
    )


def remove(app: str = APP) -> None:
    """Stop the replicas, after the sequences that they run. Blocks."""
    serve.delete(app)


def _failure(app: str, error: RuntimeError) -> str:
    found = serve.status().applications.get(app)
    messages = [] if found is None else [one.message for one in found.deployments.values()] + [found.message]
    lines = [line.strip() for message in messages for line in message.splitlines() if "EngineStartError" in line]
    return f"the replicas do not start: {lines[-1] if lines else error}"
