"""The engines of a Ray cluster as an application that Ray Serve's own configuration can name.

A Kubernetes operator for Ray deploys such a configuration (`serveConfigV2` of a RayService), so nobody has to call
`loramux cluster up`. The chart in platform/deploy/helm/ has an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.serve import Application

from loramux.admin.errors import StartRefused
from loramux.admin.server.extensions import load_extensions
from loramux.admin.server.settings import LOCAL_CLUSTER, Settings, SettingsError, load_settings
from loramux.admin.serving.cluster_deployment import plan_of
from loramux.admin.serving.serve import read_model
from loramux.platform.cluster.deployment import replicas

IN_CLUSTER = "127.0.0.1:0"
"""Stands for the cluster that calls the builder. It is never joined."""


def engines(args: Mapping[str, Any]) -> Application:
    """Build the application. `args` has settings by their names, such as `model` and `cluster_replicas`. Settings that
    are not in `args` are read from LORAMUX_* variables.

    Ray Serve calls this on any node of the cluster, and again when `args` have changed. `device` must not be `auto`,
    because this node may have no GPU, and `num_threads` must be the number of CPUs that one engine reserves. The model
    must be a directory that has the same path on every node. Raises StartRefused.
    """
    load_extensions()
    try:
        settings = load_settings(Settings, {"cluster": IN_CLUSTER, **args})
    except SettingsError as error:
        raise StartRefused(str(error)) from error
    if settings.cluster == LOCAL_CLUSTER:
        raise StartRefused("the cluster that runs this application is not local: remove cluster")
    if settings.num_threads is None:
        raise StartRefused("the engines run on other machines: set num_threads to the CPUs that one engine reserves")
    if settings.quantization is not None or not isinstance(settings.model, Path) or not settings.model.is_dir():
        raise StartRefused(
            "the engines read the model from a directory that has the same path on each machine: give the path of a "
            "model in Hugging Face format, and quantise it before"
        )
    _, config = read_model(settings, runs_here=False)
    return replicas(config, plan_of(settings, config))
