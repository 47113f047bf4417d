"""The console that tables are printed on."""

from __future__ import annotations

from rich.console import Console

MIN_COLUMNS = 132
"""Width of the console when the output is not a terminal, in columns."""


def open_console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = MIN_COLUMNS
    return console
