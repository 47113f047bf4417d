"""Reads the file of an eval for a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loramux.admin.client.client import WrongCall
from loramux.platform.evals.file_digest import lines_sha256

MAX_FILE_BYTES = 2 * 1024 * 1024
"""The server's limit. A larger file is not sent."""


@dataclass(frozen=True, slots=True)
class EvalFile:
    name: str
    text: str
    sha256: str


def read_eval_file(path: Path) -> EvalFile:
    """Raises WrongCall if the file cannot be read, or if the server would not accept it. The message does not name the
    file, because a key may have been given in its place.
    """
    try:
        if not path.is_file():
            raise WrongCall("the eval file is missing, or is not a regular file", "file_not_found", "file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise WrongCall(f"the eval file cannot be read: {error.strerror}", "file_not_readable", "file") from None
    if len(content) > MAX_FILE_BYTES:
        raise WrongCall(f"the eval file has more than {MAX_FILE_BYTES} bytes", "file_too_large", "file")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise WrongCall("the eval file is not UTF-8 text", "invalid_file", "file") from None
    return EvalFile(path.name, text, lines_sha256(content))
