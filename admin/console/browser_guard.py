"""Security headers for every response, and checks of the requests that forms send."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # `no-referrer` would hide the origin that forms must send.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
CSRF_FIELD = "csrf"
CSRF_HEADER = "x-csrf-token"


class SecurityHeaders:
    """Adds security headers to every response, and `no-store` to responses that do not set `cache-control`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._app(scope, receive, send_guarded)


def is_from_elsewhere(request: Request) -> bool:
    """Return whether the browser reports that another site sent the request. A page cannot forge this report."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    # Over plain HTTP, browsers send only `Origin`. A proxy may have terminated TLS, so the scheme is not compared.
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower()


def is_token_right(presented: str | None, expected: str) -> bool:
    return presented is not None and hmac.compare_digest(presented.encode("utf-8", "replace"), expected.encode())


def local_path(wanted: str) -> str | None:
    """Return the path if it stays on this host, or None if it could lead to another host."""
    if not wanted.startswith("/") or wanted.startswith(("//", "/\\")) or "\\" in wanted:
        return None
    if len(wanted) > 1000 or not (wanted.isascii() and wanted.isprintable()):
        return None
    return wanted
