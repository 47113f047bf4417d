from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import select

from loramux.engine.text.text_tokenizer import MAX_TOKENISED_AT_ONCE
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.bodies.chat_request import MAX_MESSAGES, ChatRequest
from loramux.platform.bodies.prompts import MAX_PROMPTS
from loramux.platform.bodies.request_body import MAX_PARSED_AT_ONCE, parse_body_on
from loramux.platform.openai_api.completion_request import CompletionRequest
from loramux.platform.requests.services import NUM_COMPUTE_THREADS, GatewaySettings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.migrated import migrated_sqlite
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.replicas.lab import until

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def shared(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: ModelTokenizer, anyio_backend: str
) -> AsyncIterator[Gateway]:
    """A gateway for requests that are refused before they change anything, which `refused` checks."""
    database = Database(migrated_sqlite(tmp_path_factory.mktemp("shared") / "loramux.db"))
    with ThreadPoolExecutor(4) as threads:
        async with open_gateway(database, tokenizer, threads) as gateway:
            yield gateway
    database.close()


async def refused(gateway: Any, path: str, status: int, code: str, param: str | None, **sent: Any) -> dict[str, Any]:
    response = await gateway.http.post(path, **sent)
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error
    assert response.headers["x-request-id"].startswith("req_")
    assert gateway.engine.adds == []
    with gateway.database.read() as connection:
        assert connection.execute(select(schema.reservations)).all() == []
    return error


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"model": None}, "invalid_type", "model"),
        ({"model": 5}, "invalid_type", "model"),
        ({"model": "x" * 300}, "invalid_value", "model"),
        ({"model": "acme/a@1:b"}, "invalid_model_name", "model"),
        ({"model": "acme/a:b@1"}, "invalid_model_name", "model"),
        ({"prompt": None}, "invalid_value", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": [[]]}, "invalid_value", "prompt"),
        ({"prompt": [1, "a"]}, "invalid_value", "prompt"),
        ({"prompt": [1.5]}, "invalid_value", "prompt"),
        ({"prompt": [True]}, "invalid_value", "prompt"),
        ({"prompt": [-1]}, "invalid_value", "prompt"),
        ({"prompt": [1024]}, "invalid_value", "prompt"),
        ({"prompt": [5] * 256}, "context_length_exceeded", "prompt"),
        ({"prompt": "word " * 5000}, "context_length_exceeded", "prompt"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": -1}, "invalid_value", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
        ({"max_tokens": "5"}, "invalid_type", "max_tokens"),
        ({"max_tokens": True}, "invalid_type", "max_tokens"),
        ({"max_tokens": 10**30}, "invalid_value", "max_tokens"),
        ({"max_tokens": 256}, "context_length_exceeded", "max_tokens"),
        ({"temperature": -0.1}, "invalid_value", "temperature"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"temperature": True}, "invalid_type", "temperature"),
        ({"temperature": 10**400}, "invalid_type", "temperature"),
        ({"top_p": 0}, "invalid_value", "top_p"),
        ({"top_p": 1.01}, "invalid_value", "top_p"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 129}, "invalid_value", "n"),
        ({"prompt": ["a"] * 129}, "invalid_value", "n"),
        ({"seed": 2**63}, "invalid_value", "seed"),
        ({"seed": 0.5}, "invalid_type", "seed"),
        ({"stop": 5}, "invalid_type", "stop"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"stop": ["a", 5]}, "invalid_type", "stop[1]"),
        ({"stop_token_ids": [1024]}, "invalid_value", "stop_token_ids"),
        ({"allowed_token_ids": []}, "invalid_value", "allowed_token_ids"),
        ({"allowed_token_ids": [5, 1024]}, "invalid_value", "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "invalid_value", "allowed_token_ids"),
        ({"allowed_token_ids": [10**30]}, "invalid_value", "allowed_token_ids"),
        ({"allowed_token_ids": [5] * 1025}, "invalid_value", "allowed_token_ids"),
        ({"allowed_token_ids": 5}, "invalid_type", "allowed_token_ids"),
        ({"allowed_token_ids": [5, "6"]}, "invalid_type", "allowed_token_ids[1]"),
        ({"bad_words": ["a"] * 65}, "invalid_value", "bad_words"),
        ({"bad_words": ["a" * 129]}, "invalid_value", "bad_words"),
        ({"bad_words": ["a", ""]}, "invalid_value", "bad_words"),
        ({"bad_words": [" \n"]}, "invalid_value", "bad_words"),
        ({"bad_words": "a"}, "invalid_type", "bad_words"),
        ({"bad_words": ["a", 5]}, "invalid_type", "bad_words[1]"),
        ({"top_k": -2}, "invalid_value", "top_k"),
        ({"min_tokens": 17}, "invalid_value", "min_tokens"),
        ({"stream": "yes"}, "invalid_type", "stream"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"stream": True, "stream_options": {"usage": 1}}, "unknown_parameter", "stream_options.usage"),
        ({"logprobs": 6}, "invalid_value", "logprobs"),
        ({"logprobs": -1}, "invalid_value", "logprobs"),
        ({"logprobs": -2}, "invalid_value", "logprobs"),
        ({"logprobs": True}, "invalid_type", "logprobs"),
        ({"top_logprobs": 2}, "unknown_parameter", "top_logprobs"),
        ({"presence_penalty": 2.1}, "invalid_value", "presence_penalty"),
        ({"presence_penalty": -2.1}, "invalid_value", "presence_penalty"),
        ({"presence_penalty": "1"}, "invalid_type", "presence_penalty"),
        ({"frequency_penalty": -2.01}, "invalid_value", "frequency_penalty"),
        ({"frequency_penalty": True}, "invalid_type", "frequency_penalty"),
        ({"frequency_penalty": 10**400}, "invalid_type", "frequency_penalty"),
        ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
        ({"repetition_penalty": -1}, "invalid_value", "repetition_penalty"),
        ({"repetition_penalty": 101}, "invalid_value", "repetition_penalty"),
        ({"repetition_penalty": [1]}, "invalid_type", "repetition_penalty"),
        ({"min_p": -0.1}, "invalid_value", "min_p"),
        ({"min_p": 1.1}, "invalid_value", "min_p"),
        ({"min_p": "0.1"}, "invalid_type", "min_p"),
        ({"logit_bias": [[5, 1]]}, "invalid_type", "logit_bias"),
        ({"logit_bias": "5"}, "invalid_type", "logit_bias"),
        ({"logit_bias": {"5": 100.5}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": -101}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 10**400}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": True}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": None}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": {}}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"05": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {" 5": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5\n": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"\u0665": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"five": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"1024": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"1024": 0}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {str(i): "x" for i in range(300)}}, "invalid_value", "logit_bias"),
        ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids"),
        ({"stop_token_ids": [True]}, "invalid_type", "stop_token_ids[0]"),
        ({"ignore_eos": 1}, "invalid_type", "ignore_eos"),
        ({"min_tokens": -1}, "invalid_value", "min_tokens"),
        ({"best_of": 2, "n": 3}, "invalid_value", "best_of"),
        ({"best_of": 3, "stream": True}, "invalid_value", "best_of"),
        ({"best_of": 129}, "invalid_value", "best_of"),
        ({"best_of": 65, "prompt": ["a", "b"]}, "invalid_value", "best_of"),
        ({"best_of": 0}, "invalid_value", "best_of"),
        ({"best_of": True}, "invalid_type", "best_of"),
        ({"echo": "yes"}, "invalid_type", "echo"),
        ({"echo": True, "logprobs": 0, "stream": True}, "invalid_value", "echo"),
        ({"prompt_logprobs": 0, "stream": True}, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": 6}, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "invalid_value", "prompt_logprobs"),
        ({"logprob_token_ids": 5}, "invalid_type", "logprob_token_ids"),
        ({"logprob_token_ids": [5, "6"]}, "invalid_type", "logprob_token_ids[1]"),
        ({"return_tokens_as_token_ids": "yes"}, "invalid_type", "return_tokens_as_token_ids"),
        ({"include_reasoning": False}, "unknown_parameter", "include_reasoning"),
        ({"regex": 5}, "invalid_type", "regex"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
        ({"length_penalty": 0.5}, "unsupported_parameter", "length_penalty"),
        ({"early_stopping": "never"}, "unsupported_parameter", "early_stopping"),
        ({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "invalid_value", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 257}, "invalid_value", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "invalid_type", "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "invalid_value", "truncation_side"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 256}, "context_length_exceeded", "max_tokens"),
        ({"return_token_ids": "yes"}, "invalid_type", "return_token_ids"),
        ({"skip_special_tokens": 1}, "invalid_type", "skip_special_tokens"),
        ({"include_stop_str_in_output": "no"}, "invalid_type", "include_stop_str_in_output"),
        ({"priority": 2**31}, "invalid_value", "priority"),
        ({"priority": -(2**31)}, "invalid_value", "priority"),
        ({"priority": 1.5}, "invalid_type", "priority"),
        ({"priority": True}, "invalid_type", "priority"),
        ({"usage": {}}, "unknown_parameter", "usage"),
    ],
    ids=lambda value: repr(value)[:60],
)
async def test_a_bad_completion_is_refused(shared: Gateway, change: dict[str, Any], code: str, param: str) -> None:
    body = {"model": "base", "prompt": "Hello", **change}
    await refused(shared, TEXT, 400, code, param, json=body)


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "Hello"}, "invalid_type", "messages"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
        ({"messages": [{"role": "function", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "missing_required_parameter", "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_value", "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "unknown_parameter", "messages[0].weight"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "context_length_exceeded", "messages"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "invalid_value", "max_completion_tokens"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": True, "logprobs": True}, "invalid_type", "top_logprobs"),
        ({"top_logprobs": -2, "logprobs": True}, "invalid_value", "top_logprobs"),
        ({"include_reasoning": "no"}, "invalid_type", "include_reasoning"),
        ({"json_schema": "{}"}, "unknown_parameter", "json_schema"),
        ({"logprobs": 2}, "invalid_type", "logprobs"),
        ({"presence_penalty": 3}, "invalid_value", "presence_penalty"),
        ({"logit_bias": {"1024": 1}}, "invalid_value", "logit_bias"),
        ({"best_of": 1}, "unknown_parameter", "best_of"),
        ({"echo": "yes"}, "invalid_type", "echo"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter", "tools"),
        ({"reasoning_effort": "high"}, "unsupported_parameter", "reasoning_effort"),
        ({"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
        ({"use_beam_search": True, "n": 4}, "unsupported_parameter", "use_beam_search"),
    ],
    ids=lambda value: repr(value)[:60],
)
async def test_a_bad_chat_is_refused(shared: Gateway, change: dict[str, Any], code: str, param: str) -> None:
    body = {"model": "base", "messages": [{"role": "user", "content": "Hello"}], **change}
    await refused(shared, CHAT, 400, code, param, json=body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"functions": [{"name": "f"}]}, "functions is not supported: use `tools`, its newer form"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "the whitespace in JSON cannot be chosen"),
        ({"enable_thinking": False}, "enable_thinking is not a parameter of this call: use `chat_template_kwargs`"),
        ({"verbos": "low"}, "verbos is not a parameter of this call"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "the server reads only text, in parts of the types text, input_text, output_text, refusal, not 'image_url'",
        ),
        ({"use_beam_search": True}, ": there is no beam search; sample several choices with `n`"),
    ],
    ids=["older form", "nested", "another server's field", "unknown", "image", "beam search"],
)
async def test_a_refusal_says_why_or_what_to_use(gateway: Any, change: dict[str, Any], message: str) -> None:
    body = {"model": "base", "messages": [{"role": "user", "content": "Hello"}], **change}
    answer = await gateway.http.post(CHAT, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith(message)


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", CHAT),
        ("POST", "/v1/v1/chat/completions", CHAT),
        ("POST", "//v1/chat/completions", CHAT),
        ("POST", "/openai/v1/chat/completions", CHAT),
        ("POST", "/v1/tokenize", "/tokenize"),
        ("GET", "/models", "/v1/models"),
        ("POST", "/a/b/c/d/e/v1/completions", TEXT),
        ("GET", "/", None),
        ("POST", "/v1/images/generations", None),
        # Without its first segments, each of these paths is another call. One deletes a file.
        ("DELETE", "/v1/vector_stores/vs_1/files/file-1", None),
        ("DELETE", "/vector_stores/vs_1/files/file-1", None),
        ("DELETE", "/v1/vector_stores/v1/files/file-1", None),
        ("POST", "/v1/messages/batches", None),
        ("POST", "/v1/threads/t/messages", None),
        ("GET", "/v1/fine_tuning/models/x", None),
    ],
)
async def test_a_wrong_base_url_is_told_the_right_path(gateway: Any, method: str, path: str, meant: str | None) -> None:
    answer = await gateway.http.request(method, f"http://gateway{path}")
    error = answer.json()["error"]
    assert answer.status_code == 404
    assert "not_found" in answer.text
    expected = "there is nothing at this path"
    if meant is not None:
        expected += f": correct the client's base URL, so that it calls {meant}"
    assert error["message"] == expected


