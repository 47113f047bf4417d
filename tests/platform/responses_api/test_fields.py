from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types.responses import response_create_params

from loramux.engine.protocol.messages import Add
from loramux.platform.bodies.request_body import validated
from loramux.platform.errors import InvalidRequest
from loramux.platform.responses_api.response_request import ResponseRequest
from tests.platform.gateways import Gateway
from tests.platform.responses_api.transcripts import RESPONSES

pytestmark = pytest.mark.anyio

PLAIN = {"model": "base", "input": "Hello"}
OPENAI = {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}
VALUES: dict[str, Any] = {
    "client_metadata": {"a": 1},
    "max_tool_calls": 3,
    "prompt_cache_key": "a",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "ann",
}
"""Values to send for the fields that have no effect."""


def test_every_field_of_openai_is_known() -> None:
    assert {*ResponseRequest.model_fields, *ResponseRequest.NEUTRAL} >= OPENAI


async def work(gateway: Gateway, **fields: Any) -> Add:
    response = await gateway.http.post(RESPONSES, json={**PLAIN, **fields})
    assert response.status_code == 200, response.text
    return msgspec.structs.replace(gateway.engine.adds[-1], sequence_id="")


async def test_neutral_values_and_fields_without_effect_change_nothing(gateway: Gateway) -> None:
    plain = await work(gateway)
    for number in range(1 + max(map(len, ResponseRequest.NEUTRAL.values()))):
        neutral = ResponseRequest.NEUTRAL
        fields = {name: (None, *values)[number] for name, values in neutral.items() if number <= len(values)}
        assert await work(gateway, **fields) == plain
    assert VALUES.keys() == {name for name in ResponseRequest.WITHOUT_EFFECT if "." not in name}
    assert await work(gateway, **VALUES) == plain
    streamed = await work(gateway, stream=True)
    assert await work(gateway, stream=True, stream_options={"include_obfuscation": False}) == streamed


@pytest.mark.parametrize("name", sorted(ResponseRequest.NEUTRAL))
def test_other_values_are_refused_by_name(name: str) -> None:
    for value in ("something", ["x"], {"x": 1}, 0.5):
        with pytest.raises(InvalidRequest) as caught:
            validated({**PLAIN, name: value}, ResponseRequest)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)
