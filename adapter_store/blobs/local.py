"""Blobs as files under a directory."""

from __future__ import annotations

import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loramux.adapter_store.atomic_files import sync_directory
from loramux.adapter_store.blobs.interface import MAX_READ_BYTES, BlobInfo, BlobStore, check_key, check_size
from loramux.adapter_store.errors import BlobNotFound, BlobStoreUnavailable

# No blob key begins with a dot, so unfinished files cannot be mistaken for blobs.
_UNFINISHED = ".unfinished"
_PUT_ATTEMPTS = 5
_CHUNK_BYTES = 1 << 20
_CRASHED_AFTER_S = 86_400
"""Time after its last write at which an unfinished file counts as abandoned, in seconds."""


class LocalBlobStore(BlobStore):
    """Writes each blob to an unfinished file, flushes the file to disk, and hard-links it into place.

    Blobs therefore appear whole and are never replaced. The directory must be on a file system with hard links.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def check(self) -> None:
        with _unavailable(f"the blob directory {self._root} cannot be written"):
            unfinished = self._write_unfinished(b"")
            unfinished.unlink()
            # If the directory is new, its own name is not durable yet.
            sync_directory(self._root.parent)

    def put(self, key: str, source: Path | bytes, deadline_s: float | None = None) -> bool:
        place = self._path(key)
        with _unavailable(f"blob {key} cannot be written"):
            if place.exists():
                self._flush_directories(place)
                return False
            unfinished = self._write_unfinished(source)
            try:
                return self._link(unfinished, place)
            finally:
                unfinished.unlink()

    def get(self, key: str, destination: Path, max_bytes: int | None = None, deadline_s: float | None = None) -> None:
        path = self._path(key)
        with _unavailable(f"blob {key} cannot be read"), self._found(key), path.open("rb") as file:
            # A blob never grows, so its size is known before the copy.
            check_size(os.fstat(file.fileno()).st_size, max_bytes)
            with destination.open("wb") as out:
                shutil.copyfileobj(file, out, _CHUNK_BYTES)

    def read_bytes(self, key: str) -> bytes:
        path = self._path(key)
        with _unavailable(f"blob {key} cannot be read"), self._found(key):
            check_size(path.stat().st_size, MAX_READ_BYTES)
            return path.read_bytes()

    def head(self, key: str) -> BlobInfo | None:
        path = self._path(key)
        with _unavailable(f"blob {key} cannot be looked up"):
            try:
                status = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return BlobInfo(size=status.st_size) if stat.S_ISREG(status.st_mode) else None

    def delete(self, key: str) -> None:
        place = self._path(key)
        with _unavailable(f"blob {key} cannot be deleted"):
            try:
                place.unlink()
            except FileNotFoundError:
                return
            for parent in place.parents:
                if parent == self._root:
                    break
                # Stop at the first directory that still contains blobs.
                try:
                    parent.rmdir()
                except OSError:
                    break

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        keys = []
        for directory, names, files in os.walk(self._root):
            names[:] = [name for name in names if name != _UNFINISHED]
            keys += [(Path(directory) / name).relative_to(self._root).as_posix() for name in files]
        yield from sorted(key for key in keys if key.startswith(prefix))

    def remove_unfinished(self) -> None:
        oldest_s = time.time() - _CRASHED_AFTER_S
        with _unavailable(f"the blob directory {self._root} cannot be cleared"):
            for path in (self._root / _UNFINISHED).glob("*"):
                # Another server may finish or remove the file first.
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < oldest_s:
                        path.unlink()

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    @contextmanager
    def _found(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            # If the blob exists, it is the directory of the caller's destination that is missing.
            if self.exists(key):
                raise
            raise BlobNotFound(f"no blob {key}") from None

    def _write_unfinished(self, source: Path | bytes) -> Path:
        directory = self._root / _UNFINISHED
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = directory / uuid.uuid4().hex
        try:
            with unfinished.open("xb") as out:
                if isinstance(source, bytes):
                    out.write(source)
                else:
                    with source.open("rb") as file:
                        shutil.copyfileobj(file, out, _CHUNK_BYTES)
                out.flush()
                os.fsync(out.fileno())
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        return unfinished

    def _link(self, unfinished: Path, place: Path) -> bool:
        for attempt in range(_PUT_ATTEMPTS):
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(unfinished, place)
            except FileExistsError:
                self._flush_directories(place)
                return False
            except FileNotFoundError:
                # A concurrent delete removed the directory after emptying it.
                if attempt == _PUT_ATTEMPTS - 1:
                    raise
            else:
                self._flush_directories(place)
                return True
        raise AssertionError("unreachable")

    def _flush_directories(self, place: Path) -> None:
        """Make a blob's name durable, along with directories that are new or that another process has not flushed."""
        for parent in place.parents:
            with suppress(FileNotFoundError):
                sync_directory(parent)
            if parent == self._root:
                break


@contextmanager
def _unavailable(message: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BlobStoreUnavailable(f"{message}: {error.strerror or error}") from error
