"""Sends one event to one webhook, signed as https://www.standardwebhooks.com describes (version 1.0.0)."""

from __future__ import annotations

import asyncio
import base64
import hmac
import ssl
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import httpx
import msgspec

from loramux.adapter_store.hub.hub_transport import Resolve, is_public, resolve
from loramux.platform.events.documents import EventDocument
from loramux.platform.events.webhooks import SECRET_PREFIX
from loramux.platform.threads import call_on

DEADLINE_S = 10.0
"""Longest time of one attempt, in seconds, from looking up the host's addresses to the response's headers."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """`status` is the response's, or None if there was none. `error` is None for a delivery."""

    status: int | None
    error: str | None
    seconds: float


class TargetRefused(httpx.TransportError):
    """The target is not one that the server may call."""


class PublicTransport(httpx.AsyncBaseTransport):
    """Connects to the addresses of a host only if all of them are allowed.

    It connects to an address that was checked, so a name that resolves differently a moment later changes nothing.
    """

    def __init__(
        self, executor: Executor, certificates: ssl.SSLContext, is_allowed: Callable[[str], bool], resolve: Resolve
    ) -> None:
        self._executor = executor
        self._is_allowed = is_allowed
        self._resolve = resolve
        self._transport = httpx.AsyncHTTPTransport(verify=certificates)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            addresses = await call_on(self._executor, self._resolve, url.host, port)
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError("the host has no address") from error
        if not addresses:
            raise httpx.ConnectError("the host has no address")
        if not all(map(self._is_allowed, addresses)):
            raise TargetRefused("the host's address is not public")
        pinned = httpx.Request(
            request.method,
            url.copy_with(host=addresses[0]),
            # The headers name the host, and the certificate must be the host's.
            headers=request.headers,
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": url.host},
        )
        return await self._transport.handle_async_request(pinned)

    async def aclose(self) -> None:
        await self._transport.aclose()


class WebhookSender:
    """`allows_private` also allows http, and targets in private networks and on this machine.

    `executor` looks up the addresses of hosts, which can take long, so it should have threads of its own.
    """

    def __init__(
        self,
        executor: Executor,
        allows_private: bool,
        resolve: Resolve = resolve,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._executor = executor
        self._certificates: ssl.SSLContext | None = None
        self._allows_private = allows_private
        self._resolve = resolve
        self._now_s = now_s

    async def send(self, url: str, secret: str, document: EventDocument, deadline_s: float = DEADLINE_S) -> Attempt:
        """Send an event. The response's body is not read, and redirects are not followed."""
        started_s = time.monotonic()
        body = msgspec.json.encode(document)
        headers = {
            "content-type": "application/json",
            "user-agent": "loramux",
            **signature_headers(secret, document["id"], int(self._now_s()), body),
        }
        status: int | None = None
        try:
            async with asyncio.timeout(deadline_s):
                status = await self._post(url, headers, body)
            error = None if 200 <= status < 300 else f"the target answered with {status}"
        except TimeoutError:
            error = f"the target did not answer within {deadline_s:g} s"
        except TargetRefused as refused:
            error = str(refused)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as failure:
            # The error's text can repeat what the target has sent.
            error = f"the target cannot be reached ({type(failure).__name__})"
        return Attempt(status, error, time.monotonic() - started_s)

    async def _post(self, url: str, headers: dict[str, str], body: bytes) -> int:
        if not self._allows_private and not url.startswith("https://"):
            raise TargetRefused("the URL does not use https")
        if self._certificates is None:
            # Reading the authorities' certificates takes 30 ms.
            self._certificates = await call_on(self._executor, httpx.create_ssl_context)
        is_allowed = (lambda _: True) if self._allows_private else is_public
        transport = PublicTransport(self._executor, self._certificates, is_allowed, self._resolve)
        # A client of its own for each attempt keeps no connection that a target could hold open.
        async with (
            httpx.AsyncClient(transport=transport, timeout=DEADLINE_S) as client,
            client.stream("POST", url, headers=headers, content=body, follow_redirects=False) as response,
        ):
            return response.status_code


def signature_headers(secret: str, message_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """Return the headers that let a receiver check that this server sent the message at this time."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = b".".join((message_id.encode(), str(timestamp_s).encode(), body))
    signature = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": f"v1,{signature}",
    }
