"""Downloads a file, continues where an earlier attempt stopped, and verifies the result."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from loramux.adapter_store.errors import PullRefused, SourceUnavailable
from loramux.adapter_store.pulling.remote import Remote, RemoteFile

MAX_FAILURES = 5
"""Number of failed attempts in a row after which a download gives up."""

PROGRESS_BYTES = 1 << 20
"""An attempt that receives at least this many bytes does not count as failed."""

_CHUNK_BYTES = 1 << 20

Progress = Callable[[str, int], None]
"""Called with a file's name and a number of further bytes."""

Pause = Callable[[float], None]
T = TypeVar("T")


def patiently(call: Callable[[], T], pause: Pause) -> T:
    """Repeat a call while its source is unavailable, at most MAX_FAILURES times."""
    for number in range(1, MAX_FAILURES):
        try:
            return call()
        except SourceUnavailable as error:
            pause(_pause_s(number, error))
    return call()


def download(remote: Remote, file: RemoteFile, part: Path, progress: Progress, pause: Pause) -> None:
    """Complete the file at `part`, which may hold the beginning from an earlier call, and verify it.

    After any error except a wrong hash or size, `part` keeps the bytes received. Raises PullRefused, SourceUnavailable
    or another Refused.
    """
    try:
        if part.exists() and part.stat().st_size > file.size:
            part.unlink()
        if not _complete(remote, file, part, progress, pause):
            # The beginning was damaged, for example by a power failure. Only the whole file can be verified.
            part.unlink()
            progress(file.name, -file.size)
            _complete(remote, file, part, progress, pause)
    except OSError as error:
        raise writing_failed(error, part) from error


def _complete(remote: Remote, file: RemoteFile, part: Path, progress: Progress, pause: Pause) -> bool:
    """Append the missing bytes. Return False if the hash is wrong and bytes of an earlier call may be the reason."""
    hasher: Any = None if file.digest is None else file.digest.hasher(file.size)
    with part.open("a+b", buffering=0) as out:
        kept = position = _hash_kept(out, hasher)
        num_failures = 0
        while position < file.size:
            before = position
            try:
                for chunk in remote.chunks(file, position):
                    if position + len(chunk) > file.size:
                        part.unlink()
                        raise PullRefused("size_mismatch", f"{file.name} is longer than declared", file.name)
                    _write(out, chunk)
                    if hasher is not None:
                        hasher.update(chunk)
                    position += len(chunk)
                    progress(file.name, len(chunk))
                if position < file.size:
                    raise SourceUnavailable(f"{file.name} ended after {position} of {file.size} bytes")
            except SourceUnavailable as error:
                num_failures = 1 if position - before >= PROGRESS_BYTES else num_failures + 1
                if num_failures >= MAX_FAILURES:
                    raise
                pause(_pause_s(num_failures, error))
        os.fsync(out.fileno())
    if file.digest is None or hasher.hexdigest() == file.digest.value:
        return True
    if kept:
        return False
    part.unlink()
    message = f"{file.name} does not match the {file.digest.algorithm} hash that its source declares"
    raise PullRefused("checksum_mismatch", message, file.name)


def read_verified(remote: Remote, file: RemoteFile) -> bytes:
    """Read a small file into memory. Raises PullRefused, SourceUnavailable or another Refused."""
    content = bytearray()
    for chunk in remote.chunks(file, 0):
        content += chunk
        if len(content) > file.size:
            raise PullRefused("size_mismatch", f"{file.name} is longer than declared", file.name)
    if len(content) < file.size:
        raise SourceUnavailable(f"{file.name} ended after {len(content)} of {file.size} bytes")
    if file.digest is not None:
        hasher = file.digest.hasher(file.size)
        hasher.update(content)
        if hasher.hexdigest() != file.digest.value:
            raise PullRefused("checksum_mismatch", f"{file.name} does not match its declared hash", file.name)
    return bytes(content)


def writing_failed(error: OSError, path: Path) -> PullRefused:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        message = f"there is no space left for {path}: free some, then run the command again to continue"
        return PullRefused("disk_full", message)
    return PullRefused("directory_not_usable", f"{error.filename or path} cannot be written: {error.strerror}")


def _hash_kept(out: FileIO, hasher: Any) -> int:
    out.seek(0)
    while chunk := out.read(_CHUNK_BYTES):
        if hasher is not None:
            hasher.update(chunk)
    return out.tell()


def _write(out: FileIO, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[out.write(view) :]


def _pause_s(number: int, error: SourceUnavailable) -> float:
    return 2.0 ** (number - 1) if error.retry_after_s is None else error.retry_after_s
