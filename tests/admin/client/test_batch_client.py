from __future__ import annotations

import httpx

from loramux.admin.client.batch_client import BatchClient
from loramux.admin.client.openai_server import OpenAIServer


def test_a_poll_waits_less_for_an_answer_than_an_upload() -> None:
    waits_s: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        waits_s.append(request.extensions["timeout"]["read"])
        return httpx.Response(200, json={"id": "one"})

    with BatchClient(OpenAIServer(url="http://127.0.0.1:1/v1", key=None)) as client:
        client._http._transport = httpx.MockTransport(answer)
        client.get("batch_1")
        client.create("file_1", "/v1/completions")
    assert waits_s == [30.0, 300.0]
