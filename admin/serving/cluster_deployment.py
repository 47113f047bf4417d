"""The engines of a Ray cluster: `loramux cluster up`, `status` and `down`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from loramux.admin.errors import StartRefused
from loramux.admin.server.data_directory import DataDirectory, make_private
from loramux.admin.server.extensions import load_extensions
from loramux.admin.server.gguf_base import with_model_directory
from loramux.admin.server.local_cluster import LocalCluster
from loramux.admin.server.logs import configure_logs
from loramux.admin.server.pulled_model import local_model
from loramux.admin.server.quantized_base import quantize_base
from loramux.admin.server.settings import LOCAL_CLUSTER, ClusterSettings, Settings
from loramux.admin.serving.cluster import ClusterPlace
from loramux.admin.serving.serve import read_model
from loramux.engine.loop.config import EngineConfig
from loramux.platform.cluster.ray_connection import (
    APP,
    QUIET,
    ClusterUnavailable,
    application_status,
    check_ray,
    connect,
    disconnect,
)
from loramux.platform.engine_link.local_engine import Supervision

if TYPE_CHECKING:
    from loramux.platform.cluster.deployment import ReplicaPlan


def bring_up(settings: Settings, command: tuple[str, ...] | None = None) -> str:
    """Start the local cluster, if the setting `cluster` asks for it, and start or replace the replicas. Blocks until
    they run. Returns the cluster's address. Raises StartRefused.

    `command` is the command line that starts an engine, or None for loramux's own engine.
    """
    configure_logs(settings.log_format)
    load_extensions()
    try:
        check_ray()
        with ExitStack() as stack:
            settings = with_model_directory(stack.enter_context(local_model(settings)))
            _, config = read_model(settings)
            make_private(settings.data_dir)
            directory = DataDirectory(settings.data_dir)
            if settings.quantization is not None:
                base = quantize_base(config, directory.quantized.absolute(), settings.quantization)
                config = msgspec.structs.replace(config, quantized_dir=str(base.directory))
            if settings.cluster == LOCAL_CLUSTER:
                import torch

                num_gpus = torch.cuda.device_count()
                num_replicas = settings.cluster_max_replicas or settings.cluster_replicas
                num_needed = num_replicas * config.tensor_parallel_size
                if config.device == "cuda" and num_needed > num_gpus:
                    raise StartRefused(
                        f"{num_replicas} replicas need {num_needed} GPUs, but this machine has {num_gpus}"
                    )
                LocalCluster(directory.cluster).start(num_gpus)
            place = ClusterPlace.of(settings)
            _join(place)
            try:
                _deploy(settings, config, command)
            finally:
                disconnect()
    except ClusterUnavailable as error:
        raise StartRefused(str(error)) from error
    return place.address


def _join(place: ClusterPlace) -> None:
    """Join the cluster from this process. Raises ClusterUnavailable."""
    # Ray reads its environment when it is imported.
    os.environ.update({**QUIET, **place.environment})
    connect(place.address)


def _deploy(settings: Settings, config: EngineConfig, command: tuple[str, ...] | None) -> None:
    from loramux.platform.cluster.deployment import deploy, missing_machine

    plan = plan_of(settings, config)
    if (missing := missing_machine(plan)) is not None:
        print(missing, flush=True)
    deploy(config, plan, command)


def plan_of(settings: Settings, config: EngineConfig) -> ReplicaPlan:
    """Return how many replicas the settings ask for, and what each needs. Imports Ray."""
    from loramux.platform.cluster.deployment import ReplicaPlan

    return ReplicaPlan(
        num_replicas=settings.cluster_replicas,
        max_replicas=settings.cluster_max_replicas,
        downscale_delay_s=settings.cluster_downscale_delay_s,
        # Replicas of a local cluster share its CPUs.
        num_cpus=0.0 if settings.cluster == LOCAL_CLUSTER else float(config.num_threads),
        num_gpus=float(config.tensor_parallel_size) if config.device == "cuda" else 0.0,
        drain_s=settings.drain_s,
        start_timeout_s=Supervision().start_timeout_s,
        step_timeout_s=settings.engine_step_timeout_s,
        is_on_loopback=settings.cluster == LOCAL_CLUSTER,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    address: str
    state: str
    """Ray Serve's status of the application, or `stopped` if there is none."""
    message: str
    replicas: Mapping[str, int]
    """Number of replicas, by Ray Serve's name of their state."""


def read_status(settings: ClusterSettings) -> ClusterStatus:
    """Ask the cluster for the state of its replicas. Blocks. Raises StartRefused."""
    try:
        place = ClusterPlace.of(settings)
        _join(place)
        try:
            found = application_status(APP)
        finally:
            disconnect()
    except ClusterUnavailable as error:
        raise StartRefused(str(error)) from error
    if found is None:
        return ClusterStatus(address=place.address, state="stopped", message="", replicas={})
    deployments = list(found.deployments.values())
    replicas = {str(state): number for one in deployments for state, number in one.replica_states.items()}
    message = found.message or next((one.message for one in deployments if one.message), "")
    return ClusterStatus(address=place.address, state=str(found.status.value), message=message, replicas=replicas)


def take_down(settings: ClusterSettings) -> str:
    """Stop the replicas, and the cluster if it is local. Return a sentence about what was done. Blocks.

    Raises StartRefused.
    """
    if settings.cluster == LOCAL_CLUSTER:
        # Its end also ends the replicas.
        was_up = LocalCluster(DataDirectory(settings.data_dir).cluster).stop()
        return "the cluster was stopped" if was_up else "no cluster was running"
    try:
        _join(ClusterPlace.of(settings))
        try:
            from loramux.platform.cluster.deployment import remove

            remove()
        finally:
            disconnect()
    except ClusterUnavailable as error:
        raise StartRefused(str(error)) from error
    return "the replicas were stopped; the cluster goes on"
