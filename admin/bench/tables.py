"""The rows of the tables that `loramux bench` prints, and its plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from loramux.admin.bench.answers import Answer
from loramux.admin.bench.figures import MEASURES, PERCENTILES, Figures
from loramux.admin.bench.pictures import draw_bars
from loramux.admin.bench.results import SHOWN, Result

STATISTICS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))
MAX_ERRORS = 5
"""Number of different errors that are shown."""

Row = tuple[object, ...]


def total_rows(figures: Mapping[str, float | None]) -> list[Row]:
    return [(shown, _number(figures[name])) for name, shown in SHOWN.items() if figures.get(name) is not None]


def time_rows(figures: Figures) -> list[Row]:
    """Return the times in milliseconds: a row per measure, with the columns of `STATISTICS`."""
    rows: list[Row] = []
    for name, spread in figures.spreads.items():
        values = (spread.mean, *spread.percentiles.values())
        rows.append((f"{MEASURES[name]}, ms", *(f"{value:.2f}" for value in values)))
    return rows


def error_rows(answers: Sequence[Answer]) -> list[Row]:
    """Return the most frequent errors with their numbers of requests."""
    return [
        (count, error)
        for error, count in Counter(answer.error for answer in answers if answer.error).most_common(MAX_ERRORS)
    ]


def warnings_of(figures: Figures) -> list[str]:
    """Return what makes the figures less comparable than they look."""
    found = []
    if figures.num_other_lengths:
        found.append(
            f"{figures.num_other_lengths} of {figures.completed} answers do not have the requested number of tokens"
        )
    if figures.num_uncounted:
        found.append(f"{figures.num_uncounted} answers have no usage: their events were counted instead of tokens")
    return found


def compared_rows(one: Result, other: Result) -> list[Row]:
    """Return the figures that both results have, with the second divided by the first."""
    names = {
        **SHOWN,
        **{f"{kind}_{name}_ms": f"{shown}, {kind}, ms" for name, shown in MEASURES.items() for kind in STATISTICS},
    }
    # vLLM's files have the median under its own name.
    medians = {f"p50_{name}_ms": f"median_{name}_ms" for name in MEASURES}
    rows: list[Row] = []
    for name, shown in names.items():
        first, second = (
            one_file.figures.get(name, one_file.figures.get(medians.get(name, ""))) for one_file in (one, other)
        )
        if first is not None and second is not None:
            rows.append((shown, _number(first), _number(second), f"{second / first:.3f}" if first else "-"))
    return rows


def draw_times(results: Sequence[Result], title: str) -> str:
    """Draw the times of one or two results as bars: a panel per measure, and a colour per result."""
    names = [f"{place}: {result.name}" if len(results) > 1 else result.name for place, result in enumerate(results, 1)]
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for measure, shown in MEASURES.items():
        groups: dict[str, dict[str, float]] = {}
        for kind in STATISTICS:
            for name, result in zip(names, results, strict=True):
                value = result.figures.get(f"{kind}_{measure}_ms")
                if value is None and kind == "p50":
                    value = result.figures.get(f"median_{measure}_ms")
                if value is not None and value > 0:
                    groups.setdefault(kind, {})[name] = value
        if groups:
            panels[f"{shown}, ms"] = groups
    return draw_bars(title, panels, names)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"
