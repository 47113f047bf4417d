"""Every failure on the paths of the Messages API has Anthropic's envelope."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from loramux.platform.errors import ApiError, InvalidRequest
from loramux.platform.messages_api.message_errors import message_error
from tests.platform.gateways import Gateway
from tests.platform.messages_api.message_calls import ASKED, HEADERS, WEATHER, answers, message, post
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
BODY = {"model": "base", "max_tokens": 8, "messages": ASKED}


def refusal(response: httpx.Response, status: int, kind: str) -> str:
    """Check the envelope and return the error's message."""
    body = response.json()
    assert (response.status_code, body["error"]["type"]) == (status, kind), body
    assert body.keys() == {"type", "error", "request_id"}
    assert body["error"].keys() == {"type", "message"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", PATHS)
async def test_a_key_comes_in_either_header(path: str, gateway: Gateway) -> None:
    body = {name: value for name, value in BODY.items() if name != "max_tokens" or path == PATHS[0]}
    transport = httpx.ASGITransport(gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for headers in (
            {"x-api-key": gateway.key},
            {"authorization": f"Bearer {gateway.key}"},
            {"authorization": f"Bearer {gateway.key}", "x-api-key": "wrong"},
            {"authorization": "Basic eDp5", "x-api-key": gateway.key},
        ):
            response = await http.post(path, json=body, headers={**HEADERS, **headers})
            assert response.status_code == 200, response.text
        for headers in ({}, {"x-api-key": " "}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
            response = await http.post(path, json=body, headers={**HEADERS, **headers})
            refusal(response, 401, "authentication_error")


@pytest.mark.parametrize("path", PATHS)
async def test_the_version_must_be_known(path: str, gateway: Gateway) -> None:
    missing = await gateway.http.post(path, json=BODY)
    assert refusal(missing, 400, "invalid_request_error") == "anthropic-version: header is required"
    for version in ("2023-01-01", "latest", "x" * 500):
        response = await gateway.http.post(path, json=BODY, headers={"anthropic-version": version})
        assert len(refusal(response, 400, "invalid_request_error")) < 200
    for version in ("2023-06-01", "2026-10-21"):
        headers = {"anthropic-version": version, "anthropic-beta": "interleaved-thinking-2025-05-14,unknown-2099-01-01"}
        response = await gateway.http.post("/v1/messages", json=BODY, headers=headers)
        assert response.status_code == 200, response.text
    assert gateway.engine.adds[-1].max_tokens == 8


async def test_bodies_that_cannot_be_read(gateway: Gateway) -> None:
    async def sent(content: bytes, **headers: str) -> httpx.Response:
        return await gateway.http.post("/v1/messages", content=content, headers={**HEADERS, **headers})

    assert "not valid JSON" in refusal(await sent(b"{"), 400, "invalid_request_error")
    assert "unpaired surrogate" in refusal(
        await sent(json.dumps({**BODY, "system": "\ud800"}).encode()), 400, "invalid_request_error"
    )
    refusal(await sent(b"[" * 100_000), 400, "invalid_request_error")
    large = gateway.services.settings.max_body_bytes + 1
    refusal(await sent(b" " * large), 413, "request_too_large")
    refusal(await sent(gzip.compress(b" " * large), **{"content-encoding": "gzip"}), 413, "request_too_large")
    refusal(await sent(b"{}", **{"content-encoding": "br"}), 415, "invalid_request_error")


async def test_fields_are_named(gateway: Gateway) -> None:
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]
    told = refusal(await post(gateway, messages=image), 400, "invalid_request_error")
    assert told.startswith("messages[0].content[0]: image blocks are not supported")
    told = refusal(await post(gateway, stop_sequences=[""]), 400, "invalid_request_error")
    assert told.startswith("stop_sequences: ")
    bad = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}
    assert "output_config.format.schema" in refusal(await post(gateway, **bad), 400, "invalid_request_error")


async def test_fields_have_the_names_of_the_messages_api(tools: Gateway) -> None:
    wrong = {**WEATHER, "strict": True, "input_schema": {"type": "object", "properties": {"a": {"type": "nothing"}}}}
    told = refusal(await post(tools, tools=[wrong]), 400, "invalid_request_error")
    assert told.startswith("tools[0].input_schema: ")
    refused = InvalidRequest("the last message has no text", param="continue_final_message")
    assert message_error(refused, "req_1")["error"]["message"] == "messages: the last message has no text"


@pytest.mark.parametrize("path", PATHS)
async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_know(path: str, gateway: Gateway) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 5000}]}
    if path != PATHS[0]:
        fields["max_tokens"] = ...
    assert refusal(await post(gateway, path, **fields), 400, "invalid_request_error").startswith("prompt is too long: ")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("GET", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages/batches/msgbatch_1", 404, "not_found_error"),
        ("GET", "/v1/models/nobody", 404, "not_found_error"),
    ],
)
async def test_paths_and_methods(method: str, path: str, status: int, kind: str, gateway: Gateway) -> None:
    refusal(await gateway.http.request(method, path, headers=HEADERS), status, kind)


