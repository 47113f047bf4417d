"""The progress bar of commands that count."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class CountedProgress(Protocol):
    """Shows the number done so far, and the total if it was unknown before."""

    def __call__(self, done: int, total: int | None = None) -> None: ...


@contextmanager
def counted_progress(total: int | None, what: str, as_json: bool) -> Iterator[CountedProgress]:
    """Show a progress bar on a terminal. `total` is None as long as it is unknown."""
    if as_json or not sys.stderr.isatty():
        yield lambda done, total=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=total)
        yield lambda done, total=None: bars.update(task, completed=done, total=total)
