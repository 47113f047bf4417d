"""Figures of one window (throughput, latencies, loads and evictions), and their medians over the rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.harness import finite, percentile
from benchmarks.s_lora.run import Window
from benchmarks.tables import table

PERCENTILES = (50, 90, 99)
THROUGHPUT_COLUMNS = {
    "tokens_s": "tokens/s",
    "over_fewest": "over fewest",
    "over_fewest_by_round": "by round",
    "tokens_cpu_s": "tokens/CPU s",
    "requests_s": "req/s",
    "adapter_hit_rate": "adapter hits",
    "loads_per_request": "loads/req",
    "loads": "loads",
    "evictions": "evictions",
    "preemptions": "preempted",
    "prefix_hit_rate": "prefix hits",
}
LATENCY_COLUMNS = {
    "rate": "req/s",
    "ttft_ms_p50": "TTFT p50 ms",
    "ttft_ms_p90": "p90",
    "ttft_ms_p99": "p99",
    "tpot_ms_p50": "TPOT p50 ms",
    "tpot_ms_p90": "p90",
    "tpot_ms_p99": "p99",
    "goodput_requests_s": "goodput/s",
    "good_share": "good",
    "adapter_hit_rate": "adapter hits",
    "unanswered": "unanswered",
}
RATIOS = frozenset({"over_fewest", "over_fewest_by_round"})
SHARES = frozenset({"adapter_hit_rate", "prefix_hit_rate", "good_share"})

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
        medians[name] = finite(statistics.median_high(math.inf if value is None else value for value in values))
    return medians


def _percentiles(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {f"{name}_p{percent}": finite(percentile(values, percent)) for percent in PERCENTILES}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True, slots=True)
class Case:
    """The figures of each round for one policy and one number of adapters."""

    policy: str
    num_adapters: int
    throughput: list[Figures]
    latency: list[Figures]


def summaries(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Medians over the rounds.

    `over_fewest` is throughput relative to the same policy with the fewest adapters. `over_fewest_by_round` is the
    median of the ratios within each round, which excludes drift between rounds.
    """
    fewest = min(case.num_adapters for case in cases)
    found: list[dict[str, Any]] = []
    for case in cases:
        own = median_of(case.throughput)
        base = next(one for one in cases if (one.policy, one.num_adapters) == (case.policy, fewest))
        own["over_fewest"] = _ratio(own, median_of(base.throughput))
        ratios = [_ratio(*pair) for pair in zip(case.throughput, base.throughput, strict=True)]
        known = [ratio for ratio in ratios if ratio is not None]
        own["over_fewest_by_round"] = statistics.median(known) if len(known) == len(ratios) else None
        found.append(
            {
                "policy": case.policy,
                "adapters": case.num_adapters,
                "throughput": own,
                "latency": median_of(case.latency),
                "rounds": {"throughput": case.throughput, "latency": case.latency},
            }
        )
    return found


def _ratio(figures: Figures, of_fewest: Figures) -> float | None:
    tokens_s, compared = figures["tokens_s"], of_fewest["tokens_s"]
    return tokens_s / compared if tokens_s and compared else None


def tables(found: Sequence[dict[str, Any]], throughput_title: str, latency_title: str) -> list[Table]:
    return [
        _table(found, "throughput", throughput_title, THROUGHPUT_COLUMNS),
        _table(found, "latency", latency_title, LATENCY_COLUMNS),
    ]


def _table(found: Sequence[dict[str, Any]], part: str, title: str, columns: dict[str, str]) -> Table:
    rows = [
        (one["policy"], str(one["adapters"]), *(_shown(name, one[part][name]) for name in columns)) for one in found
    ]
    return table(title, ("policy", "adapters", *columns.values()), rows)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in SHARES:
        return f"{value:.1%}"
    return f"{value:.3f}" if name in RATIOS else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
