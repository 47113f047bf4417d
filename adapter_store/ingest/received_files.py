"""Writes the files of a push to disk as they arrive, within limits on their sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

from loramux.adapter_store.errors import UploadRefused, printable
from loramux.adapter_store.formats.files.file_names import FURTHER_FILES, UPLOAD_FILES
from loramux.adapter_store.registry.records import UploadFile

_MAX_NAME_CHARS = 100
"""Longest name in an error message, in characters."""


def receive_files(items: Iterable[str | bytes], directory: Path, max_bytes: Mapping[str, int]) -> list[UploadFile]:
    """Write files to `directory` and return their names, sizes and checksums.

    `items` yields the name of a file and then its bytes in chunks, file by file. A name is looked up in `max_bytes`
    before it becomes a path. Raises UploadRefused, or what `items` raises.
    """
    found: dict[str, UploadFile] = {}
    name: str | None = None
    size, hashed = 0, hashlib.sha256()

    def end() -> None:
        if name is not None:
            if not size:
                raise UploadRefused("invalid_size", f"{name} is empty", name)
            found[name] = UploadFile(name, size, hashed.hexdigest())

    with ExitStack() as opened:
        out = None
        for item in items:
            if isinstance(item, bytes):
                if name is None or out is None:
                    raise _wrong_files()
                size += len(item)
                if size > max_bytes[name]:
                    message = f"{name} must have 1 to {max_bytes[name]} bytes"
                    raise UploadRefused("file_too_large", message, name)
                hashed.update(item)
                out.write(item)
                continue
            end()
            if item in found:
                raise UploadRefused("invalid_files", f"the push has two files {item}", item)
            if item not in max_bytes:
                shown = printable(item, _MAX_NAME_CHARS)
                raise UploadRefused("invalid_files", f"a push cannot have a file {shown!r}", shown)
            name, size, hashed = item, 0, hashlib.sha256()
            out = opened.enter_context((directory / name).open("xb"))
        end()
    if any(required not in found for required in UPLOAD_FILES):
        raise _wrong_files()
    return list(found.values())


def _wrong_files() -> UploadRefused:
    return UploadRefused(
        "invalid_files",
        f"a push must have the files {' and '.join(UPLOAD_FILES)}, and can also have {', '.join(FURTHER_FILES)}",
        "files",
    )
