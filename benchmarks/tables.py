"""The console that tables are printed on, and tables of strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

MIN_COLUMNS = 132
"""Width of the console when the output is not a terminal, in columns."""


def open_console(min_columns: int = MIN_COLUMNS) -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = min_columns
    return console


def table(title: str, headings: Iterable[str], rows: Iterable[Sequence[str]], num_left: int = 1) -> Table:
    """A table whose first `num_left` columns are aligned to the left, and the others to the right."""
    drawn = Table(title=title)
    for number, heading in enumerate(headings):
        drawn.add_column(heading, justify="left" if number < num_left else "right")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def table_by_database(
    title: str, heading: str, results: Mapping[str, Mapping[str, Mapping[str, float]]], digits: int = 1
) -> Table:
    """A table with a row per name and a column per database and figure. `results` maps databases to figures by name."""
    first = next(iter(results.values()))
    figures = list(next(iter(first.values())))
    columns = [f"{kind} {figure.removesuffix('_ms')}, ms" for kind in results for figure in figures]
    rows = [
        [name, *(f"{found[name][one]:.{digits}f}" for found in results.values() for one in figures)] for name in first
    ]
    return table(title, (heading, *columns), rows)
