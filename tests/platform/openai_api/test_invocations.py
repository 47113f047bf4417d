from __future__ import annotations

from typing import Any

import pytest

from tests.platform.gateways import Gateway
from tests.platform.openai_api.test_bad_input import refused
from tests.platform.openai_api.test_request_fields import BOTH, CHAT, body_for, chunks_of

pytestmark = pytest.mark.anyio

PATH = "/invocations"


def without_names(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@BOTH
async def test_body_decides_how_it_is_answered(gateway: Gateway, path: str) -> None:
    body = body_for(path, max_tokens=4)
    expected, answer = [(await gateway.http.post(to, json=body)).json() for to in (path, PATH)]
    assert without_names(answer) == without_names(expected)
    first, second = gateway.usage()
    assert (first.endpoint, first.completion_tokens) == (second.endpoint, second.completion_tokens)
    streamed = await gateway.http.post(PATH, json={**body, "stream": True})
    assert streamed.text.count("data: ") == len(await chunks_of(gateway, path, max_tokens=4)) + 1


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "model"),
        ({"model": "base"}, "missing_required_parameter", "prompt"),
        ({"model": "base", "messages": []}, "invalid_value", "messages"),
        ({**body_for(CHAT), "prompt": "Hello"}, "unknown_parameter", "prompt"),
        ({**body_for(CHAT), "n": 0}, "invalid_value", "n"),
        ({**body_for(CHAT), "stream_options": {}}, "invalid_value", "stream_options"),
    ],
)
async def test_bad_body_is_refused(gateway: Gateway, body: dict[str, Any], code: str, param: str) -> None:
    await refused(gateway, PATH, 400, code, param, json=body)


async def test_malformed_and_large_bodies_are_refused(gateway: Gateway) -> None:
    await refused(gateway, PATH, 400, "invalid_json", None, content=b"[]")
    await refused(gateway, PATH, 413, "payload_too_large", None, content=b" " * (3 << 20))
    await refused(gateway, PATH, 401, "invalid_api_key", None, json={}, headers={"authorization": "Bearer wrong"})
