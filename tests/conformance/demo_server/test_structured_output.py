from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.conformance.served import Deployment
from tests.demo_base import DEMO_BASE

ADAPTERS = ("pirate", "formal", "json")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server(demo_server: Deployment) -> tuple[Deployment, OpenAI]:
    made = demo_server
    made.json("tenants", "create", "forms")
    for name in ADAPTERS:
        pushed = made.command(
            "adapters", "push", str(DEMO_BASE.parent / "adapters" / name), "--tenant", "forms", "--name", name
        )
        assert pushed.returncode == 0, pushed.stderr
    return made, made.client(made.json("keys", "create", "--tenant", "forms")["secret"])


def ask(client: OpenAI, model: str, seed: int, *, max_tokens: int = 200, **fields: Any) -> Any:
    return client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Tell me about person {seed}"}],
        max_tokens=max_tokens,
        seed=seed,
        **fields,
    )


def billed(made: Deployment) -> int:
    done = made.command("usage", "--tenant", "forms", "--format", "json")
    assert done.returncode == 0, done.stderr
    return sum(
        result["completion_tokens"] for bucket in json.loads(done.stdout)["data"] for result in bucket["results"]
    )


def test_every_adapter_of_a_batch_follows_the_schema(server: tuple[Deployment, OpenAI]) -> None:
    _, client = server
    models = ["demo-base", *(f"forms/{name}" for name in ADAPTERS)] * 3

    def one(seed: int) -> Any:
        return ask(client, models[seed], seed, response_format=FORMAT)

    with ThreadPoolExecutor(len(models)) as pool:
        for answer in pool.map(one, range(len(models))):
            assert answer.choices[0].finish_reason == "stop"
            jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_free_requests_answer_the_same_next_to_constrained_ones(server: tuple[Deployment, OpenAI]) -> None:
    _, client = server
    alone = [ask(client, "forms/pirate", seed).choices[0].message.content for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        constrained = [pool.submit(ask, client, "forms/formal", seed, response_format=FORMAT) for seed in range(4)]
        free = [pool.submit(ask, client, "forms/pirate", seed) for seed in range(4)]
        assert [one.result().choices[0].message.content for one in free] == alone
        for one in constrained:
            jsonschema.validate(json.loads(one.result().choices[0].message.content), SCHEMA)


def test_choices_streams_and_log_probabilities_follow_the_schema(server: tuple[Deployment, OpenAI]) -> None:
    _, client = server
    answer = ask(client, "demo-base", 1, n=3, logprobs=True, top_logprobs=2, response_format=FORMAT)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert b"".join(bytes(one.bytes) for one in choice.logprobs.content).decode() == choice.message.content
    chunks = ask(client, "demo-base", 2, stream=True, response_format=FORMAT)
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    jsonschema.validate(json.loads(text), SCHEMA)


def test_the_bill_counts_what_was_generated(server: tuple[Deployment, OpenAI]) -> None:
    made, client = server
    before = billed(made)
    answers = [ask(client, "forms/json", seed, response_format=FORMAT) for seed in range(3)]
    assert billed(made) - before == sum(one.usage.completion_tokens for one in answers)


def test_a_refused_schema_costs_nothing_and_names_its_keyword(server: tuple[Deployment, OpenAI]) -> None:
    made, client = server
    before = billed(made)
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "contains": {}}}}
    with pytest.raises(BadRequestError, match="contains") as refusal:
        ask(client, "demo-base", 1, response_format=wrong)
    assert (refusal.value.code, refusal.value.param) == ("grammar_refused", "response_format.json_schema.schema")
    assert billed(made) == before


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_forbidden_tokens_are_never_generated(server: tuple[Deployment, OpenAI], is_streamed: bool) -> None:
    _, client = server
    asked: dict[str, Any] = {"n": 2, "temperature": 0.9, "max_tokens": 12}

    def texts(**fields: Any) -> list[str]:
        if not is_streamed:
            answer = ask(client, "forms/pirate", 3, extra_body=fields, **asked)
            return [one.message.content or "" for one in answer.choices]
        found = ["", ""]
        for chunk in ask(client, "forms/pirate", 3, stream=True, extra_body=fields, **asked):
            for choice in chunk.choices:
                found[choice.index] += choice.delta.content or ""
        return found

    word = texts()[0].split()[0]
    assert not any(word in text for text in texts(bad_words=[word]))
    assert all(set(text) <= {"a", "b"} for text in texts(allowed_token_ids=token_ids("ab")))


def token_ids(text: str) -> list[int]:
    tokenizer = ModelTokenizer.load(DEMO_BASE)
    return [tokenizer.encode(one, add_special_tokens=False)[-1] for one in text]
