"""Sends one event to one webhook, signed as https://www.standardwebhooks.com describes (version 1.0.0)."""

from __future__ import annotations

import asyncio
import base64
import hmac
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakValueDictionary

import httpx
import msgspec

from loramux.adapter_store.hub.hub_transport import Resolve, host_of, is_public, pinned, resolve
from loramux.platform.events.documents import EventDocument
from loramux.platform.events.webhooks import SECRET_PREFIX
from loramux.platform.threads import call_on

DEADLINE_S = 10.0
"""Longest time of one attempt, in seconds, from looking up the host's addresses to the response's headers."""
MAX_LOOKUPS_EACH = 2
"""Largest number of lookups of one tenant's hosts at once."""
MAX_ADDRESSES = 4
"""Largest number of a host's addresses that one attempt tries to connect to."""
_NOT_PUBLIC = "the host has no public address"
"""Also the error for a name that does not exist, so that tenants learn no names of the server's network."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """`status` is the response's, or None if there was none. `error` is None for a delivery."""

    status: int | None
    error: str | None
    seconds: float


class TargetRefused(httpx.TransportError):
    """The target is not one that the server may call."""


class PinnedTransport(httpx.AsyncBaseTransport):
    """Connects to the first of several addresses that accepts a connection, whatever the host's name resolves to now.

    An address that does not answer must leave time for the others, and for the response.
    """

    def __init__(self, certificates: ssl.SSLContext, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._transport = httpx.AsyncHTTPTransport(verify=certificates)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        failure: httpx.TransportError = httpx.ConnectError("the host has no address")
        for address in self._addresses:
            try:
                return await self._transport.handle_async_request(pinned(request, address))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise failure

    async def aclose(self) -> None:
        await self._transport.aclose()


class WebhookSender:
    """`allows_private` also allows http, and targets in private networks and on this machine.

    `executor` looks up the addresses of hosts. A lookup cannot be stopped, so it keeps its thread beyond the attempt's
    deadline. A tenant has at most `MAX_LOOKUPS_EACH` lookups at once, and the executor should have threads of its own.
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
        self.allows_private = allows_private
        self._resolve = resolve
        self._now_s = now_s
        # A semaphore lives as long as a lookup, or an attempt that waits for one, holds it.
        self._lookups: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def send(self, url: str, secret: str, document: EventDocument, deadline_s: float = DEADLINE_S) -> Attempt:
        """Send an event. The response's body is not read, and redirects are not followed.

        The deadline starts once the tenant's earlier lookups leave room for this one. The wait for that also ends after
        `deadline_s`.
        """
        lookups = self._lookups.setdefault(document["tenant_id"], asyncio.Semaphore(MAX_LOOKUPS_EACH))
        try:
            async with asyncio.timeout(deadline_s):
                await lookups.acquire()
        except TimeoutError:
            return Attempt(None, "the lookups of the tenant's hosts take too long", deadline_s)
        started_s = time.monotonic()
        status: int | None = None
        try:
            async with asyncio.timeout(deadline_s):
                addresses = await self._find(url, lookups)
                status = await self._post(url, secret, document, addresses, deadline_s)
            error = None if 200 <= status < 300 else f"the target answered with {status}"
        except TimeoutError:
            error = f"the target did not answer within {deadline_s:g} s"
        except TargetRefused as refused:
            error = str(refused)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as failure:
            # The error's text can repeat what the target has sent.
            error = f"the target cannot be reached ({type(failure).__name__})"
        return Attempt(status, error, time.monotonic() - started_s)

    async def _find(self, url: str, lookups: asyncio.Semaphore) -> Sequence[str]:
        """Return the addresses of a URL's host, all of which the server may call, and release the semaphore once the
        lookup has ended.
        """
        loop = asyncio.get_running_loop()

        def release(_: object) -> None:
            with suppress(RuntimeError):  # The loop can be closed by now.
                loop.call_soon_threadsafe(lookups.release)

        try:
            target = httpx.URL(url)
            if target.scheme != "https" and not self.allows_private:
                raise TargetRefused("the URL does not use https")
            port = target.port or (443 if target.scheme == "https" else 80)
            lookup = self._executor.submit(self._resolve, host_of(target), port)
        except BaseException:
            lookups.release()
            raise
        lookup.add_done_callback(release)
        try:
            addresses = await asyncio.wrap_future(lookup)
        except (OSError, UnicodeError) as error:
            if self.allows_private:
                raise httpx.ConnectError("the host has no address") from error
            raise TargetRefused(_NOT_PUBLIC) from error
        if not self.allows_private and not all(map(is_public, addresses)):
            raise TargetRefused(_NOT_PUBLIC)
        return addresses

    async def _post(
        self, url: str, secret: str, document: EventDocument, addresses: Sequence[str], deadline_s: float
    ) -> int:
        if self._certificates is None:
            # Reading the authorities' certificates takes 30 ms.
            self._certificates = await call_on(self._executor, httpx.create_ssl_context)
        body = msgspec.json.encode(document)
        headers = {
            "content-type": "application/json",
            "user-agent": "loramux",
            **signature_headers(secret, document["id"], int(self._now_s()), body),
        }
        tried = addresses[:MAX_ADDRESSES]
        timeout = httpx.Timeout(deadline_s, connect=deadline_s / (len(tried) + 1))
        # A client of its own for each attempt keeps no connection that a target could hold open.
        async with (
            httpx.AsyncClient(transport=PinnedTransport(self._certificates, tried), timeout=timeout) as client,
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
