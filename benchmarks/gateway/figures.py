"""Figures of one load: rates, latencies, gaps between tokens, and processor time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from benchmarks.gateway.clients import Load, Outcome, Received


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal for one figure of loramux's gateway under one load."""

    load: str
    figure: str
    least: float | None = None
    most: float | None = None

    def is_met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


GOALS = (
    Goal("whole, 32 clients", "requests_per_s", least=1000.0),
    Goal("streamed, 128 clients", "tokens_per_s", least=40_000.0),
    Goal("20 ms steps, 128 clients", "p99_gap_ms", most=25.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    requests_per_s: float
    tokens_per_s: float
    p50_ms: float
    """Latency of a whole answer, or the time to the first token of a streamed answer."""
    p99_ms: float
    p50_gap_ms: float | None
    """Time between two consecutive reads of one stream."""
    p99_gap_ms: float | None
    tokens_per_event: float | None
    cores: float
    """Processor time of the system's process per second."""
    processor_us_per_token: float


def figures_of(outcome: Outcome, load: Load, processor_s: float) -> Figures:
    num_answers = len(outcome.answers)
    num_tokens = num_answers * load.num_tokens
    latencies, gaps, num_events = [], [], 0
    for one in outcome.answers:
        times_s = _token_times_s(one) if load.is_streamed else one.times_s[-1:]
        latencies.append(times_s[0] - one.sent_s)
        gaps += [later - earlier for earlier, later in pairwise(times_s)]
        num_events += b"".join(one.data).count(b"data: {") if load.is_streamed else 0
    p50, p99 = _percentiles_ms(latencies)
    p50_gap, p99_gap = _percentiles_ms(gaps) if gaps else (None, None)
    return Figures(
        requests_per_s=round(num_answers / outcome.seconds, 1),
        tokens_per_s=round(num_tokens / outcome.seconds, 1),
        p50_ms=p50,
        p99_ms=p99,
        p50_gap_ms=p50_gap,
        p99_gap_ms=p99_gap,
        tokens_per_event=round(num_tokens / num_events, 2) if num_events else None,
        cores=round(processor_s / outcome.seconds, 2),
        processor_us_per_token=round(1e6 * processor_s / num_tokens, 1),
    )


def _token_times_s(received: Received) -> list[float]:
    """The times of the reads, beginning with the first event. Some servers send the head of a response earlier."""
    first = next(number for number, data in enumerate(received.data) if b"data: " in data)
    return received.times_s[first:]


def cases_of(found: Mapping[tuple[str, str], Sequence[Figures]], direct: str) -> list[dict[str, Any]]:
    """The median of each figure, by load and system, and the latency that a gateway adds to the system `direct`."""
    cases = []
    for (load, system), rounds in found.items():
        case = {"load": load, "system": system, **_medians(rounds)}
        bare = found.get((load, direct))
        if bare is not None and system != direct:
            for figure in ("p50_ms", "p99_ms"):
                case[f"added_{figure}"] = round(case[figure] - _medians(bare)[figure], 2)
        cases.append(case)
    return sorted(cases, key=itemgetter("load"))


def judged(cases: Sequence[Mapping[str, Any]], system: str) -> list[dict[str, Any]]:
    """Each goal whose load was measured, with the value that `system` reached and whether it meets the goal."""
    values = {case["load"]: case for case in cases if case["system"] == system}
    return [
        {**asdict(goal), "value": values[goal.load][goal.figure], "is_met": goal.is_met(values[goal.load][goal.figure])}
        for goal in GOALS
        if goal.load in values
    ]


def _medians(rounds: Sequence[Figures]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name in asdict(rounds[0]):
        values = [getattr(one, name) for one in rounds]
        shown[name] = None if None in values else round(statistics.median(values), 2)
    return shown


def _percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return round(float(p50), 2), round(float(p99), 2)
