"""Adapter files in a directory of the server's machine, such as one that a trainer writes on a shared file system."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loramux.adapter_store.errors import AdapterRejected, SourceUnavailable

FILE_SCHEME = "file://"
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe would wait for a writer.
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK_BYTES = 1 << 20
_LINK_ERRORS = (errno.ELOOP, errno.ENOTDIR)


class DirectorySource:
    """The files in one directory; see `Source`.

    `root` is a directory that the operator allows, and `parts` leads from it to the files. No part may be a symbolic
    link, and the files must be regular files. The server therefore reads nothing outside `root`, even if a tenant can
    write below it.
    """

    def __init__(self, root: Path, parts: tuple[str, ...]) -> None:
        self._root = root
        self._parts = parts

    @property
    def facts(self) -> dict[str, Any]:
        # Only the operator and the caller know the path.
        return {}

    def has(self, name: str) -> bool:
        with self._directory() as directory:
            try:
                os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return True

    def size(self, name: str, max_bytes: int) -> int:
        with self._opened(name, max_bytes) as file:
            return os.fstat(file).st_size

    def fetch_file(self, name: str, destination: Path, max_bytes: int) -> None:
        with (
            self._opened(name, max_bytes) as file,
            os.fdopen(file, "rb", closefd=False) as source,
            destination.open("wb") as out,
        ):
            # The file can grow while it is read.
            left = max_bytes
            while chunk := source.read(min(_CHUNK_BYTES, left)):
                out.write(chunk)
                left -= len(chunk)

    @contextmanager
    def _opened(self, name: str, max_bytes: int) -> Iterator[int]:
        """Open a regular file of at most `max_bytes`."""
        with self._directory() as directory, _translated(name):
            file = os.open(name, _OPEN_FILE, dir_fd=directory)
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode):
                    raise AdapterRejected("invalid_source", "it is not a regular file", name)
                if found.st_size > max_bytes:
                    raise AdapterRejected("file_too_large", f"the file is larger than {max_bytes} bytes", name)
                yield file
            finally:
                os.close(file)

    @contextmanager
    def _directory(self) -> Iterator[int]:
        with _translated("source"):
            current = os.open(self._root, _OPEN_DIRECTORY)
            try:
                for part in self._parts:
                    inner = os.open(part, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=current)
                    os.close(current)
                    current = inner
                yield current
            finally:
                os.close(current)


@contextmanager
def _translated(param: str) -> Iterator[None]:
    """Translate errors of the file system into AdapterRejected or SourceUnavailable."""
    try:
        yield
    except FileNotFoundError:
        raise AdapterRejected("source_not_found", "it does not exist", param) from None
    except PermissionError:
        raise AdapterRejected("source_unauthorized", "the server may not read it", param) from None
    except OSError as error:
        if error.errno in _LINK_ERRORS:
            raise AdapterRejected("invalid_source", "it is a symbolic link, or not a directory", param) from None
        raise SourceUnavailable(f"the directory cannot be read: {error.strerror}") from error
