"""A client for the admin REST API, used by the command line and the demo."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx

from loramux.admin.client.server_address import NoServerNamed, find_server

Document = dict[str, Any]

PAGE_SIZE = 100
HEALTH_TIMEOUT_S = 5.0
MAX_VERSIONS = 8
"""Largest number of versions that an alias can name."""


def loading_timeout_s(num_versions: int) -> float:
    """Return how long to wait for a call that first loads versions, in seconds. The server gives each of them 30 s."""
    return 30.0 * num_versions + 15.0


class AdminError(Exception):
    """The server refused the call. The exception carries the fields of the error envelope."""

    def __init__(
        self, status: int, message: str, code: str | None, param: str | None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def envelope(self) -> Document:
        return {"error": {"message": self.message, "code": self.code, "param": self.param}}


class WrongCall(AdminError):
    """A name or a file is wrong, and nothing was sent. The server would refuse it, too."""

    def __init__(self, message: str, code: str, param: str) -> None:
        super().__init__(400, message, code, param)


class ServerUnreachable(Exception):
    """No server is configured, no loramux server answers at the admin URL, its blob store does not answer, or the
    connection broke.

    `not_ready_because` is the reason that a running server reports for not being ready, if it reports one.
    """

    def __init__(self, message: str, not_ready_because: str | None = None) -> None:
        super().__init__(message)
        self.not_ready_because = not_ready_because


class AdminClient:
    """Calls `/admin/v1` with one key. Raises AdminError for a refusal, or ServerUnreachable if no server answers."""

    def __init__(self, base_url: str, key: str, timeout_s: float = 30.0) -> None:
        self.url = base_url.rstrip("/")
        self._http = httpx.Client(
            base_url=f"{self.url}/admin/v1/",
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            # A proxy from the environment cannot reach this machine's loopback interface.
            trust_env=not is_loopback(self.url),
            # Loading the system's CA certificates takes 30 ms. A plain http URL does not need them.
            verify=not self.url.startswith("http://"),
        )

    @classmethod
    def from_environment(cls, profile: str | None = None, timeout_s: float = 30.0) -> Self:
        """Return a client for the server that `find_server` selects. Raises ServerUnreachable if none is configured."""
        try:
            address = find_server(profile)
        except NoServerNamed as error:
            raise ServerUnreachable(str(error)) from None
        return cls(address.url, address.key, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    @staticmethod
    def path(*parts: str) -> str:
        return "/".join(quote(part, safe="") for part in parts)

    def get(self, path: str, **params: object) -> Document:
        return self._document(self._send("GET", path, params=_given(params)))

    def get_text(self, path: str, **params: object) -> str:
        return self._send("GET", path, params=_given(params)).text

    @contextmanager
    def stream(
        self, path: str, headers: Mapping[str, str] | None = None, **params: object
    ) -> Iterator[Iterator[bytes]]:
        try:
            with self._http.stream("GET", path, headers=headers, params=_given(params)) as response:
                if not response.is_success:
                    response.read()
                    raise refusal_of(response)
                yield response.iter_bytes()
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise ServerUnreachable(f"the connection to {self.url} broke ({reason})") from None

    def post(self, path: str, body: Document, timeout_s: float | None = None) -> Document:
        """`timeout_s` replaces the client's timeout for a call that takes long."""
        return self._document(self._send("POST", path, json=body, **_patience(timeout_s)))

    def put(self, path: str, body: Document, timeout_s: float | None = None, if_match: str | None = None) -> Document:
        """With `if_match`, an ETag, the call is refused with 412 if the resource has changed."""
        headers = {} if if_match is None else {"if-match": if_match}
        return self._document(self._send("PUT", path, json=body, headers=headers, **_patience(timeout_s)))

    def patch(self, path: str, body: Document) -> Document:
        """Update a resource regardless of its ETag, because no command's changes depend on earlier values."""
        return self._document(self._send("PATCH", path, json=body, headers={"if-match": "*"}))

    def delete(self, path: str) -> Document:
        return self._document(self._send("DELETE", path))

    def put_bytes(self, url: str, size: int, chunks: Iterable[bytes]) -> None:
        """Upload one file to the URL that the server returned for it. Raises the same errors as every other call.

        Only the part after `/admin/v1/` is used, because earlier servers leave out the prefix under which a proxy
        publishes them.
        """
        headers = {"content-length": str(size), "content-type": "application/octet-stream"}
        # The server answers only after it has stored the whole file.
        timeout = httpx.Timeout(300.0, connect=5.0)
        self._send("PUT", url.rpartition("/admin/v1/")[2], content=chunks, headers=headers, timeout=timeout)

    def put_presigned(self, request: Mapping[str, Any], chunks: Iterable[bytes]) -> None:
        """Send bytes to the blob store with the server's presigned request. The API key is not sent."""
        timeout = httpx.Timeout(300.0, connect=5.0)
        trust_env = not is_loopback(request["url"])
        try:
            with httpx.Client(timeout=timeout, trust_env=trust_env, follow_redirects=False) as http:
                response = http.request(request["method"], request["url"], headers=request["headers"], content=chunks)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            # The URL is a secret, and the error's text may contain it.
            raise ServerUnreachable(
                f"the server's blob store does not answer ({type(error).__name__}): "
                "if this machine cannot reach the store, set LORAMUX_PRESIGNED_UPLOADS=false on the server"
            ) from None
        # 412: an earlier attempt stored the bytes, but its response was lost.
        if not response.is_success and response.status_code != 412:
            raise AdminError(
                response.status_code, f"the blob store returned {response.status_code}", "blob_store_refused", None
            )

    def items(self, path: str, **params: object) -> Iterator[Document]:
        after: str | None = None
        while True:
            page = self.get(path, **{**params, "limit": PAGE_SIZE, "after": after})
            yield from page["data"]
            if not page["has_more"]:
                return
            after = page["last_id"]

    def whole_list(self, path: str, **params: object) -> Document:
        return {"object": "list", "data": list(self.items(path, **params))}

    def is_alive(self) -> bool:
        """Return True if the server answers. No key is needed."""
        try:
            return self._http.get(f"{self.url}/health/live").status_code == 200
        except httpx.TransportError:
            return False

    def why_not_ready(self) -> str | None:
        """Return the reason that the server reports, or None if it is ready or reports none. No key is needed."""
        try:
            reason = self._http.get(f"{self.url}/health/ready", timeout=HEALTH_TIMEOUT_S).json()["reason"]
        except (httpx.TransportError, ValueError, KeyError, TypeError):
            return None
        return str(reason)

    def is_ready(self) -> bool:
        """Return True if the server can run requests. No key is needed."""
        try:
            return self._http.get(f"{self.url}/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **arguments)
        except httpx.TransportError as error:
            raise self._unreachable(error) from None
        if not response.is_success:
            raise refusal_of(response)
        return response

    def _unreachable(self, error: httpx.TransportError) -> ServerUnreachable:
        reason = str(error) or type(error).__name__
        because = self.why_not_ready()
        if isinstance(error, httpx.TimeoutException):
            message = f"{self.url} took too long to answer"
        elif because is not None:
            message = f"the connection to {self.url} broke ({reason})"
        else:
            message = (
                f"no loramux server answers at {self.url} ({reason}): start 'loramux serve' or fix LORAMUX_ADMIN_URL"
            )
        if because is not None:
            message += f", and it is not ready: {because}"
        return ServerUnreachable(message, because)

    def _document(self, response: httpx.Response) -> Document:
        return {} if response.status_code == 204 else document_of(response, self.url)


def _patience(timeout_s: float | None) -> dict[str, Any]:
    return {} if timeout_s is None else {"timeout": httpx.Timeout(timeout_s, connect=5.0)}


def _given(params: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def document_of(response: httpx.Response, address: str, kind: str = "a loramux admin listener") -> Document:
    """Return a call's JSON object. Raises AdminError for a refusal, or ServerUnreachable if there is none because the
    server at `address` is not of this kind.
    """
    if not response.is_success:
        raise refusal_of(response)
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ServerUnreachable(f"{address} is not {kind}: it did not answer with JSON")
    return document


def refusal_of(response: httpx.Response) -> AdminError:
    """Return the error of a response from the admin API or an OpenAI API."""
    retry_after = response.headers.get("retry-after", "")
    retry_after_s = int(retry_after) if retry_after.isascii() and retry_after.isdecimal() else None
    try:
        error = response.json()["error"]
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code, param = f"the server returned {response.status_code}", None, None
    # The path is unknown. The error of a missing resource has a code of its own, or a parameter.
    if response.status_code == httpx.codes.NOT_FOUND and code in (None, "not_found") and param is None:
        base_url, is_admin_api, _ = str(response.url).partition("/admin/v1/")
        if is_admin_api:
            message = (
                f"{base_url} does not have this part of the admin API: LORAMUX_ADMIN_URL or the profile must have the "
                "address of a server's admin listener (port 8001 by default), in this command's version"
            )
    return AdminError(response.status_code, message, code, param, retry_after_s)


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
