"""Files that a command writes at its end, after work that takes long or is billed."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(path: Path) -> None:
    """Raise OSError unless a file can be written at `path`. An existing file keeps its content."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        # If a pipe were opened and closed here, its reader would take that for the end.
        return
    is_new = not os.path.lexists(path)
    path.open("ab").close()
    if is_new:
        path.unlink()
