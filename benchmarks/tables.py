"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console

MIN_COLUMNS = 132
"""What they need where the output is no terminal."""


def open_console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = MIN_COLUMNS
    return console
