"""Joins a Ray cluster from this process. Import other modules that need Ray only after `check_ray`."""

from __future__ import annotations

import contextlib
import logging
import socket
from importlib.metadata import PackageNotFoundError, version
from typing import Any

RAY_VERSION = "2.60.0"
"""The only version that is supported, because the classes with which Ray Serve is extended change between versions."""
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes a cluster of one machine listen on 127.0.0.1 only, as Ray does on Windows and macOS. Otherwise, its ports are
open on every interface.
"""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
EQUAL_PRIORITY = {"RAY_worker_niceness": "0"}
"""Ray's processes that start replicas read it. Otherwise, replicas and their engines run with niceness 15."""
NAMESPACE = "loramux"
APP = "loramux"
"""The application of Ray Serve that runs the replicas."""
DEPLOYMENT = "engine"
"""The deployment of the replicas in the application."""
PROBE_TIMEOUT_S = 5.0


class ClusterUnavailable(Exception):
    """The cluster cannot be used. The message says why, in one sentence."""


def check_ray() -> None:
    """Raise ClusterUnavailable unless this process can import the supported version of Ray."""
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise ClusterUnavailable(
            f"a cluster needs Ray {RAY_VERSION}: install loramux with the 'cluster' extra"
        ) from None
    if found != RAY_VERSION:
        raise ClusterUnavailable(
            f"a cluster needs Ray {RAY_VERSION}, but Ray {found} is installed: install loramux with the 'cluster' extra"
        )


def connect(address: str) -> None:
    """Join the cluster whose head is at `address` (HOST:PORT) as a client. Blocks. Raises ClusterUnavailable.

    A process can join only one cluster. Ray reads its environment when it is imported.
    """
    check_ray()
    host, _, port = address.rpartition(":")
    try:
        # Ray itself waits for more than a minute.
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ClusterUnavailable(f"no cluster answers at {address}: {reason}") from None
    import ray
    from ray import exceptions

    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False, logging_level="ERROR"
        )
    except exceptions.AuthenticationError:
        raise ClusterUnavailable(
            f"the cluster at {address} refuses this process's token: set RAY_AUTH_TOKEN_PATH"
        ) from None
    except (ConnectionError, TimeoutError, ValueError, RuntimeError, OSError) as error:
        raise ClusterUnavailable(_reason(address, error)) from error
    logging.getLogger("ray").setLevel(logging.WARNING)


def disconnect() -> None:
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()


def _reason(address: str, error: Exception) -> str:
    text = str(error)
    if "Version mismatch" in text:
        return f"the cluster at {address} runs another version of Ray or Python than this process: use the same on both"
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return f"no cluster answers at {address}: {first}"


def application_status(app: str) -> Any:
    """Return Ray Serve's status of an application, or None if it does not run. Blocks. Raises ClusterUnavailable."""
    from ray import serve

    try:
        return serve.status().applications.get(app)
    except Exception as error:
        raise ClusterUnavailable(f"the cluster's controller does not answer: {error}") from error