@pytest.mark.parametrize("path", ["/admin/v1/tenants", "/console", "/console/keys", "/metrics"])
async def test_a_path_of_the_admin_listener_is_told_its_port(gateway: Any, path: str) -> None:
    answer = await gateway.http.get(f"http://gateway{path}")
    assert answer.status_code == 404
    told = "there is nothing at this path: the admin API, the console and /metrics are on the server's other port"
    assert answer.json()["error"]["message"].startswith(told)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"model"',
        b'{"model": "base", "prompt": "a", "temperature": NaN}',
        b'{"model": "base", "prompt": "a", "temperature": -Infinity}',
        b'{"model": "base", "prompt": "a", "temperature": 1e999}',
        b'{"model": "base", "prompt": "a", "min_p": NaN}',
        b'{"model": "base", "prompt": "a", "logit_bias": {"5": NaN}}',
        b'{"model": "base", "prompt": "a", "logit_bias": {"5": 1, "5": 2}}',
        b'{"model": "base", "prompt": "a", "n": 1, "n": 2}',
        b'{"model": "base", "prompt": "\xff"}',
        b'{"model": "base", "prompt": "\\ud800"}',
        b'{"model": "base", "prompt": "a", "stop": ["\\uDC00x"]}',
        b'{"model": "base", "prompt": "a", "\\ud83e": 1}',
        b'{"model": "base", "prompt": ' + b"[" * 100_000,
        b'{"model": "base", "prompt": "a", "seed": ' + b"1" * 5000 + b"}",
    ],
    ids=[
        "empty", "cut", "list", "null", "text", "NaN", "Infinity", "overflow", "NaN min_p", "NaN bias",
        "bias of one token twice", "duplicate", "bytes",
        "half a pair", "other half", "half a name", "deep", "digits",
    ],
)  # fmt: skip
async def test_invalid_json_is_refused(shared: Gateway, content: bytes) -> None:
    await refused(shared, TEXT, 400, "invalid_json", None, content=content)


