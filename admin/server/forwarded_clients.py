"""Sets the client's address and scheme for calls through trusted proxies, and limits concurrent calls per address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from loramux.admin.server.client_addresses import TrustedProxies, origin_of
from loramux.platform.errors import RateLimited
from loramux.platform.listener.error_forms import error_form
from loramux.platform.listener.root_path import RootPath
from loramux.platform.requests.error_responses import RequestIds, error_response, request_id_of

RETRY_AFTER_S = 1.0


class ForwardedClients:
    """ASGI middleware that counts requests instead of connections, because many clients share a proxy's connections."""

    def __init__(
        self,
        app: ASGIApp,
        proxies: TrustedProxies,
        max_per_address: int,
        on_refusal: Callable[[], None],
        root_path: str = "",
    ) -> None:
        self._app = app
        self._proxies = proxies
        self._max_per_address = max_per_address
        self._on_refusal = on_refusal
        # The form of the refusal depends on the path, and this middleware is outside the app, which removes the prefix.
        self._refusal = RootPath(RequestIds(self._refuse, error_form), root_path)
        # The number of requests in progress for each client address. Addresses without requests are removed.
        self._num_running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer = scope.get("client")
        if scope["type"] != "http" or peer is None or not self._proxies.trusts(peer[0]):
            await self._app(scope, receive, send)
            return
        said = {b"x-forwarded-for": b"", b"x-forwarded-proto": b""}
        for name, value in scope["headers"]:
            if name in said:
                said[name] = b",".join(filter(None, (said[name], value)))
        scheme = said[b"x-forwarded-proto"].decode("latin-1").strip()
        if scheme in ("http", "https"):
            scope["scheme"] = scheme
        client = self._proxies.client_of(peer[0], said[b"x-forwarded-for"].decode("latin-1"))
        scope["client"] = (client, 0)
        if self._proxies.trusts(client):
            # The call comes from the proxy itself, or the proxy does not forward the client's address.
            await self._app(scope, receive, send)
            return
        origin = origin_of(client)
        if self._num_running[origin] >= self._max_per_address:
            self._on_refusal()
            await self._refusal(scope, receive, send)
            return
        self._num_running[origin] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_running[origin] -= 1
            if not self._num_running[origin]:
                del self._num_running[origin]

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = RateLimited(
            f"{self._max_per_address} requests from this address are in progress; try again",
            code="too_many_connections",
            retry_after_s=RETRY_AFTER_S,
        )
        response = error_response(refusal, error_form(scope), request_id_of(Request(scope)))
        await response(scope, receive, send)
