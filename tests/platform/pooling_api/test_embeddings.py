"""`/v1/embeddings`, with OpenAI's client and raw calls."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, RateLimitError

from loramux.adapter_store.formats.version_files.pooling_files import Pooling
from loramux.engine.protocol.messages import Add
from loramux.engine.sequences.embedding import embedding_of
from loramux.migrations.database import Database
from loramux.platform.pooling_api import embeddings
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

TEXT = "The harbour of Port Vale lies quiet."


@pytest.fixture
async def raw(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[Gateway]:
    """A gateway whose base has embeddings that are the means of all states, not scaled."""
    settings = GatewaySettings(pooling=Pooling("mean", is_normalized=False), max_request_tokens=2000)
    async with open_gateway(accounts, tokenizer, threads, settings) as gateway:
        yield gateway


async def test_openais_client_gets_unit_vectors_and_the_ledger_the_prompts_tokens(
    gateway: Gateway, tokenizer: ModelTokenizer
) -> None:
    answer = await gateway.openai.embeddings.create(model="base", input=[TEXT, "Yes"])
    assert [one.index for one in answer.data] == [0, 1]
    assert answer.data[0].embedding == pytest.approx([0.6, 0.0, -0.8])
    num_tokens = len(tokenizer.encode(TEXT)) + len(tokenizer.encode("Yes"))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    [event] = gateway.usage()
    assert (event.prompt_tokens, event.completion_tokens, event.cached_tokens) == (num_tokens, 0, 0)
    assert (event.status, event.endpoint, event.model) == ("completed", "embeddings", "base")
    assert [(add.pooling, add.max_tokens) for add in gateway.engine.adds] == [("last", 0)] * 2


async def test_the_body_matches_openais_exactly(gateway: Gateway) -> None:
    body = {"model": "base", "input": [1, 2, 3], "dimensions": 2, "encoding_format": "float", "user": "me"}
    response = await gateway.http.post("/v1/embeddings", json=body)
    document = response.json()
    assert document == {
        "id": response.headers["x-request-id"].replace("req_", "embd-"),
        "object": "list",
        "created": document["created"],
        "model": "base",
        "data": [{"object": "embedding", "index": 0, "embedding": [1.0, 0.0]}],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    assert gateway.usage()[0].end_user == "me"


async def test_base64_holds_little_endian_floats(gateway: Gateway) -> None:
    body = {"model": "base", "input": "Yes", "encoding_format": "base64"}
    [one] = (await gateway.http.post("/v1/embeddings", json=body)).json()["data"]
    assert struct.unpack("<3f", base64.b64decode(one["embedding"])) == pytest.approx((0.6, 0.0, -0.8))


async def test_base64_holds_numbers_in_the_format_and_order_asked_for(gateway: Gateway) -> None:
    body = {"model": "base", "input": "Yes", "encoding_format": "base64", "endianness": "big", "embed_dtype": "float16"}
    [one] = (await gateway.http.post("/v1/embeddings", json=body)).json()["data"]
    assert struct.unpack(">3e", base64.b64decode(one["embedding"])) == pytest.approx((0.6, 0.0, -0.8), rel=1e-3)


async def test_bytes_are_described_by_a_header_as_in_vllm(gateway: Gateway) -> None:
    body = {"model": "base", "input": ["Yes", "No"], "encoding_format": "bytes", "embed_dtype": "fp8_e5m2"}
    response = await gateway.http.post("/v1/embeddings", json=body)
    assert response.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(response.headers["metadata"])
    [event] = gateway.usage()
    item = {"embed_dtype": "fp8_e5m2", "endianness": "little", "shape": [3]}
    assert metadata == {
        "id": response.headers["x-request-id"].replace("req_", "embd-"),
        "created": metadata["created"],
        "model": "base",
        "data": [{"index": 0, "start": 0, "end": 3, **item}, {"index": 1, "start": 3, "end": 6, **item}],
        "usage": {"prompt_tokens": event.prompt_tokens, "total_tokens": event.prompt_tokens},
    }
    # The upper bytes of float16: 0.625, 0 and -0.75.
    assert response.content == bytes([0x39, 0x00, 0xBA]) * 2


async def test_bytes_alone_have_no_description_and_can_be_many(gateway: Gateway) -> None:
    gateway.engine.script = lambda add: Script(token_ids=(), state=(float(add.prompt[-1]), 0.0, 0.0))
    body = {"model": "base", "input": [[2], [3]] * 300, "encoding_format": "bytes_only", "normalize": False}
    response = await gateway.http.post("/v1/embeddings", json={**body, "dimensions": 1})
    assert "metadata" not in response.headers
    assert struct.unpack("<600f", response.content) == (2.0, 3.0) * 300
    body = {"model": "base", "input": [[2]] * 512, "encoding_format": "bytes"}
    described = await gateway.http.post("/v1/embeddings", json=body)
    assert len(described.headers["metadata"]) < 65_000
    failing = Script(token_ids=(), error="not_finite")
    gateway.engine.script = lambda add: failing
    refused = await gateway.http.post("/v1/embeddings", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "not_finite")


async def test_the_files_of_the_base_choose_and_the_request_decides_about_the_length(raw: Gateway) -> None:
    async def made(**fields: Any) -> list[float]:
        body = {"model": "base", "input": "Yes", **fields}
        [one] = (await raw.http.post("/v1/embeddings", json=body)).json()["data"]
        embedding: list[float] = one["embedding"]
        return embedding

    assert await made() == [3.0, 0.0, -4.0]
    assert await made(normalize=True, dimensions=1) == [1.0]
    assert await made(use_activation=True) == pytest.approx([0.6, 0.0, -0.8])
    raw.engine.script = lambda add: Script(token_ids=(), state=(0.0, 0.0, 0.0))
    assert await made(normalize=True) == [0.0, 0.0, 0.0]
    assert {add.pooling for add in raw.engine.adds} == {"mean"}


async def test_a_conversation_becomes_the_prompt_of_its_template(gateway: Gateway) -> None:
    chat = {"model": "base", "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}

    async def tokens(path: str, **fields: Any) -> list[int]:
        response = await gateway.http.post(path, json={**chat, **fields})
        assert response.status_code == 200, response.text
        return response.json()["tokens"] if path == "/tokenize" else list(gateway.engine.adds[-1].prompt)

    for fields in (
        {"add_generation_prompt": False},
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "add_special_tokens": True},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        assert await tokens("/v1/embeddings", **fields) == await tokens("/tokenize", **fields)
    # As in vLLM, and unlike in a chat, no answer is asked for.
    assert await tokens("/v1/embeddings") == await tokens("/tokenize", add_generation_prompt=False)
    gateway.add_adapter(
        "acme", "search", files={"chat_template.jinja": b"{% for m in messages %}<{{ m.content }}>{% endfor %}"}
    )
    chat["model"] = "search"
    assert gateway.services.prompts.tokenizer.decode(await tokens("/v1/embeddings")) == f"<{TEXT}>"


async def test_every_input_keeps_its_place(gateway: Gateway) -> None:
    def script(add: Add) -> Script:
        return Script(token_ids=(), state=(float(add.prompt[-1]), 0.0, 0.0), delay_s=0.0)

    gateway.engine.script = script
    inputs = [[number] * (1 + number % 3) for number in range(1, 301)]
    answer = await gateway.openai.embeddings.create(
        model="base", input=inputs, extra_body={"normalize": False}, encoding_format="float"
    )
    assert [one.embedding[0] for one in answer.data] == [float(number) for number in range(1, 301)]
    assert answer.usage.prompt_tokens == sum(map(len, inputs))


async def test_an_adapter_makes_the_vectors_of_its_name(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "search")
    response = await gateway.http.post("/v1/embeddings", json={"model": "acme/search", "input": "Yes"})
    assert response.headers["x-loramux-adapter"] == "acme/search@1"
    assert gateway.engine.adds[0].digest is not None
    assert gateway.usage()[0].model == "acme/search@1"


async def test_a_versions_own_file_chooses_its_pooling(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "search", files={"pooling.json": b'{"pooling": "cls", "normalize": false}'})
    body = {"model": "search", "input": "Yes"}
    [one] = (await gateway.http.post("/v1/embeddings", json=body)).json()["data"]
    assert one["embedding"] == [3.0, 0.0, -4.0]
    assert gateway.engine.adds[0].pooling == "cls"


async def test_long_inputs_are_truncated_only_if_asked(gateway: Gateway) -> None:
    async def tokens(**fields: Any) -> tuple[int, ...]:
        ids = list(range(2, 302))
        response = await gateway.http.post("/v1/embeddings", json={"model": "base", "input": ids, **fields})
        assert response.status_code == 200, response.text
        return gateway.engine.adds[-1].prompt

    assert await tokens(truncate_prompt_tokens=5) == (2, 3, 4, 5, 6)
    assert await tokens(truncate_prompt_tokens=5, truncation_side="left") == (297, 298, 299, 300, 301)
    assert len(await tokens(truncate_prompt_tokens=-1)) == 256


async def test_an_input_as_long_as_the_context_fits(gateway: Gateway) -> None:
    answer = await gateway.openai.embeddings.create(model="base", input=[2] * 256)
    assert answer.usage.prompt_tokens == 256


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({}, "input", "missing_required_parameter"),
    "an empty list": ({"input": []}, "input", "invalid_value"),
    "no tokens": ({"input": "", "add_special_tokens": False}, "input", "invalid_value"),
    "one without tokens": ({"input": ["a", ""], "add_special_tokens": False}, "input", "invalid_value"),
    "an empty prompt": ({"input": [[1], []]}, "input", "invalid_value"),
    "an object": ({"input": {"text": "a"}}, "input", "invalid_value"),
    "mixed": ({"input": ["a", [1]]}, "input", "invalid_value"),
    "a negative id": ({"input": [-1]}, "input", "invalid_value"),
    "an unknown id": ({"input": [5000]}, "input", "invalid_value"),
    "a float": ({"input": [1.5]}, "input", "invalid_value"),
    "too long": ({"input": [[1], [1] * 257]}, "input", "context_length_exceeded"),
    "too long a text": ({"input": "a" * 100_000}, "input", "context_length_exceeded"),
    "too many": ({"input": ["a"] * 2049}, "input", "invalid_value"),
    "a stream": ({"input": "a", "stream": True}, "stream", "unsupported_parameter"),
    "dimensions of 0": ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
    "too many dimensions": ({"input": "a", "dimensions": 4}, "dimensions", "invalid_value"),
    "another encoding": ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
    "bfloat16 in digits": ({"input": "a", "embed_dtype": "bfloat16"}, "embed_dtype", "invalid_value"),
    "big-endian digits": (
        {"input": "a", "encoding_format": "float", "endianness": "big"},
        "endianness",
        "invalid_value",
    ),
    "an unknown dtype": (
        {"input": "a", "encoding_format": "base64", "embed_dtype": "int8"},
        "embed_dtype",
        "invalid_value",
    ),
    "an unknown order": (
        {"input": "a", "encoding_format": "bytes", "endianness": "middle"},
        "endianness",
        "invalid_value",
    ),
    "too many to describe": ({"input": [[1]] * 513, "encoding_format": "bytes"}, "encoding_format", "invalid_value"),
    "a temperature": ({"input": "a", "temperature": 1}, "temperature", "unknown_parameter"),
    "a conflict": ({"input": "a", "normalize": True, "use_activation": False}, "use_activation", "invalid_value"),
    "truncation to 0": ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    "truncation too late": (
        {"input": "a", "truncate_prompt_tokens": 257},
        "truncate_prompt_tokens",
        "invalid_value",
    ),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_is_refused_by_name_and_costs_nothing(gateway: Gateway, case: str) -> None:
    fields, param, code = BAD[case]
    response = await gateway.http.post("/v1/embeddings", json={"model": "base", **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["code"] == code
    assert not gateway.engine.adds
    assert not gateway.usage()


async def test_the_tokens_and_numbers_of_one_call_are_limited(raw: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequestError, match="input has 2048 tokens in total, but at most 2000"):
        await raw.openai.embeddings.create(model="base", input=[[1] * 256] * 8)
    monkeypatch.setattr(embeddings, "MAX_NUMBERS", 8)
    with pytest.raises(BadRequestError, match="9 numbers, but at most 8"):
        await raw.openai.embeddings.create(model="base", input=[[1], [2], [3]])
    assert not raw.engine.adds


async def test_a_quota_counts_prompt_tokens_and_is_never_passed(gateway_on_each: Gateway) -> None:
    # Its clock stands still. Otherwise, the bucket would gain a token in half a second.
    gateway = gateway_on_each
    gateway.limit("tokens_per_minute", 100)
    await gateway.openai.embeddings.create(model="base", input=[[1] * 30, [2] * 30])
    with pytest.raises(RateLimitError) as refused:
        await gateway.openai.embeddings.create(model="base", input=[3] * 41)
    assert "max_tokens" not in refused.value.message
    await gateway.openai.embeddings.create(model="base", input=[3] * 40)
    assert [event.prompt_tokens for event in gateway.usage()] == [60, 40]


async def test_an_engine_that_fails_bills_nothing(gateway: Gateway) -> None:
    gateway.engine.script = lambda add: Script(token_ids=(), error="not_finite")
    response = await gateway.http.post("/v1/embeddings", json={"model": "base", "input": "Yes"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "not_finite")
    [event] = gateway.usage()
    assert (event.status, event.prompt_tokens, event.completion_tokens) == ("model_failed", 0, 0)


def test_rounding_to_float32_keeps_unit_length() -> None:
    vector = np.random.default_rng(0).normal(size=4096).astype("<f4")
    made = embedding_of(vector.tobytes(), 1024, is_normalized=True)
    assert made.shape == (1024,)
    assert float(np.linalg.norm(made.astype(np.float64))) == pytest.approx(1.0, abs=1e-6)