async def test_an_unknown_model_and_another_tenants_look_the_same(gateway: Gateway) -> None:
    gateway.add_adapter("other", "secret")
    told = [
        refusal(await post(gateway, model=model), 404, "not_found_error").replace(model, "MODEL")
        for model in ("other/secret", "other/nothing")
    ]
    assert told[0] == told[1]


async def test_a_limit_says_when_to_come_back(gateway: Gateway) -> None:
    gateway.limit("requests_per_minute", 1)
    await message(gateway)
    response = await post(gateway)
    assert "requests" in refusal(response, 429, "rate_limit_error")
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert response.headers["x-ratelimit-limit-requests"] == "1"


async def test_an_engine_that_restarts_is_overloaded(gateway: Gateway) -> None:
    gateway.engine.die()
    response = await post(gateway)
    refusal(response, 529, "overloaded_error")
    assert int(response.headers["retry-after"]) >= 1
    gateway.engine.revive()


async def test_a_failure_before_the_first_token_has_a_status(gateway: Gateway) -> None:
    gateway.engine.script = lambda add: Script(token_ids=(), error="overloaded")
    for stream in (False, True):
        refusal(await post(gateway, stream=stream), 529, "overloaded_error")


async def test_an_internal_error_has_the_envelope(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(gateway.services.callers.resolver, "resolve", fails)
    transport = httpx.ASGITransport(gateway.app, raise_app_exceptions=False)
    headers = {**HEADERS, "x-api-key": gateway.key}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as http:
        assert "defect" not in refusal(await http.post("/v1/messages", json=BODY), 500, "api_error")


async def test_other_paths_keep_the_openai_envelope(gateway: Gateway) -> None:
    for path in ("/v1/completions", "/v1/messagesx", "/v1/models/nobody"):
        response = await gateway.http.get(path)
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert "request-id" not in response.headers


async def test_models_have_anthropics_form_for_its_clients(gateway: Gateway) -> None:
    for name in ("alto", "basso"):
        gateway.add_adapter("acme", name)
    listed = (await gateway.http.get("/v1/models", params={"limit": 2}, headers=HEADERS)).json()
    assert (len(listed["data"]), listed["has_more"]) == (2, True)
    rest = await gateway.http.get("/v1/models", params={"after_id": listed["last_id"]}, headers=HEADERS)
    names = [model["id"] for model in (*listed["data"], *rest.json()["data"])]
    openai = (await gateway.http.get("/v1/models")).json()
    assert names == [model["id"] for model in openai["data"]]
    assert {"base", "acme/alto", "acme/basso"} == set(names)
    one = (await gateway.http.get("/v1/models/alto", headers=HEADERS)).json()
    assert (one["type"], one["id"], one["max_input_tokens"]) == ("model", "alto", 256)
    for path in ("/v1/models?limit=0", "/v1/models?after_id=nobody"):
        refusal(await gateway.http.get(path, headers=HEADERS), 400, "invalid_request_error")
    refusal(await gateway.http.get("/v1/models", headers={"anthropic-version": "1"}), 400, "invalid_request_error")


async def test_a_limited_key_is_refused(gateway: Gateway) -> None:
    answers(gateway, "It is hot.")
    key = gateway.key_of("acme", "tenant:read")
    headers = {**HEADERS, "authorization": f"Bearer {key}"}
    for path in PATHS:
        body = {name: value for name, value in BODY.items() if name != "max_tokens" or path == PATHS[0]}
        refusal(await gateway.http.post(path, json=body, headers=headers), 403, "permission_error")


def test_every_status_has_a_type() -> None:
    error = ApiError("x", param="y")
    error.status = 418
    assert message_error(error, "req_1")["error"] == {"type": "invalid_request_error", "message": "y: x"}
