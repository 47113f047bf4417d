"""Response latency, computed from the ledger's events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loramux.platform.ledger.settlement import FAILURES

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles in seconds, or None if there is no data. The time between tokens is averaged within each request."""

    num_requests: int
    num_failed: int
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    between_tokens_p50_s: float | None
    between_tokens_p95_s: float | None


def latency_of(events: Sequence[Document]) -> Latency:
    first = sorted(event["time_to_first_token_us"] / 1e6 for event in events if _has_first(event))
    between = sorted(gap for event in events if (gap := _between_tokens_s(event)) is not None)
    return Latency(
        num_requests=len(events),
        num_failed=sum(event["status"] in FAILURES for event in events),
        first_token_p50_s=quantile(first, 0.5),
        first_token_p95_s=quantile(first, 0.95),
        between_tokens_p50_s=quantile(between, 0.5),
        between_tokens_p95_s=quantile(between, 0.95),
    )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank quantile, or None for an empty sequence."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _has_first(event: Document) -> bool:
    return event["time_to_first_token_us"] is not None


def _between_tokens_s(event: Document) -> float | None:
    duration_us: int = event["duration_us"]
    if not _has_first(event) or event["completion_tokens"] < 2:
        return None
    first_us, num_tokens = int(event["time_to_first_token_us"]), int(event["completion_tokens"])
    return (duration_us - first_us) / 1e6 / (num_tokens - 1)
