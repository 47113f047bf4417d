"""In-process calls from the console to the admin REST routes, as the session's principal.

A page can do exactly what its user could do with a key: the same roles, checks and audit log apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import anyio
import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loramux.admin.rest.access import PRINCIPAL
from loramux.platform.accounts.principals import Principal

BASE = "/admin/v1"
Document = dict[str, Any]


class RestError(Exception):
    def __init__(self, status: int, error: Mapping[str, Any], retry_after_s: int | None = None) -> None:
        super().__init__(str(error.get("message", "")))
        self.status = status
        self.message = str(error.get("message") or "the call failed")
        self.code = str(error.get("code") or "")
        self.param = error.get("param")
        self.retry_after_s = retry_after_s


class RestCalls:
    """Calls routes as one principal. The client address comes from `outer`, the scope of the browser's request.

    `now_s` returns the database's time.
    """

    def __init__(
        self, app: ASGIApp, principal: Principal, outer: Mapping[str, Any], now_s: Callable[[], float]
    ) -> None:
        self._app = app
        self._principal = principal
        self._outer = outer
        self._now_s = now_s

    @property
    def now(self) -> int:
        """The database's time, in seconds since 1970."""
        return int(self._now_s())

    async def get(self, path: str, **params: Any) -> Document:
        """Return the document at a path under `/admin/v1`. Parameters that are None are omitted, and
        those that are lists are repeated. Raises RestError.
        """
        return (await self.call("GET", path, params=params))[0]

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, once: str = "") -> Document:
        """Make a call. If it is repeated with the same non-empty `once`, it does not run again: the first response is
        returned, without its secrets. Raises RestError.
        """
        return (await self.call("POST", path, body, once=once))[0]

    async def delete(self, path: str) -> Document:
        return (await self.call("DELETE", path))[0]

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        etag: str | None = None,
        once: str = "",
    ) -> tuple[Document, Headers]:
        """Make a call and return the response's document and headers. Raises RestError."""
        headers = [(b"content-type", b"application/json")]
        if etag is not None:
            headers.append((b"if-match", etag.encode("latin-1", "replace")))
        if once:
            headers.append((b"idempotency-key", once.encode("latin-1", "replace")))
        sent = b"" if body is None else msgspec.json.encode(body)
        answer = _Answer(sent)
        await self._app(self.scope(method, BASE + path, headers, params), answer.receive, answer.send)
        document = msgspec.json.decode(answer.body) if answer.body else {}
        if answer.status >= 400:
            retry_after = answer.headers.get("retry-after", "")
            error = document.get("error", {}) if isinstance(document, dict) else {}
            raise RestError(answer.status, error, int(retry_after) if retry_after.isdecimal() else None)
        return document, answer.headers

    def scope(
        self,
        method: str,
        path: str,
        headers: list[tuple[bytes, bytes]],
        params: Mapping[str, Any] | None = None,
    ) -> Scope:
        """Return the ASGI scope of a call by the principal. A `?` in `path` does not start a query string."""
        outer = self._outer
        query = urlencode({name: value for name, value in (params or {}).items() if value is not None}, doseq=True)
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": outer.get("scheme", "http"),
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": headers,
            "client": outer.get("client"),
            "server": outer.get("server"),
            "state": {},
            PRINCIPAL: self._principal,
        }

    async def forward(
        self,
        method: str,
        path: str,
        headers: list[tuple[bytes, bytes]],
        receive: Receive,
        send: Send,
        params: Mapping[str, Any],
    ) -> None:
        """Let a route read the browser's request body and send its response directly, for large transfers."""
        await self._app(self.scope(method, BASE + path, headers, params), receive, send)


class _Answer:
    def __init__(self, sent: bytes) -> None:
        self._sent: bytes | None = sent
        self.status = 500
        self.headers = Headers()
        self._chunks: list[bytes] = []

    @property
    def body(self) -> bytes:
        return b"".join(self._chunks)

    async def receive(self) -> Message:
        if self._sent is None:
            # The page never disconnects before it has received the whole response.
            await anyio.sleep_forever()
        body, self._sent = self._sent, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = Headers(raw=message["headers"])
        elif message["type"] == "http.response.body":
            self._chunks.append(message.get("body", b""))
