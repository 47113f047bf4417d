"""The measured cases as tables and as a JSON document."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.s_lora.figures import Figures, median_of

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
    table = Table(title=title)
    for heading in ("policy", "adapters", *columns.values()):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for one in found:
        figures = [_shown(name, one[part][name]) for name in columns]
        table.add_row(one["policy"], str(one["adapters"]), *figures)
    return table


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in SHARES:
        return f"{value:.1%}"
    return f"{value:.3f}" if name in RATIOS else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
