"""`/v1/embed` and `/v2/embed`, in the form of Cohere's API."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from loramux.engine.sequences.embedding import embedding_of
from loramux.platform.pooling_api import cohere_embeddings, embeddings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

VECTOR = [pytest.approx(number) for number in (0.6, 0.0, -0.8)]


async def test_version_2_returns_vectors_by_type_and_charges_the_prompts(
    gateway: Gateway, tokenizer: ModelTokenizer
) -> None:
    texts = ["Where is my order?", "Yes"]
    body = {"model": "base", "texts": texts, "input_type": "search_query", "embedding_types": ["float", "base64"]}
    response = await gateway.http.post("/v2/embed", json=body)
    num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    document = response.json()
    encoded = document["embeddings"].pop("base64")
    assert [struct.unpack("<3f", base64.b64decode(one)) for one in encoded] == [tuple(VECTOR)] * 2
    assert document == {
        "id": response.headers["x-request-id"].replace("req_", "embd-"),
        "response_type": "embeddings_by_type",
        "embeddings": {"float": [VECTOR, VECTOR]},
        "texts": texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}},
    }
    [event] = gateway.usage()
    assert (event.endpoint, event.prompt_tokens, event.completion_tokens) == ("embeddings", num_tokens, 0)


async def test_version_1_returns_bare_vectors_unless_types_are_named(gateway: Gateway) -> None:
    body: dict[str, Any] = {"model": "base", "texts": ["Yes"], "images": None}
    bare = (await gateway.http.post("/v1/embed", json=body)).json()
    assert (bare["response_type"], bare["embeddings"]) == ("embeddings_floats", [VECTOR])
    assert bare["meta"]["api_version"] == {"version": "1"}
    typed = (await gateway.http.post("/v1/embed", json={**body, "embedding_types": ["float"]})).json()
    assert (typed["response_type"], typed["embeddings"]) == ("embeddings_by_type", {"float": [VECTOR]})
    untyped = (await gateway.http.post("/v2/embed", json=body)).json()
    assert untyped["embeddings"] == {"float": [VECTOR]}


async def test_a_repeated_type_is_made_once(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(*args: Any, **fields: Any) -> Any:
        made.append(args)
        return embedding_of(*args, **fields)

    monkeypatch.setattr(cohere_embeddings, "embedding_of", counted)
    body = {"model": "base", "texts": ["Yes"], "embedding_types": ["float"] * 10_000}
    assert (await gateway.http.post("/v2/embed", json=body)).json()["embeddings"] == {"float": [VECTOR]}
    assert len(made) == 1


async def test_an_adapters_vectors_keep_their_places_and_can_be_shorter(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "search", files={"pooling.json": b'{"pooling": "mean", "normalize": false}'})
    gateway.engine.script = lambda add: Script(token_ids=(), state=(float(len(add.prompt)), 1.0, 2.0))
    body = {"model": "search", "texts": ["a a a", "a", "a a"], "output_dimension": 1}
    response = await gateway.http.post("/v2/embed", json=body)
    assert response.headers["x-loramux-adapter"] == "acme/search@1"
    [first], [second], [third] = response.json()["embeddings"]["float"]
    assert first > third > second
    assert {add.pooling for add in gateway.engine.adds} == {"mean"}


async def test_long_texts_are_truncated_unless_the_request_forbids_it(
    gateway: Gateway, tokenizer: ModelTokenizer
) -> None:
    text = "The harbour of Port Vale lies quiet. " * 100
    ids = tuple(tokenizer.encode(text))

    async def tokens(**fields: Any) -> tuple[int, ...]:
        response = await gateway.http.post("/v2/embed", json={"model": "base", "texts": [text], **fields})
        assert response.status_code == 200, response.text
        return tuple(gateway.engine.adds[-1].prompt)

    # The tokenizer adds the first token to the text.
    assert await tokens() == await tokens(truncate="END", max_tokens=10_000) == ids[:256]
    assert await tokens(truncate="START") == (ids[0], *ids[-255:])
    assert await tokens(max_tokens=5) == ids[:5]
    assert await tokens(truncate="START", max_tokens=5) == (ids[0], *ids[-4:])
    assert await tokens(truncate="START", max_tokens=5, add_special_tokens=False) == ids[-5:]


async def test_without_truncation_max_tokens_is_the_limit(gateway: Gateway, tokenizer: ModelTokenizer) -> None:
    texts = ["Yes", "Where is my order?"]
    num_tokens = len(tokenizer.encode(texts[1]))
    body = {"model": "base", "texts": texts, "truncate": "NONE"}
    assert (await gateway.http.post("/v2/embed", json={**body, "max_tokens": num_tokens})).status_code == 200
    refused = await gateway.http.post("/v2/embed", json={**body, "max_tokens": num_tokens - 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert f"texts[1] has {num_tokens} tokens" in refused.json()["error"]["message"]
    assert len(gateway.engine.adds) == len(texts)


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no texts": ({}, "texts", "missing_required_parameter"),
    "an empty list": ({"texts": []}, "texts", "invalid_value"),
    "a number": ({"texts": ["a", 1]}, "texts[1]", "invalid_type"),
    "too many": ({"texts": ["a"] * 2049}, "texts", "invalid_value"),
    "no tokens": ({"texts": ["a", ""], "add_special_tokens": False}, "texts", "invalid_value"),
    "an image": ({"texts": ["a"], "images": ["data:image/png;base64,"]}, "images", "unsupported_parameter"),
    "inputs instead of texts": ({"inputs": [{"content": []}]}, "inputs", "unsupported_parameter"),
    "another type": ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]", "invalid_value"),
    "a purpose": ({"texts": ["a"], "input_type": "image"}, "input_type", "invalid_value"),
    "too many dimensions": ({"texts": ["a"], "output_dimension": 4}, "output_dimension", "invalid_value"),
    "too long": ({"texts": ["a", "a " * 600], "truncate": "NONE"}, "texts", "context_length_exceeded"),
    "an OpenAI field": ({"texts": ["a"], "dimensions": 1}, "dimensions", "unknown_parameter"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_is_refused_by_name_and_costs_nothing(gateway: Gateway, case: str) -> None:
    fields, param, code = BAD[case]
    response = await gateway.http.post("/v2/embed", json={"model": "base", **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert not gateway.engine.adds
    assert not gateway.usage()


async def test_the_numbers_of_all_types_are_limited(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MAX_NUMBERS", 8)
    body = {"model": "base", "texts": ["a", "b"]}
    assert (await gateway.http.post("/v2/embed", json=body)).status_code == 200
    refused = await gateway.http.post("/v2/embed", json={**body, "embedding_types": ["float", "base64"]})
    assert "12 numbers, but at most 8" in refused.json()["error"]["message"]
    assert "set output_dimension" in refused.json()["error"]["message"]
