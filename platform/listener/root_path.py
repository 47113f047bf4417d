"""Serves an app below a prefix of its paths, for proxies that do not remove the prefix."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from loramux.platform.requests.error_responses import REMOVED_ROOT


class RootPath:
    """Middleware that removes `root` from paths that begin with it. Other paths stay."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            raw = self._root.encode()
            raw_path = scope.get("raw_path") or b""
            scope = {
                **scope,
                "path": scope["path"].removeprefix(self._root),
                REMOVED_ROOT: self._root,
                "raw_path": raw_path.removeprefix(raw) if raw_path.startswith(raw) else None,
            }
        await self._app(scope, receive, send)