async def test_a_missing_field_is_named(shared: Gateway) -> None:
    await refused(shared, TEXT, 400, "missing_required_parameter", "prompt", json={"model": "base"})
    await refused(shared, CHAT, 400, "missing_required_parameter", "messages", json={"model": "base"})


@pytest.mark.parametrize("has_length", [True, False], ids=["declared", "chunked"])
async def test_too_long_body_is_refused_unread(gateway: Any, has_length: bool) -> None:
    size = gateway.services.settings.max_body_bytes + 1

    async def chunks() -> Any:
        for _ in range(0, size, 65536):
            yield b" " * 65536

    content = b" " * size if has_length else chunks()
    await refused(gateway, TEXT, 413, "payload_too_large", None, content=content)


MANY = 10_000
MESSAGE = {"role": "user", "content": "Hello"}
UNKNOWN = dict.fromkeys(map(str, range(MANY)), 1)


@pytest.mark.parametrize(
    ("path", "change", "code", "param"),
    [
        (CHAT, {"messages": [1] * MANY}, "invalid_type", "messages[0]"),
        (CHAT, {"messages": [MESSAGE] * (MAX_MESSAGES + 1)}, "invalid_value", "messages"),
        (CHAT, {"messages": [{**MESSAGE, "tool_calls": [1] * MANY}]}, "invalid_type", "messages[0].tool_calls[0]"),
        (CHAT, {"messages": [{**MESSAGE, "annotations": [1] * MANY}]}, "invalid_value", "messages[0].annotations"),
        (CHAT, {"messages": [{**MESSAGE, **UNKNOWN}]}, "unknown_parameter", "messages[0].0"),
        (CHAT, {"metadata": UNKNOWN}, "invalid_value", "metadata"),
        (TEXT, {"stop": [1] * MANY}, "invalid_type", "stop[0]"),
        (TEXT, {"stop_token_ids": ["x"] * MANY}, "invalid_type", "stop_token_ids[0]"),
        (TEXT, {"logit_bias": UNKNOWN}, "invalid_value", "logit_bias"),
        (TEXT, {"logit_bias": dict.fromkeys(map(str, range(300)), "x")}, "invalid_value", "logit_bias"),
        (TEXT, {"prompt": [[1]] * (MAX_PROMPTS + 1)}, "invalid_value", "prompt"),
        (TEXT, {"prompt": ["x"] * (MAX_PROMPTS + 1)}, "invalid_value", "prompt"),
        (TEXT, UNKNOWN, "unknown_parameter", "0"),
        (TEXT, {"stream_options": UNKNOWN}, "unknown_parameter", "stream_options.0"),
    ],
    ids=[
        "messages", "too many messages", "tool calls", "annotations", "a message's fields", "metadata", "stop",
        "stop ids", "logit bias", "values of a logit bias", "lists of ids", "texts", "fields", "nested fields",
    ],
)  # fmt: skip
async def test_body_full_of_errors_reports_only_one(
    shared: Gateway, path: str, change: dict[str, Any], code: str, param: str
) -> None:
    body = {"model": "base", **({"messages": [MESSAGE]} if path == CHAT else {"prompt": "Hello"}), **change}
    await refused(shared, path, 400, code, param, json=body)
    with pytest.raises(ValidationError) as caught:
        (ChatRequest if path == CHAT else CompletionRequest).model_validate(body)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(("size", "is_on_a_thread"), [(MAX_PARSED_AT_ONCE, False), (MAX_PARSED_AT_ONCE + 1, True)])
