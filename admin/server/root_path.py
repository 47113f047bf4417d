"""Serving under a proxy's path prefix, whether or not the proxy strips the prefix from requests."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class UnderRootPath:
    """Sets the app's public path prefix in each request, so that the app's links work through the proxy."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root, path = self._root_path, scope["path"]
            if not (path == root or path.startswith(f"{root}/")):
                scope = {**scope, "path": root + path, "raw_path": root.encode() + (scope.get("raw_path") or b"")}
            scope = {**scope, "root_path": root}
        await self._app(scope, receive, send)
