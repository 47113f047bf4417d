"""The calls of the Hugging Face hub's API that read a repository's files, bounded in time and memory.

huggingface_hub makes the same calls, but without a limit on the time or the size of a response, without a check of
redirects and, for downloads, without a check of hashes. Tests compare its results with this client's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from loramux.adapter_store.errors import AdapterRejected, SourceUnavailable
from loramux.adapter_store.hub.hub_files import (
    Entry,
    HubFile,
    HubListing,
    Repository,
    Revision,
    checked_commit,
    checked_file,
    entry_file,
    is_sha256,
    sibling_file,
)
from loramux.adapter_store.hub.hub_transport import HubTransport

ENDPOINT = "https://huggingface.co"
CONNECT_S, READ_S = 5.0, 20.0
"""Longest times to connect and to wait for more bytes, in seconds."""

ANSWER_S = 30.0
"""Longest time for a response about a repository, in seconds."""

MIN_BYTES_PER_S = 256 << 10
"""Lowest accepted rate of a download, in bytes per second. A download may take `ANSWER_S` longer than at this rate."""

MAX_ANSWER_BYTES = 256 << 10
MAX_LISTING_BYTES = 16 << 20
"""Longest description of a repository with all of its files, in bytes."""

MAX_RETRY_AFTER_S = 300.0
MAX_REDIRECTS = 5
_CHUNK_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})")
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})


class HubClient:
    """Reads from the hub at `endpoint`, with `token` if there is one.

    Raises AdapterRejected (`source_not_found`, `source_unauthorized`, `source_moved`, `source_not_allowed`), or
    SourceUnavailable if a later attempt may succeed. The token is sent only to the endpoint, not to the stores that
    serve redirected downloads. `connect` makes the transport of each request; tests replace it. `min_bytes_per_s`
    replaces the lowest accepted rate of a download.
    """

    def __init__(
        self,
        endpoint: str = ENDPOINT,
        token: str | None = None,
        connect: Callable[[str], httpx.BaseTransport] = HubTransport,
        min_bytes_per_s: int = MIN_BYTES_PER_S,
    ) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._connect = connect
        self._min_bytes_per_s = min_bytes_per_s
        self._headers = {"user-agent": "loramux"} | ({"authorization": f"Bearer {token}"} if token else {})

    def resolve(self, repository: str, revision: str) -> str:
        """Return the full hash of the commit to which a branch, tag or commit hash refers."""
        request = httpx.Request("GET", self._revision_url(repository, revision), params={"expand": "sha"})
        answer: Revision = self._answer(request, Revision)
        return checked_commit(answer.sha)

    def files(self, repository: str, commit: str, names: Collection[str]) -> Mapping[str, HubFile]:
        """Return the files in `names` that the repository has at a commit."""
        path = f"/api/models/{repository}/paths-info/{commit}"
        form = {"paths": list(names), "expand": "false"}
        entries: list[Entry] = self._answer(httpx.Request("POST", self._url(path), data=form), list[Entry])
        return {entry.path: entry_file(entry) for entry in entries if entry.type == "file" and entry.path in names}

    def listing(self, repository: str, revision: str) -> HubListing:
        """Return the commit to which a revision refers, and all of its files."""
        request = httpx.Request("GET", self._revision_url(repository, revision), params={"blobs": "true"})
        answer: Repository = self._answer(request, Repository, MAX_LISTING_BYTES)
        files = {sibling.rfilename: sibling_file(sibling) for sibling in answer.siblings}
        return HubListing(checked_commit(answer.sha), files)

    def file(self, repository: str, commit: str, name: str) -> HubFile:
        """Return a file from the headers of its download. Mirrors that only cache downloads support this call."""
        request = httpx.Request("HEAD", self._file_url(repository, commit, name))
        with self._response(request, while_unlinked=True) as response:
            linked, headers = _is_linked(response), response.headers
        digest = headers.get("x-linked-etag" if linked else "etag", "").removeprefix("W/").strip('"')
        size = headers.get("x-linked-size" if linked else "content-length", "")
        if not size.isdecimal() or len(size) > 18 or headers.get("content-encoding", "identity") != "identity":
            raise SourceUnavailable(f"the hub does not tell the size of {name}")
        return checked_file(name, int(size), digest, is_sha256(digest))

    def chunks(self, repository: str, commit: str, name: str, size: int, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes of a file from `offset`.

        The hub may send more bytes than `size` says, or fewer, so the caller must count them.
        """
        request = httpx.Request("GET", self._file_url(repository, commit, name))
        if offset:
            request.headers["range"] = f"bytes={offset}-"
        deadline = time.monotonic() + ANSWER_S + (size - offset) / self._min_bytes_per_s
        with self._response(request, follow_redirects=True) as response:
            to_skip = _num_bytes_before(response, offset, size)
            # Chunks of a given size would be filled first, and lost if the connection breaks.
            for chunk in response.iter_bytes():
                if len(chunk) > to_skip:
                    yield chunk[to_skip:]
                to_skip = max(0, to_skip - len(chunk))
                _check_deadline(deadline)

    def _answer(self, request: httpx.Request, kind: Any, max_bytes: int = MAX_ANSWER_BYTES) -> Any:
        deadline = time.monotonic() + ANSWER_S
        body = bytearray()
        with self._response(request) as response:
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                body += chunk
                _check_deadline(deadline)
                if len(body) > max_bytes:
                    raise SourceUnavailable(f"the hub's response has more than {max_bytes} bytes")
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise SourceUnavailable(f"the hub's response cannot be read: {error}") from error

    @contextmanager
    def _response(
        self, request: httpx.Request, *, follow_redirects: bool = False, while_unlinked: bool = False
    ) -> Iterator[httpx.Response]:
        """Send a request, and translate failures.

        With `while_unlinked`, follow redirects until a response describes the file to which it leads.
        """
        request.headers.update(self._headers)
        if follow_redirects or while_unlinked:
            # The lengths and ranges of a compressed file would not be those of the file.
            request.headers["accept-encoding"] = "identity"
        client = httpx.Client(
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
            max_redirects=MAX_REDIRECTS,
            transport=self._connect(self._endpoint),
        )
        try:
            with client:
                response = client.send(request, stream=True, follow_redirects=follow_redirects)
                if while_unlinked:
                    response = _follow_while_unlinked(client, response)
                try:
                    if not (while_unlinked and _is_linked(response)):
                        _check_status(response)
                    yield response
                finally:
                    response.close()
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            # The error's text can contain a signed URL.
            raise SourceUnavailable(f"the hub at {self._endpoint} cannot be read ({type(error).__name__})") from None

    def _url(self, path: str) -> str:
        return self._endpoint + path

    def _revision_url(self, repository: str, revision: str) -> str:
        return self._url(f"/api/models/{repository}/revision/{quote(revision, safe='')}")

    def _file_url(self, repository: str, commit: str, name: str) -> str:
        return self._url(f"/{repository}/resolve/{commit}/{quote(name)}")


