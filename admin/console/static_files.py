"""The console's public static files, read at startup. Versioned URLs let browsers cache them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from loramux.admin.console.rendering import STATIC

TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".md": "text/plain",
}
KEPT = "public, max-age=31536000, immutable"


class StaticFiles:
    """Serves exactly the files that existed at startup."""

    def __init__(self) -> None:
        self._files = {
            f"/{path.relative_to(STATIC).as_posix()}": (path.read_bytes(), TYPES[path.suffix])
            for path in STATIC.rglob("*")
            if path.is_file() and path.suffix in TYPES
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        path = scope["path"].removeprefix(scope["root_path"])
        found = self._files.get(path)
        response: Response
        if found is None or request.method not in ("GET", "HEAD"):
            response = PlainTextResponse("there is no such file\n", 404)
        else:
            content, media_type = found
            # Browsers must revalidate a file whose URL has no version, because it may change with the next release.
            headers = {"cache-control": KEPT if request.query_params.get("v") else "no-cache"}
            response = Response(content, media_type=media_type, headers=headers)
        await response(scope, receive, send)
