"""Figures of one window: throughput, latencies, and the pool's loads and evictions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.s_lora.run import Window

PERCENTILES = (50, 90, 99)

Figures = dict[str, float | None]
"""Figures by name, with the unit in the name. A figure that is infinite or was not measured is None."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits that a request must meet to count towards goodput, in seconds."""

    ttft_s: float
    tpot_s: float


def pool_figures(window: Window) -> Figures:
    loads = window.counted("num_adapter_loads")
    cached, computed = window.counted("cached_tokens"), window.counted("prompt_tokens")
    return {
        "adapter_hit_rate": _share(sum(one.was_resident for one in window.journeys), len(window.journeys)),
        # Above 1, some adapters were evicted before the requests waiting for them could run.
        "loads_per_request": _share(loads, window.num_first_tokens),
        "loads": loads,
        "evictions": window.counted("num_adapter_evictions"),
        "preemptions": window.counted("num_preemptions"),
        "prefix_hit_rate": _share(cached, cached + computed),
        "steps_s": window.counted("num_steps") / window.seconds,
    }


def throughput_figures(window: Window) -> Figures:
    return {
        "tokens_s": window.num_tokens / window.seconds,
        "tokens_cpu_s": window.num_tokens / window.cpu_s if window.cpu_s else None,
        "requests_s": window.num_finished / window.seconds,
        "fewest_sequences": window.fewest_sequences,
        **pool_figures(window),
    }


def latency_figures(window: Window, goal: Goal) -> Figures:
    journeys = window.journeys
    good = sum(one.ttft_s <= goal.ttft_s and one.tpot_s <= goal.tpot_s for one in journeys)
    return {
        "requests": len(journeys),
        "unanswered": sum(one.end_s == math.inf for one in journeys),
        **_percentiles("ttft_ms", [one.ttft_s * 1e3 for one in journeys]),
        **_percentiles("tpot_ms", [one.tpot_s * 1e3 for one in journeys]),
        "goodput_requests_s": good / window.seconds,
        "good_share": _share(good, len(journeys)),
        **pool_figures(window),
    }


def median_of(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median, or None if it is infinite in at least half of the rounds."""
    medians: Figures = {}
    for name in rounds[0]:
        values = (one[name] for one in rounds)
        medians[name] = _finite(statistics.median_high(math.inf if value is None else value for value in values))
    return medians


def _percentiles(name: str, values: Sequence[float]) -> dict[str, Any]:
    # Use the higher of two neighbours: a number and infinity cannot be interpolated.
    found = np.percentile(values, PERCENTILES, method="higher").tolist() if values else [math.inf] * len(PERCENTILES)
    return {f"{name}_p{percent}": _finite(value) for percent, value in zip(PERCENTILES, found, strict=True)}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
