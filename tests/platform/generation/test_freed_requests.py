from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from loramux.platform.errors import ApiError
from loramux.platform.generation.generation import Generation
from loramux.platform.requests import error_responses

pytestmark = pytest.mark.anyio

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
CALLS = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": {**MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4, "store": False},
    "/v1/messages": {**MESSAGES, "max_tokens": 4},
}


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", CALLS)
async def test_request_is_freed_without_a_garbage_collection(
    gateway: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    requests, begun = gateway.services.run.requests, []
    start = requests.start

    def started(*arguments: Any) -> Generation:
        generation = start(*arguments)
        begun.append(weakref.ref(generation))
        return generation

    monkeypatch.setattr(requests, "start", started)
    body = {"model": "base", "stream": stream, **CALLS[path]}
    answer = await gateway.http.post(path, json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200
    del answer
    async with asyncio.timeout(30):
        while begun[0]() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert len(begun) == 1


@pytest.mark.usefixtures("no_collections")
async def test_request_of_a_client_that_has_left_is_freed_without_a_garbage_collection(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, begun = gateway.services.run.requests, []
    start = requests.start

    def started(*arguments: Any) -> Generation:
        generation = start(*arguments)
        begun.append(weakref.ref(generation))
        asyncio.get_running_loop().call_soon(generation.abandon)
        return generation

    monkeypatch.setattr(requests, "start", started)
    with suppress(Exception):
        await gateway.http.post("/v1/completions", json={"model": "base", **CALLS["/v1/completions"]})
    async with asyncio.timeout(30):
        while begun[0]() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("no_collections")
async def test_refused_request_is_freed_without_a_garbage_collection(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, refusals = error_responses.error_response, []

    def noted(error: ApiError, *arguments: Any) -> Any:
        # Every frame of its traceback, and so the request, lives as long as the error.
        refusals.append(weakref.ref(error))
        return make(error, *arguments)

    monkeypatch.setattr(error_responses, "error_response", noted)
    gateway.limit("requests_per_minute", 1)
    body = {"model": "base", **CALLS["/v1/completions"]}
    # The thread that commits keeps the last one until its next commit.
    found = [(await gateway.http.post("/v1/completions", json=body)).status_code for _ in range(3)]
    assert found == [200, 429, 429]
    async with asyncio.timeout(30):
        while refusals[0]() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
