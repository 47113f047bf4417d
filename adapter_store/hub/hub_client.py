"""The three calls of the Hugging Face hub's API that read an adapter's files, bounded in time and memory.

huggingface_hub makes the same calls, but without a limit on the time or the size of a response. Tests compare its
results with this client's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from loramux.adapter_store.errors import AdapterRejected, SourceUnavailable
from loramux.adapter_store.hub.hub_transport import HubTransport

ENDPOINT = "https://huggingface.co"
CONNECT_S, READ_S = 5.0, 20.0
"""Longest times to connect and to wait for more bytes, in seconds."""

ANSWER_S = 30.0
"""Longest time for a response about a repository, in seconds."""

MIN_BYTES_PER_S = 256 << 10
"""Lowest accepted rate of a download, in bytes per second. A download may take `ANSWER_S` longer than at this rate."""

MAX_ANSWER_BYTES = 256 << 10
MAX_REDIRECTS = 5
_CHUNK_BYTES = 1 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `digest` is the SHA-256 of a large (Git LFS) file, or the Git hash of a small file."""

    name: str
    size: int
    digest: str
    is_large: bool


class _Revision(msgspec.Struct):
    sha: str


class _Large(msgspec.Struct):
    oid: str
    size: int


class _Entry(msgspec.Struct):
    type: str
    path: str
    size: int = -1
    oid: str = ""
    lfs: _Large | None = None


class HubClient:
    """Reads from the hub at `endpoint`, with `token` if there is one.

    Raises AdapterRejected (`source_not_found`, `source_unauthorized`, `source_moved`, `source_not_allowed`), or
    SourceUnavailable if a later attempt may succeed. The token is sent only to the endpoint, not to the stores that
    serve redirected downloads. `connect` makes the transport of each request; tests replace it.
    """

    def __init__(
        self,
        endpoint: str = ENDPOINT,
        token: str | None = None,
        connect: Callable[[str], httpx.BaseTransport] = HubTransport,
    ) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._connect = connect
        self._headers = {"user-agent": "loramux"} | ({"authorization": f"Bearer {token}"} if token else {})

    def resolve(self, repository: str, revision: str) -> str:
        """Return the full hash of the commit to which a branch, tag or commit hash refers."""
        path = f"/api/models/{repository}/revision/{quote(revision, safe='')}"
        answer: _Revision = self._answer(httpx.Request("GET", self._url(path), params={"expand": "sha"}), _Revision)
        if not _COMMIT.fullmatch(answer.sha):
            raise SourceUnavailable("the hub's response contains no commit")
        return answer.sha

    def files(self, repository: str, commit: str, names: Collection[str]) -> Mapping[str, HubFile]:
        """Return the files in `names` that the repository has at a commit."""
        path = f"/api/models/{repository}/paths-info/{commit}"
        form = {"paths": list(names), "expand": "false"}
        entries: list[_Entry] = self._answer(httpx.Request("POST", self._url(path), data=form), list[_Entry])
        return {entry.path: _file(entry) for entry in entries if entry.type == "file" and entry.path in names}

    def chunks(self, repository: str, commit: str, file: HubFile) -> Iterator[bytes]:
        """Yield the bytes of a file. The hub may send more than `file.size` bytes, so the caller must count them."""
        request = httpx.Request("GET", self._url(f"/{repository}/resolve/{commit}/{file.name}"))
        deadline = time.monotonic() + ANSWER_S + file.size / MIN_BYTES_PER_S
        with self._response(request, follow_redirects=True) as response:
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                yield chunk
                _check_deadline(deadline)

    def _answer(self, request: httpx.Request, kind: Any) -> Any:
        deadline = time.monotonic() + ANSWER_S
        body = bytearray()
        with self._response(request, follow_redirects=False) as response:
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                body += chunk
                _check_deadline(deadline)
                if len(body) > MAX_ANSWER_BYTES:
                    raise SourceUnavailable(f"the hub's response has more than {MAX_ANSWER_BYTES} bytes")
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise SourceUnavailable(f"the hub's response cannot be read: {error}") from error

    @contextmanager
    def _response(self, request: httpx.Request, *, follow_redirects: bool) -> Iterator[httpx.Response]:
        """Send a request, and translate failures."""
        request.headers.update(self._headers)
        client = httpx.Client(
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
            max_redirects=MAX_REDIRECTS,
            transport=self._connect(self._endpoint),
        )
        try:
            with client:
                response = client.send(request, stream=True, follow_redirects=follow_redirects)
                try:
                    _check_status(response)
                    yield response
                finally:
                    response.close()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # The error's text can contain a signed URL.
            raise SourceUnavailable(f"the hub at {self._endpoint} cannot be read ({type(error).__name__})") from None

    def _url(self, path: str) -> str:
        return self._endpoint + path


def _check_status(response: httpx.Response) -> None:
    status = response.status_code
    if response.is_success:
        return
    if status in (401, 403):
        message = "the hub refuses access: the repository does not exist, or the server's token may not read it"
        raise AdapterRejected("source_unauthorized", message, "source")
    if response.is_redirect:
        raise AdapterRejected("source_moved", "the hub redirects to another repository: use its new name", "source")
    if status in _RETRIED:
        raise SourceUnavailable(f"the hub answered with {status}")
    raise AdapterRejected("source_not_found", f"the hub has no such repository or revision ({status})", "source")


def _check_deadline(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise SourceUnavailable("the hub sends data too slowly")


def _file(entry: _Entry) -> HubFile:
    size, digest = (entry.size, entry.oid) if entry.lfs is None else (entry.lfs.size, entry.lfs.oid)
    if size < 0 or not (_COMMIT if entry.lfs is None else _SHA256).fullmatch(digest):
        raise SourceUnavailable("the hub's response contains a malformed size or hash")
    return HubFile(entry.path, size, digest, entry.lfs is not None)