def _is_linked(response: httpx.Response) -> bool:
    """Return whether a response describes a file, perhaps one to which it redirects."""
    return {"x-linked-etag", "x-linked-size"} <= response.headers.keys() and response.status_code < 400


def _follow_while_unlinked(client: httpx.Client, response: httpx.Response) -> httpx.Response:
    """Follow redirects on the hub's own host. The ETag of another host need not be the file's hash."""
    for _ in range(MAX_REDIRECTS):
        following = response.next_request
        if _is_linked(response) or following is None or following.url.raw_host != response.url.raw_host:
            break
        response.close()
        response = client.send(following, stream=True)
    return response


def _check_status(response: httpx.Response) -> None:
    status = response.status_code
    if response.is_success:
        return
    if status in (401, 403):
        message = "the hub refuses access: the repository does not exist, or the server's token may not read it"
        if response.headers.get("x-error-code") == "GatedRepo":
            message = "the repository is gated: accept its terms on the hub, then use a token of the same account"
        raise AdapterRejected("source_unauthorized", message, "source")
    if response.is_redirect:
        raise AdapterRejected("source_moved", "the hub redirects to another repository: use its new name", "source")
    if status in _RETRIED:
        raise SourceUnavailable(f"the hub answered with {status}", _retry_after_s(response))
    raise AdapterRejected("source_not_found", f"the hub has no such repository or revision ({status})", "source")


def _retry_after_s(response: httpx.Response) -> float | None:
    given = response.headers.get("retry-after", "")
    return min(float(given), MAX_RETRY_AFTER_S) if given.isdecimal() and len(given) < 10 else None


def _num_bytes_before(response: httpx.Response, offset: int, size: int) -> int:
    """Return the number of bytes before `offset` in a response. A server that ignores ranges sends the whole file."""
    if offset == 0 or response.status_code != 206:
        return offset
    found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if found is None or (int(found[1]), int(found[2])) != (offset, size) or "content-encoding" in response.headers:
        raise SourceUnavailable("the hub's response is not the requested range")
    return 0


def _check_deadline(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise SourceUnavailable("the hub sends data too slowly")