async def test_long_body_is_parsed_off_the_event_loop(size: int, is_on_a_thread: bool) -> None:
    computed = []

    async def compute(function: Any, *arguments: Any) -> Any:
        computed.append(function)
        return function(*arguments)

    body = json.dumps({"model": "base", "prompt": "Hello"}).encode().ljust(size)
    assert (await parse_body_on(compute, body, CompletionRequest.model_validate)).model == "base"
    assert bool(computed) == is_on_a_thread


async def test_sql_and_health_checks_do_not_wait_for_tokenization(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    encode = ModelTokenizer.encode
    begun: list[object] = []

    def slow(*arguments: Any) -> Any:
        begun.append(arguments)
        assert may_go_on.wait(60)
        return encode(*arguments)

    monkeypatch.setattr(ModelTokenizer, "encode", slow)
    # Bodies of this length are tokenized on a thread. Send more of them than there are threads.
    body = json.dumps({"model": "base", "prompt": "Hello", "max_tokens": 1}) + " " * MAX_TOKENISED_AT_ONCE
    asking = [asyncio.create_task(gateway.http.post(TEXT, content=body)) for _ in range(8)]
    await until(lambda: len(begun) == NUM_COMPUTE_THREADS)
    try:
        async with asyncio.timeout(30):
            assert (await gateway.http.get("/health/ready")).status_code == 200
            assert (await gateway.http.get("/v1/models")).status_code == 200
    finally:
        may_go_on.set()
    assert {response.status_code for response in await asyncio.gather(*asking)} == {200}


async def test_compute_threads_end_with_the_services(gateway: Any) -> None:
    running = await gateway.services.compute(threading.current_thread)
    assert running.is_alive()
    gateway.services.close()
    assert not running.is_alive()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"n": 9, "prompt": [5] * 100, "max_tokens": 11}, 200),
        ({"n": 9, "prompt": [5] * 100, "max_tokens": 12}, 400),
        ({"n": 4, "prompt": [[5] * 200, [5] * 50], "max_tokens": 1}, 400),
        ({"best_of": 9, "prompt": [5] * 100, "max_tokens": 12}, 400),
        ({"n": 3, "prompt": [[5] * 200, [5] * 50], "max_tokens": 1}, 200),
    ],
    ids=["fits", "one more", "long prompts", "best of many", "fewer choices"],
)
async def test_total_tokens_of_a_request_are_capped(gateway: Any, change: dict[str, Any], status: int) -> None:
    gateway.app.state.services = replace(gateway.services, settings=GatewaySettings(max_request_tokens=999))
    body = {"model": "base", **change}
    if status == 400:
        await refused(gateway, TEXT, 400, "invalid_value", "best_of" if "best_of" in change else "n", json=body)
    else:
        assert (await gateway.http.post(TEXT, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        ("Basic abc", "missing_api_key"),
        ("Bearer sk-lmx-0000000000000000-0000000000000000000000000000000000000000000", "invalid_api_key"),
        ("Bearer sk-openai", "invalid_api_key"),
        ("Bearer " + "x" * 8000, "invalid_api_key"),
    ],
    ids=["none", "empty", "no key", "basic", "unknown", "foreign", "long"],
)
@pytest.mark.parametrize("path", [TEXT, CHAT], ids=["completions", "chat"])
async def test_body_is_not_read_without_a_valid_key(gateway: Any, path: str, header: str | None, code: str) -> None:
    del gateway.http.headers["authorization"]
    headers = {} if header is None else {"authorization": header}
    error = await refused(gateway, path, 401, code, None, headers=headers, content=b"{")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v2/completions", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/metrics", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/models/base", 405, "method_not_allowed"),
    ],
)
async def test_unknown_paths_and_methods_have_the_envelope(
    gateway: Any, method: str, path: str, status: int, code: str
) -> None:
    response = await gateway.http.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.headers["x-request-id"]
