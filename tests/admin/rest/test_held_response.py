from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from starlette.types import Message

from loramux.admin.rest import held_response
from loramux.admin.rest.held_response import HeldResponse

pytestmark = pytest.mark.anyio


async def test_client_that_stops_reading_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_response, "STALLED_S", 0.05)
    given_back = []

    async def parts() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000

    response = HeldResponse(parts(), lambda: given_back.append(True), {}, "text/csv")
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 3:
            await anyio.sleep_forever()

    with anyio.fail_after(5):
        await response({"type": "http", "extensions": {}}, anyio.sleep_forever, send)
    assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * 2]
    assert given_back == [True]
