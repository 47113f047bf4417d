"""The progress bar of commands that count."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counted_progress(total: int | None, what: str, as_json: bool) -> Iterator[Callable[..., None]]:
    """Show a progress bar on a terminal. The function that it yields takes the number done so far and, optionally, the
    total, which can be unknown at first.
    """
    if as_json or not sys.stderr.isatty():
        yield lambda _done, _total=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=total)
        yield lambda done, total=None: bars.update(task, completed=done, total=total)
