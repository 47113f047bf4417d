"""Finds the files that a directory gives."""

from __future__ import annotations

import os
from pathlib import Path

from loramux.adapter_store.formats.files.file_names import SMALL_TOKENIZER_FILES, TOKENIZER_FILE
from loramux.adapter_store.formats.version_files import tokenizer_files


def is_given(path: Path) -> bool:
    """Return whether a file exists. It can be a link, as in Hugging Face's cache.

    Raises OSError if it is not a regular file, but for example a pipe or a link to a missing file.
    """
    if path.is_file():
        return True
    if os.path.lexists(path):
        raise OSError(f"{path} is not a regular file")
    return False


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory has a tokenizer or named templates. Raises OSError if a file is not a regular file."""
    for name in (TOKENIZER_FILE, *SMALL_TOKENIZER_FILES):
        is_given(directory / name)
    return tokenizer_files.has_tokenizer(directory)
