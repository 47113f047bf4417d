"""The progress bar of downloads and uploads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loramux.admin.client.push import Progress


@contextmanager
def transfer_progress(num_bytes: int | None, as_json: bool) -> Iterator[Progress]:
    """Show a progress bar on a terminal. Without `num_bytes`, it shows only the number of bytes processed so far."""
    if as_json or not sys.stderr.isatty():
        yield lambda _what, _num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:>7}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=num_bytes)
        yield lambda what, done: bars.update(task, description=what, advance=done)
