"""Percentiles of alternating measurements, and their ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.harness import finite, percentile
from benchmarks.tables import table

PERCENTILES = (50, 90, 99)

Rounds = Mapping[str, Sequence[Sequence[float]]]
"""The samples of each round, by variant."""


@dataclass(frozen=True, slots=True)
class Target:
    """The limit for the p99 of `way` divided by the p99 of `reference`."""

    way: str
    reference: str
    limit: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ratio of p99s over the samples of all rounds, which must not exceed the limit, and the ratio in each
    round."""

    target: Target
    ratio: float
    rounds: tuple[float, ...]

    @property
    def is_met(self) -> bool:
        return self.ratio <= self.target.limit

    @property
    def document(self) -> dict[str, Any]:
        return {
            "way": self.target.way,
            "reference": self.target.reference,
            "limit": self.target.limit,
            "p99_over_reference": finite(self.ratio),
            "rounds": [finite(ratio) for ratio in self.rounds],
            "met": self.is_met,
        }

    def __str__(self) -> str:
        spread = f"{min(self.rounds):.2f} to {max(self.rounds):.2f}, median {statistics.median(self.rounds):.2f}"
        verdict = "met" if self.is_met else "missed"
        return (
            f"p99 of {self.target.way} over {self.target.reference}: {self.ratio:.3f} "
            f"(rounds: {spread}); target {self.target.limit:g}: {verdict}"
        )


def compare(samples: Rounds, target: Target) -> Comparison:
    way, reference = samples[target.way], samples[target.reference]
    return Comparison(
        target,
        ratio(pooled(way), pooled(reference)),
        tuple(ratio(own, other) for own, other in zip(way, reference, strict=True)),
    )


def ratio(way: Sequence[float], reference: Sequence[float]) -> float:
    """The p99 of `way` divided by the p99 of `reference`. Infinity if a p99 is infinite or the second is 0."""
    above, below = percentile(way, 99), percentile(reference, 99)
    return above / below if math.isfinite(above) and 0 < below < math.inf else math.inf


def pooled(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [value for samples in rounds for value in samples]


def spread(rounds: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """Percentiles in milliseconds over all rounds together, and the number of samples."""
    samples = pooled(rounds)
    figures: dict[str, float | None] = {"samples": len(samples)}
    for percent in PERCENTILES:
        value = percentile(samples, percent)
        figures[f"p{percent}_ms"] = finite(value * 1e3)
    return figures


def spread_table(title: str, columns: Mapping[str, Rounds]) -> Table:
    """A table with one row per variant. `columns` maps each heading to the measurements under it."""
    names = [f"p{percent} ms" for percent in PERCENTILES]
    headings = [name for heading in columns for name in (f"{heading} samples", *names)]
    rows = []
    for way in next(iter(columns.values())):
        cells = [spread(rounds[way]) for rounds in columns.values()]
        rows.append([way, *(_shown(name, value) for cell in cells for name, value in cell.items())])
    return table(title, ("", *headings), rows)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if name == "samples" else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
