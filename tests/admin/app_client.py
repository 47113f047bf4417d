from __future__ import annotations

import httpx
from starlette.types import ASGIApp

CONSOLE_HOST = "http://admin.example"


def client_of(app: ASGIApp, base_url: str = CONSOLE_HOST) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base_url)
