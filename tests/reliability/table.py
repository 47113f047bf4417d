"""The table of docs/reliability.md, from the stored results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.reliability.rows import ROWS, Row

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "benchmarks" / "results" / "reliability.json"
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"
COLUMNS = ("row", "figures", "run at", "commit", "CPU", "duration", "result")


def reliability_page() -> str:
    """The page with a current table. The text around the table is kept."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + table_of(json.loads(RESULTS.read_text())) + "\n" + END + after


def table_of(results: Mapping[str, Any]) -> str:
    newest = max((result["date"] for result in results.values()), default=None)
    commits = {result["machine"]["commit"] for result in results.values() if result["date"] == newest}
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for name, row in ROWS.items():
        cells = _cells(row, results[name], commits) if name in results else [row.title, *["not run"] * 6]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(row: Row, result: Mapping[str, Any], newest: set[str]) -> list[str]:
    figures, machine = result["figures"], result["machine"]
    shown = [f"{_number(figures[one.name])} {one.unit}" for one in row.figures if one.name in figures]
    commit = machine["commit"]
    return [
        row.title,
        "; ".join(shown) or "none",
        f"{result['size']}{_share(row, figures)}",
        f"{commit}{'' if newest == {commit} else ' (rows differ)'}",
        f"{machine['cores']} cores, {machine['cpu']}{_busy(row, result)}",
        _duration(result["duration_s"]),
        "passed" if not result["problems"] else "**failed**: " + "; ".join(result["problems"]),
    ]


def _share(row: Row, figures: Mapping[str, float]) -> str:
    """How much of the full size was run, if it was less."""
    shares = [figures[one.name] / one.full for one in row.figures if one.full and one.name in figures]
    return "".join(f", {share:.2g} of full" for share in shares if share < 1)


def _busy(row: Row, result: Mapping[str, Any]) -> str:
    return f", {result['busy_share']:.0%} busy before" if row.is_timed else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
