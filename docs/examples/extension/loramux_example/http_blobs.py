"""A blob store on a plain HTTP server: see `http_server.py` for the requests that the server must understand."""

from __future__ import annotations

import io
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import httpx

from loramux.adapter_store.blobs.interface import MAX_READ_BYTES, BlobInfo, BlobStore, check_key, check_size
from loramux.adapter_store.errors import BlobNotFound, BlobStoreUnavailable, InvalidBlobUrl

CHUNK_BYTES = 1 << 20
WAIT_S = 30.0
"""How long a single read or write can take, in seconds."""

LEAST_BYTES_PER_S = 1 << 20
"""By default, a transfer can take WAIT_S, and one more second for this many bytes."""


class HttpBlobStore(BlobStore):
    """Keeps blobs at `http://HOST[:PORT][/PATH]`. The server keeps an existing blob if a put names its key again."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if not parts.hostname or parts.query or parts.fragment:
            raise InvalidBlobUrl("the blob URL names no HTTP server: use http://HOST:PORT or http://HOST:PORT/PATH")
        self._url = url.rstrip("/")
        # A proxy of the environment must not see adapters, which belong to tenants.
        self._client = httpx.Client(base_url=self._url, timeout=WAIT_S, trust_env=False)
        # A store is never closed, so close its connections when nothing refers to it any more.
        weakref.finalize(self, self._client.close)

    def check(self) -> None:
        probe = f"probes/{uuid.uuid4().hex}"
        self.put(probe, b"probe")
        self.delete(probe)

    def put(self, key: str, source: Path | bytes, deadline_s: float | None = None) -> bool:
        path = _path(key)
        with _opened(source) as (file, size), self._reached(f"blob {key} cannot be written"):
            due_s = _due_s(size, deadline_s)
            response = self._client.put(
                path,
                content=_until(due_s, iter(lambda: file.read(CHUNK_BYTES), b"")),
                headers={"if-none-match": "*", "content-length": str(size)},
                timeout=_timeout_s(deadline_s),
            )
            if response.status_code == httpx.codes.PRECONDITION_FAILED:
                return False
            response.raise_for_status()
        return True

    def get(self, key: str, destination: Path, max_bytes: int | None = None, deadline_s: float | None = None) -> None:
        with self._read(key, max_bytes, deadline_s) as response, destination.open("wb") as out:
            due_s = _due_s(_size(response), deadline_s)
            for chunk in _until(due_s, response.iter_raw(CHUNK_BYTES)):
                out.write(chunk)

    def read_bytes(self, key: str) -> bytes:
        with self._read(key, MAX_READ_BYTES) as response:
            return response.read()

    def head(self, key: str) -> BlobInfo | None:
        path = _path(key)
        with self._reached(f"blob {key} cannot be looked up"):
            response = self._client.head(path)
            if response.status_code == httpx.codes.NOT_FOUND:
                return None
            response.raise_for_status()
            return BlobInfo(size=_size(response))

    def delete(self, key: str) -> None:
        path = _path(key)
        with self._reached(f"blob {key} cannot be deleted"):
            self._client.delete(path).raise_for_status()

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        with self._reached("the blobs cannot be listed"):
            response = self._client.get("/keys", params={"prefix": prefix})
            response.raise_for_status()
            keys = response.text.split()
        yield from sorted(keys)

    def remove_unfinished(self) -> None:
        """Do nothing: the server itself removes the leftovers of puts that were cut off."""

    @contextmanager
    def _read(self, key: str, max_bytes: int | None, deadline_s: float | None = None) -> Iterator[httpx.Response]:
        get = self._client.stream("GET", _path(key), timeout=_timeout_s(deadline_s))
        with self._reached(f"blob {key} cannot be read"), get as response:
            if response.status_code == httpx.codes.NOT_FOUND:
                raise BlobNotFound(f"no blob {key}")
            response.raise_for_status()
            check_size(_size(response), max_bytes)
            yield response

    @contextmanager
    def _reached(self, message: str) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BlobStoreUnavailable(f"{message} at {self._url}: {reason}") from error


def _path(key: str) -> str:
    return f"/blobs/{check_key(key)}"


def _size(response: httpx.Response) -> int:
    return int(response.headers["content-length"])


@contextmanager
def _opened(source: Path | bytes) -> Iterator[tuple[BinaryIO, int]]:
    if isinstance(source, bytes):
        yield io.BytesIO(source), len(source)
        return
    with source.open("rb") as file:
        yield file, source.stat().st_size


def _timeout_s(deadline_s: float | None) -> float:
    return WAIT_S if deadline_s is None else min(WAIT_S, deadline_s)


def _due_s(size: int, deadline_s: float | None) -> float:
    return time.monotonic() + (WAIT_S + size / LEAST_BYTES_PER_S if deadline_s is None else deadline_s)


def _until(due_s: float, chunks: Iterator[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        if time.monotonic() > due_s:
            raise BlobStoreUnavailable("the blob store is too slow")
        yield chunk
