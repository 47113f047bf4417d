"""`/classify` and `/score`."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError

from loramux.adapter_store.formats.version_files.adapter_task import EMBEDDING_TASK, classification_task
from loramux.engine.protocol.messages import Add
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio


@pytest.fixture
def classifiers(gateway: Gateway) -> Gateway:
    """A gateway with classifiers whose engine answers with the logits 1, 2, ..."""
    gateway.add_adapter("acme", "mood", task=classification_task(3, ("bad", "so-so", "good")))
    gateway.add_adapter("acme", "tags", task=classification_task(2, problem_type="multi_label_classification"))
    gateway.add_adapter("acme", "price", task=classification_task(1, problem_type="regression"))
    gateway.add_adapter("acme", "rank", task=classification_task(1))

    def script(add: Add) -> Script:
        state = tuple(float(1 + label) for label in range(add.num_labels or 3))
        return Script(token_ids=add.prompt[: add.max_tokens], state=state)

    gateway.engine.script = script
    return gateway


async def test_the_body_of_classify_matches_vllms_exactly(classifiers: Gateway, tokenizer: ModelTokenizer) -> None:
    response = await classifiers.http.post("/classify", json={"model": "acme/mood", "input": ["Yes", "No"]})
    document = response.json()
    weights = [math.exp(one) for one in (1, 2, 3)]
    probs = [pytest.approx(one / sum(weights)) for one in weights]
    num_tokens = len(tokenizer.encode("Yes")) + len(tokenizer.encode("No"))
    assert document == {
        "id": response.headers["x-request-id"].replace("req_", "classify-"),
        "object": "list",
        "created": document["created"],
        "model": "acme/mood",
        "data": [{"index": index, "label": "good", "probs": probs, "num_classes": 3} for index in range(2)],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    assert [(add.pooling, add.num_labels, add.max_tokens) for add in classifiers.engine.adds] == [("last", 3, 0)] * 2
    [event] = classifiers.usage()
    assert (event.endpoint, event.model, event.prompt_tokens, event.completion_tokens) == (
        "classify",
        "acme/mood@1",
        num_tokens,
        0,
    )


@pytest.mark.parametrize(
    ("model", "fields", "probs", "label"),
    [
        ("tags", {}, [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))], "LABEL_1"),
        ("price", {}, [1.0], "LABEL_0"),
        ("rank", {}, [1 / (1 + math.exp(-1))], "LABEL_0"),
        ("mood", {"use_activation": False}, [1.0, 2.0, 3.0], "good"),
    ],
)
async def test_the_problem_type_chooses_the_activation(
    classifiers: Gateway, model: str, fields: dict[str, Any], probs: list[float], label: str
) -> None:
    body = {"model": model, "input": [1, 2, 3], **fields}
    [one] = (await classifiers.http.post("/v1/classify", json=body)).json()["data"]
    assert one == {"index": 0, "label": label, "probs": pytest.approx(probs), "num_classes": len(probs)}


async def test_a_classifier_with_one_label_scores_pairs(classifiers: Gateway, tokenizer: ModelTokenizer) -> None:
    body = {"model": "rank", "text_1": "Where is it?", "text_2": ["Here.", "There."]}
    response = await classifiers.http.post("/score", json=body)
    document = response.json()
    pairs = [tokenizer.joined("Where is it?", text) for text in ("Here.", "There.")]
    assert [add.prompt for add in classifiers.engine.adds] == pairs
    num_tokens = sum(map(len, pairs))
    score = pytest.approx(1 / (1 + math.exp(-1)))
    assert document == {
        "id": response.headers["x-request-id"].replace("req_", "score-"),
        "object": "list",
        "created": document["created"],
        "model": "rank",
        "data": [{"index": index, "object": "score", "score": score} for index in range(2)],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    [event] = classifiers.usage()
    assert (event.endpoint, event.prompt_tokens) == ("score", num_tokens)


async def test_a_conversation_is_classified_as_its_prompt(classifiers: Gateway, tokenizer: ModelTokenizer) -> None:
    chat = {"model": "mood", "messages": [{"role": "user", "content": "Yes"}, {"role": "assistant", "content": "No"}]}
    document = (await classifiers.http.post("/classify", json=chat)).json()
    [one] = document["data"]
    assert (one["label"], one["num_classes"]) == ("good", 3)
    tokens = (await classifiers.http.post("/tokenize", json={**chat, "add_generation_prompt": False})).json()["tokens"]
    assert [list(add.prompt) for add in classifiers.engine.adds] == [tokens]
    assert document["usage"]["prompt_tokens"] == len(tokens)


async def test_pooling_returns_what_the_model_is_for(classifiers: Gateway) -> None:
    response = await classifiers.http.post("/pooling", json={"model": "rank", "input": ["a", "b"]})
    document = response.json()
    probability = pytest.approx(1 / (1 + math.exp(-1)))
    assert document["data"] == [{"index": index, "object": "pooling", "data": [probability]} for index in range(2)]
    assert document["id"] == response.headers["x-request-id"].replace("req_", "pool-")
    body = {"model": "mood", "input": "a", "task": "classify", "use_activation": False, "encoding_format": "base64"}
    [one] = (await classifiers.http.post("/pooling", json=body)).json()["data"]
    assert np.frombuffer(base64.b64decode(one["data"]), "<f4").tolist() == [1.0, 2.0, 3.0]
    raw = await classifiers.http.post("/pooling", json={**body, "encoding_format": "bytes", "embed_dtype": "bfloat16"})
    assert json.loads(raw.headers["metadata"])["data"] == [
        {"index": 0, "embed_dtype": "bfloat16", "endianness": "little", "start": 0, "end": 6, "shape": [3]}
    ]
    assert (np.frombuffer(raw.content, "<u2").astype("<u4") << 16).view("<f4").tolist() == [1.0, 2.0, 3.0]
    for model, task in (("mood", "embed"), ("base", "classify")):
        refused = await classifiers.http.post("/pooling", json={"model": model, "input": "a", "task": task})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "wrong_task")
    assert [event.endpoint for event in classifiers.usage()] == ["pooling"] * 3


@pytest.fixture
def ranker(classifiers: Gateway, tokenizer: ModelTokenizer) -> Gateway:
    """A gateway whose classifier `rank` finds a pair the more relevant the longer it is."""
    classifiers.engine.script = lambda add: Script(token_ids=(), state=(len(add.prompt) / 100,))
    return classifiers


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ordered_by_relevance(ranker: Gateway, tokenizer: ModelTokenizer, path: str) -> None:
    documents = ["Here.", "Far away from here, and nowhere near.", "Over there, not here."]
    body = {"model": "rank", "query": "Where is it?", "documents": documents}
    response = await ranker.http.post(path, json=body)
    sizes = [len(tokenizer.joined("Where is it?", text)) for text in documents]
    results = [
        {
            "index": index,
            "document": {"text": documents[index]},
            "relevance_score": pytest.approx(1 / (1 + math.exp(-sizes[index] / 100))),
        }
        for index in (1, 2, 0)
    ]
    assert response.json() == {
        "id": response.headers["x-request-id"].replace("req_", "rerank-"),
        "model": "rank",
        "usage": {"prompt_tokens": sum(sizes), "total_tokens": sum(sizes)},
        "results": results,
    }
    as_objects = {**body, "query": {"text": body["query"]}, "documents": [{"text": text} for text in documents]}
    first = (await ranker.http.post(path, json={**as_objects, "top_n": 1, "return_documents": False})).json()
    assert first["results"] == [{"index": 1, "relevance_score": results[0]["relevance_score"]}]
    assert [event.endpoint for event in ranker.usage()] == ["rerank"] * 2


async def test_equal_documents_stay_in_order_and_any_model_ranks_by_cosine(gateway: Gateway) -> None:
    body = {"model": "base", "query": "a", "documents": ["b", "c", "b"], "top_n": 0}
    document = (await gateway.http.post("/rerank", json=body)).json()
    assert [one["index"] for one in document["results"]] == [0, 1, 2]
    assert [one["relevance_score"] for one in document["results"]] == pytest.approx([1.0] * 3)
    assert len(gateway.engine.adds) == 3


async def test_each_side_can_be_limited_in_tokens(ranker: Gateway, tokenizer: ModelTokenizer) -> None:
    query, text = (
        "Where is the harbour of Port Vale? " * 8,
        "The harbour of Port Vale lies quiet, as it always does. " * 3,
    )
    limits = {"max_tokens_per_query": 5, "max_tokens_per_doc": 7}
    for path, body in (
        ("/rerank", {"query": query, "documents": [text, "Here."]}),
        ("/score", {"text_1": query, "text_2": [text, "Here."]}),
    ):
        ranker.engine.adds.clear()
        assert (await ranker.http.post(path, json={"model": "rank", **body, **limits})).status_code == 200
        begins = [
            tokenizer.decode(tokenizer.encode(one, add_special_tokens=False)[:most])
            for one, most in ((query, 5), (text, 7))
        ]
        assert [add.prompt for add in ranker.engine.adds] == [
            tokenizer.joined(begins[0], begins[1]),
            tokenizer.joined(begins[0], "Here."),
        ]
        assert (await ranker.http.post(path, json={"model": "rank", **body})).status_code == 200
        assert ranker.engine.adds[-2].prompt == tokenizer.joined(query, text)


async def test_other_models_score_by_the_cosine_of_embeddings_that_are_made_once(
    gateway: Gateway, tokenizer: ModelTokenizer
) -> None:
    def script(add: Add) -> Script:
        return Script(token_ids=(), state=(3.0, 4.0, 0.0) if add.prompt == tokenizer.encode("a") else (0.0, 2.0, 0.0))

    gateway.engine.script = script
    body = {"model": "base", "queries": ["a", "b", "a"], "documents": ["b", "b", "a"]}
    response = await gateway.http.post("/v1/score", json=body)
    assert [one["score"] for one in response.json()["data"]] == pytest.approx([0.8, 1.0, 1.0])
    num_tokens = len(tokenizer.encode("a")) + len(tokenizer.encode("b"))
    assert response.json()["usage"]["prompt_tokens"] == num_tokens == gateway.usage()[0].prompt_tokens
    assert len(gateway.engine.adds) == 2


async def test_a_version_says_what_it_is_for(classifiers: Gateway) -> None:
    classifiers.add_adapter("acme", "search", task=EMBEDDING_TASK)
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"model": "mood", "messages": [{"role": "user", "content": "a"}]}, "call /classify"),
        ("/v1/completions", {"model": "rank", "prompt": "a"}, "call /classify or /score"),
        ("/v1/embeddings", {"model": "mood", "input": "a"}, "is a classifier: call /classify"),
        ("/v1/responses", {"model": "mood", "input": "a"}, "call /classify"),
        ("/classify", {"model": "base", "input": "a"}, "base is not a classifier"),
        ("/classify", {"model": "search", "input": "a"}, "acme/search@1 is not a classifier"),
        ("/score", {"model": "mood", "text_1": "a", "text_2": "b"}, "has 3 classes"),
    ]
    for path, body, message in calls:
        response = await classifiers.http.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "model", "wrong_task"), path
        assert message in error["message"]
    assert not classifiers.engine.adds
    assert not classifiers.usage()
    assert (await classifiers.openai.embeddings.create(model="search", input="a")).data


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no input": ("/classify", {}, "input"),
    "a stream": ("/classify", {"input": "a", "stream": True}, "stream"),
    "dimensions": ("/classify", {"input": "a", "dimensions": 3}, "dimensions"),
    "one side": ("/score", {"text_1": "a"}, "text_1"),
    "no side": ("/score", {}, "text_1"),
    "sides of two kinds": ("/score", {"text_1": "a", "documents": ["b"]}, "documents"),
    "three sides": ("/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "queries"),
    "no texts": ("/score", {"text_1": "a", "text_2": []}, "text_2"),
    "tokens": ("/score", {"text_1": "a", "text_2": [1]}, "text_2"),
    "other numbers": ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    "too many": ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
    "a conversation and an input": (
        "/classify",
        {"messages": [{"role": "user", "content": "a"}], "input": "a"},
        "input",
    ),
    "no messages": ("/classify", {"messages": []}, "messages"),
    "a message of no role": ("/classify", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
    "a prompt for an answer, and none": (
        "/classify",
        {
            "messages": [{"role": "user", "content": "a"}],
            "add_generation_prompt": True,
            "continue_final_message": True,
        },
        "continue_final_message",
    ),
    "a long conversation": ("/classify", {"messages": [{"role": "user", "content": "a " * 300}]}, "messages"),
    "another task": ("/pooling", {"input": "a", "task": "token_embed"}, "task"),
    "no query": ("/rerank", {"documents": ["a"]}, "query"),
    "no documents": ("/rerank", {"query": "a", "documents": []}, "documents"),
    "a document of another form": ("/rerank", {"query": "a", "documents": [{"body": "b"}]}, "documents"),
    "several queries": ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
    "too many documents": ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
    "a negative number of results": ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    "a negative limit": ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": -5}, "max_tokens_per_doc"),
    "an instruction": ("/rerank", {"query": "a", "documents": ["b"], "instruction": "Find"}, "instruction"),
    "the size of classes": ("/pooling", {"input": "a", "dimensions": 1}, "dimensions"),
    "the length of classes": (
        "/pooling",
        {"messages": [{"role": "user", "content": "a"}], "task": "classify", "normalize": True},
        "normalize",
    ),
    "too long": ("/score", {"text_1": "a " * 200, "text_2": "b " * 200}, "text_2"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_is_refused_by_name(classifiers: Gateway, case: str) -> None:
    path, fields, param = BAD[case]
    response = await classifiers.http.post(path, json={"model": "rank", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not classifiers.engine.adds


LONG = "a " * 300


@pytest.mark.parametrize(
    ("path", "sides", "place"),
    [
        pytest.param("/rerank", {"query": "q", "documents": [LONG, "b"]}, "documents[0]", id="first document"),
        pytest.param(
            "/rerank", {"query": "q", "documents": ["b", "b", "b", LONG]}, "documents[3]", id="after a duplicate"
        ),
        pytest.param("/rerank", {"query": "q", "documents": LONG}, "documents", id="only document"),
        pytest.param("/rerank", {"query": LONG, "documents": ["b", "c"]}, "query", id="query"),
        pytest.param("/score", {"text_1": [LONG], "text_2": ["b", "c"]}, "text_1", id="only text"),
        pytest.param("/score", {"text_1": ["a", LONG], "text_2": ["b", LONG]}, "text_1[1]", id="on both sides"),
    ],
)
async def test_an_error_names_the_text_that_has_no_embedding(
    gateway: Gateway, path: str, sides: dict[str, Any], place: str
) -> None:
    refused = await gateway.http.post(path, json={"model": "base", **sides})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert (error["param"], f" {place} has " in error["message"]) == (place.partition("[")[0], True), error


async def test_an_error_names_the_field_of_a_text_of_too_many_characters(gateway: Gateway) -> None:
    body = {"model": "base", "query": "a" * 100_000, "documents": ["b", "c"]}
    error = (await gateway.http.post("/rerank", json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "query")


async def test_large_logits_are_probabilities_too(classifiers: Gateway) -> None:
    classifiers.engine.script = lambda add: Script(token_ids=(), state=(3e38, -3e38, 0.0)[: add.num_labels])
    for model, probs in (("mood", [1.0, 0.0, 0.0]), ("tags", [1.0, 0.0])):
        [one] = (await classifiers.http.post("/classify", json={"model": model, "input": "a"})).json()["data"]
        assert one["probs"] == probs


async def test_openais_client_gets_the_error(classifiers: Gateway) -> None:
    with pytest.raises(BadRequestError, match="is a classifier"):
        await classifiers.openai.chat.completions.create(model="mood", messages=[{"role": "user", "content": "a"}])


async def test_a_text_that_is_scored_against_many_counts_with_its_repetitions(classifiers: Gateway) -> None:
    body = {"model": "acme/rank", "text_1": "x" * 1_000_000, "truncate_prompt_tokens": 8}
    refused = await classifiers.http.post("/score", json={**body, "text_2": ["y"] * 1000})
    assert (refused.status_code, refused.json()["error"]["message"].startswith("the texts and pairs")) == (400, True)
    assert (await classifiers.http.post("/score", json={**body, "text_2": ["y"] * 2})).status_code == 200
