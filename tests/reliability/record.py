"""How a campaign reports what it measured to `make reliability`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = "LORAMUX_RELIABILITY_FILE"
"""The environment variable with the path of the file that records are appended to. Without it, nothing is recorded."""

Figures = dict[str, float]


@contextmanager
def recorded(row: str, **figures: float) -> Iterator[Figures]:
    """Record figures of a row when the block ends, with `failures`: 1 if it raised an error, otherwise 0.

    The block adds what it measures to the figures. A failed block records what it had measured until then.
    """
    try:
        yield figures
    except BaseException:
        _append(row, figures | {"failures": 1})
        raise
    _append(row, figures | {"failures": 0})


def read_records(path: Path, row: str) -> list[Figures]:
    """All figures that were recorded for a row, oldest first."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record["figures"] for record in records if record["row"] == row]


def _append(row: str, figures: Figures) -> None:
    if path := os.environ.get(FILE):
        line = json.dumps({"row": row, "figures": figures}, allow_nan=False)
        with Path(path).open("a") as file:
            # Processes append at the same time. One write of a short line stays whole.
            file.write(line + "\n")
