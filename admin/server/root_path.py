"""Serving below a path that a proxy puts in front, whether the proxy takes it off before it asks us or not."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class UnderRootPath:
    """Tells the app below which path the outside sees it, so that its links lead back here."""

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
