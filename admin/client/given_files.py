"""Finds the files that a directory gives."""

from __future__ import annotations

import os
from pathlib import Path


def is_given(path: Path) -> bool:
    """Return whether a file exists. It can be a link, as in Hugging Face's cache.

    Raises OSError if it is not a regular file, but for example a pipe or a link to a missing file.
    """
    if path.is_file():
        return True
    if os.path.lexists(path):
        raise OSError(f"{path} is not a regular file")
    return False
