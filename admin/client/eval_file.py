"""Reads the file of an eval for a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loramux.admin.client.client import AdminError
from loramux.platform.evals.file_digest import lines_sha256

MAX_FILE_BYTES = 2 * 1024 * 1024
"""The server's limit. A larger file is not sent."""


@dataclass(frozen=True, slots=True)
class EvalFile:
    name: str
    text: str
    sha256: str


def read_eval_file(path: Path) -> EvalFile:
    """Raises AdminError if the server would not accept the file, or OSError."""
    if not path.is_file():
        raise AdminError(400, "the eval file is missing, or is not a regular file", "file_not_found", "file")
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise AdminError(400, f"the eval file has more than {MAX_FILE_BYTES} bytes", "file_too_large", "file")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise AdminError(400, "the eval file is not UTF-8 text", "invalid_file", "file") from None
    return EvalFile(path.name, text, lines_sha256(content))
