from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from fastapi import Depends, FastAPI

from loramux.platform.listener.openapi_route import ListenerDocument

pytestmark = pytest.mark.anyio


async def test_document_is_made_once_and_beside_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    is_described, made_by = threading.Event(), []

    def describe(self: ListenerDocument, app: FastAPI) -> dict[str, str]:
        made_by.append(threading.current_thread())
        assert is_described.wait(60)
        return {"openapi": "3.1.0"}

    monkeypatch.setattr(ListenerDocument, "of", describe)
    app = FastAPI(openapi_url=None)
    document = ListenerDocument(description="", public=frozenset(), readers="")
    app.include_router(document.router(Depends(lambda: None)))
    app.add_api_route("/other", lambda: "answered")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        asked = [asyncio.create_task(http.get("/openapi.json")) for _ in range(2)]
        while not made_by:  # noqa: ASYNC110  another thread sets no event here
            await asyncio.sleep(0.001)
        assert (await http.get("/other")).json() == "answered"
        is_described.set()
        assert [(await one).json() for one in asked] == [{"openapi": "3.1.0"}] * 2
        assert (await http.get("/openapi.json")).status_code == 200
    assert len(made_by) == 1
