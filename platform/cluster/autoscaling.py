"""Decides how many replicas a cluster runs. Ray Serve calls `decide` in its controller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

TARGET_LOAD = 0.7
"""Part of a replica's sequence slots that is in use if there are as many replicas as needed."""
SHRINK_LOAD = 0.5
"""A replica is removed only if the others would then have at most this part of their slots in use."""


def num_replicas(current: int, work: float, capacity: float) -> int:
    """Return how many replicas `current` replicas with `work` running, waiting and loading sequences should become.

    `capacity` is the mean number of sequences that a replica runs at once. Between the two loads, the number stays the
    same, because a new replica starts without adapters. Ray Serve applies the limits and delays.
    """
    if capacity <= 0:
        return current
    if work > TARGET_LOAD * capacity * current:
        return math.ceil(work / (TARGET_LOAD * capacity))
    return min(current, max(1, math.ceil(work / (SHRINK_LOAD * capacity))))


def decide(context: Any) -> tuple[int, dict[str, Any]]:
    """A policy function of Ray Serve: return the number of replicas, and no state.

    It reads what `EngineReplica.record_autoscaling_stats` returns. Without reports, nothing changes.
    """
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    work, capacities = metrics.get("work", {}), metrics.get("capacity", {})
    if not work or not capacities:
        return context.target_num_replicas, {}
    capacity = sum(capacities.values()) / len(capacities)
    # Replicas that have not reported yet, such as new ones, take part of the work soon.
    return num_replicas(context.target_num_replicas, sum(work.values()), capacity), {}
