"""Figures of one load: rates, latencies, gaps between tokens, and processor time. Runs can share a file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.gateway.clients import Load, Outcome, Received
from benchmarks.harness import percentiles_ms
from benchmarks.peers.system import SystemFailed


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
    latency = percentiles_ms(latencies, 50, 99)
    gap: Mapping[str, float] = percentiles_ms(gaps, 50, 99) if gaps else {}
    return Figures(
        requests_per_s=round(num_answers / outcome.seconds, 1),
        tokens_per_s=round(num_tokens / outcome.seconds, 1),
        **latency,
        p50_gap_ms=gap.get("p50_ms"),
        p99_gap_ms=gap.get("p99_ms"),
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


METHOD = ("machine", "litellm", "database", "rounds", "seconds")
"""Fields that must be equal for two runs to share a file."""


def earlier_run(path: Path | None, method: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The document in the file, if there is one. Raises SystemFailed if its figures were measured under other
    conditions.
    """
    if path is None or not path.exists():
        return None
    document: Mapping[str, Any] = json.loads(path.read_text())
    for name in METHOD:
        if document[name] != method[name]:
            raise SystemFailed(
                f"the figures in {path} were measured with {name} {document[name]}, not {method[name]}: "
                "name another file, or measure all loads"
            )
    return document


def with_earlier_cases(
    cases: Sequence[Mapping[str, Any]], earlier: Mapping[str, Any] | None
) -> list[Mapping[str, Any]]:
    """Return these cases, plus the earlier cases of loads that were not measured this time."""
    measured = {case["load"] for case in cases}
    others = [] if earlier is None else [case for case in earlier["cases"] if case["load"] not in measured]
    return sorted([*others, *cases], key=itemgetter("load"))
