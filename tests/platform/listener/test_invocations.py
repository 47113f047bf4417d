from __future__ import annotations

from typing import Any

import pytest

from loramux.adapter_store.formats.version_files.adapter_task import classification_task
from loramux.engine.protocol.messages import Add
from tests.platform.gateways import Gateway
from tests.platform.openai_api.test_bad_input import refused
from tests.platform.openai_api.test_request_fields import BOTH, CHAT, body_for, chunks_of
from tests.platform.scripted_engine import Script

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


MESSAGES = [{"role": "user", "content": "Yes"}]
PAIR = {"text_1": "Where is it?", "text_2": ["Here.", "There."]}
RANKED = {"query": "Where is it?", "documents": ["Here.", "There."]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "base", "input": ["Yes", "No"]}),
        ("/v1/embeddings", {"model": "base", "messages": MESSAGES, "encoding_format": "base64"}),
        ("/v1/embeddings", {"model": "search", "messages": MESSAGES, "dimensions": 2}),
        ("/classify", {"model": "mood", "input": "Yes"}),
        ("/classify", {"model": "mood", "messages": MESSAGES}),
        ("/classify", {"model": "mood", "messages": MESSAGES, "use_activation": False}),
        ("/score", {"model": "base", **PAIR}),
        ("/score", {"model": "rank", "queries": "a", "documents": ["b"]}),
        ("/rerank", {"model": "base", **RANKED}),
        ("/rerank", {"model": "acme/rank", **RANKED, "top_n": 1}),
        ("/pooling", {"model": "mood", "input": "Yes", "task": "classify"}),
        ("/pooling", {"model": "base", "messages": MESSAGES, "task": "embed"}),
        ("/v1/chat/completions", {"model": "search", "messages": MESSAGES, "max_tokens": 2, "documents": None}),
        ("/v1/completions", {"model": "search", "prompt": "Yes", "max_tokens": 2}),
    ],
)
async def test_fields_and_the_models_task_decide_which_call_answers(
    gateway: Gateway, path: str, body: dict[str, Any]
) -> None:
    gateway.add_adapter("acme", "search")
    gateway.add_adapter("acme", "mood", task=classification_task(3))
    gateway.add_adapter("acme", "rank", task=classification_task(1))

    def script(add: Add) -> Script:
        return Script(token_ids=add.prompt[: add.max_tokens], state=(1.0, 2.0, 3.0)[: add.num_labels or 3])

    gateway.engine.script = script
    answers = [await gateway.http.post(to, json=body) for to in (path, PATH)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    expected, answer = (without_names(answer.json()) for answer in answers)
    assert answer == expected
    first, second = gateway.usage()
    assert (first.endpoint, first.model, first.prompt_tokens) == (second.endpoint, second.model, second.prompt_tokens)


async def test_bytes_are_returned_as_by_the_call_itself(gateway: Gateway) -> None:
    body = {"model": "base", "input": ["Yes", "No"], "encoding_format": "bytes_only"}
    expected, answer = [(await gateway.http.post(to, json=body)).content for to in ("/v1/embeddings", PATH)]
    assert answer == expected
    assert len(answer) == 2 * 3 * 4


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "model"),
        ({"model": "base"}, "missing_required_parameter", "prompt"),
        ({"model": "base", "messages": []}, "invalid_value", "messages"),
        ({**body_for(CHAT), "prompt": "Hello"}, "unknown_parameter", "prompt"),
        ({"model": 3, "input": "Yes"}, "invalid_type", "model"),
        ({"model": "x" * 10_000, "input": "Yes"}, "invalid_value", "model"),
        ({"model": "base", "input": {}}, "invalid_value", "input"),
        ({"model": "base", "input": "Yes", "stream": True}, "unsupported_parameter", "stream"),
        ({"model": "base", "input": "Yes", "user": 3}, "invalid_type", "user"),
        ({"model": "base", "query": "Yes"}, "missing_required_parameter", "documents"),
        ({"model": "base", "text_1": "Yes"}, "invalid_value", "text_1"),
        ({"model": "base", "task": "token_embed", "input": "Yes"}, "invalid_value", "task"),
        ({**body_for(CHAT), "n": 0}, "invalid_value", "n"),
        ({**body_for(CHAT), "stream_options": {}}, "invalid_value", "stream_options"),
    ],
)
async def test_bad_body_is_refused(gateway: Gateway, body: dict[str, Any], code: str, param: str) -> None:
    await refused(gateway, PATH, 400, code, param, json=body)


async def test_malformed_and_large_bodies_are_refused(gateway: Gateway) -> None:
    await refused(gateway, PATH, 400, "invalid_json", None, content=b"[]")
    await refused(gateway, PATH, 413, "payload_too_large", None, content=b" " * (3 << 20))
    await refused(gateway, PATH, 404, "model_not_found", "model", json={"model": "unknown", "input": "Yes"})
    await refused(gateway, PATH, 401, "invalid_api_key", None, json={}, headers={"authorization": "Bearer wrong"})
